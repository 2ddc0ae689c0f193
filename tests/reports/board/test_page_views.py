"""The board in a real Chromium: the view in the address, scores, groups, tags and notes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.pages.board_runs import write_scores
from support.pages.chromium import Chromium

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]


@pytest.fixture
def page(browser: Chromium, open_board: Any, runs: Path) -> Chromium:
    write_scores(runs / "base", {10: 0.5, 18: 0.625})
    (runs / "other").rename(runs / "other <b>&")
    browser.device(1440, 950)
    browser.open(open_board(runs).server.url)
    browser.until("return document.body.dataset.first")
    return browser


def address(page: Chromium) -> dict[str, str]:
    script = "return Object.fromEntries(new URLSearchParams(location.hash.slice(1)))"
    words: dict[str, str] = page.run(script)
    return words


def test_a_reload_shows_the_same_view(page: Chromium) -> None:
    page.run("zoom(5, 10)")
    page.click("#axis button:nth-child(2)")
    page.click("#logy")
    page.run("zoom(1000, 2500)")
    page.click("#runs li:nth-child(2) input")
    page.until("return location.hash.includes('hide')")
    words = address(page)
    assert words["axis"] == "tokens" and words["logY"] == "1"
    assert words["window"].split("..") == ["1000", "2500"]
    page.run("location.reload()")
    page.until("return document.body.dataset.first && state.runs.length")
    view = (
        "return [state.axis, state.low, state.high, state.logY, shown().length, $('logy').checked]"
    )
    assert page.run(view) == ["tokens", 1000, 2500, True, 1, True]
    page.click("#all")
    page.click("#reset")
    page.click("#axis button:nth-child(1)")
    page.click("#logy")
    page.until("return location.hash === ''")


def test_a_link_to_a_step_opens_it(page: Chromium) -> None:
    run = page.run("return state.runs.find(run => run.name === 'base').id")
    page.run("openStep(arguments[0], 12)", run)
    page.until("return document.querySelector('#drawer .proof.good')")
    page.run("writeAddress()")
    link = page.run("return location.href")
    page.click("#drawer .close")
    page.until("return location.hash === ''")
    page.open("about:blank")
    page.open(link)
    page.until("return document.querySelector('#drawer .proof.good')")
    assert page.run("return $('drawer').querySelector('h2').firstChild.data") == "Step 12"
    page.run("location.hash = '#tab=Checkpoints'")
    page.until("return document.querySelector('#view h2')?.innerText === 'Checkpoints'")
    page.run("$('drawer').close(); location.hash = '#tab=nowhere&axis=x&window=a..b&step=none'")
    page.until("return state.tab === 'Curves' && state.low === null && state.axis === 'step'")


def test_scores_over_training_are_curves(page: Chromium) -> None:
    page.run("state.hidden.clear(); state.tab = 'Scores'; changed()")
    page.until("return document.querySelector('[data-score] canvas')?.width > 100")
    script = (
        "const card = document.querySelector('[data-score]');"
        "const canvas = card.querySelector('canvas');"
        "const data = canvas.getContext('2d')"
        ".getImageData(0, 0, canvas.width, canvas.height).data;"
        "const hex = v => v.toString(16).padStart(2, 0), found = new Set();"
        "for (let i = 0; i < data.length; i += 4)"
        " found.add('#' + [...data.slice(i, i + 3)].map(hex).join(''));"
        "return [card.dataset.score, found.has(colourOf(state.runs[0])),"
        " document.querySelectorAll('[data-score]').length]"
    )
    name, drawn_in_colour, count = page.run(script)
    assert json.loads(name) == ["arc <easy>", "acc"] and drawn_in_colour
    assert count == 1, "what was measured once is no curve"


def test_notes_are_saved_beside_the_run_and_group_the_list(page: Chromium, runs: Path) -> None:
    page.run(
        "state.focus = state.runs.find(run => run.name === 'base').id;"
        "state.tab = 'Notes'; changed()"
    )
    page.until("return document.querySelector('.notes textarea')")
    page.run(
        "for (const [place, words] of [['input', 'first, <i>1B'], ['textarea', 'new data']]) {"
        "const field = document.querySelector(`.notes ${place}`); field.value = words;"
        "field.dispatchEvent(new Event('input')) } drawView()"
    )
    page.until("return document.querySelector('.notes textarea').value === 'new data'")
    page.click("#save")
    page.until("return document.querySelector('.notes [role=status]').innerText.includes('saved')")
    saved = yaml.safe_load((runs / "base/notes.yaml").read_text())
    assert saved == {"tags": ["first", "<i>1B"], "note": "new data"}
    page.run("state.group = 'tag'; changed()")
    names = "return [...document.querySelectorAll('#runs .group')].map(item => item.innerText)"
    assert [name.split("\n")[0] for name in page.run(names)] == ["first, <i>1B", "no tag"]
    page.click("#runs .group input")
    assert page.run("return shown().map(run => run.name)") == ["other <b>&"]
    page.click("#runs .group input")
    page.click("#runs .tag")
    assert page.run("return shown().map(run => run.name)") == ["base"]
    page.run("state.filter = $('filter').value = state.group = ''; changed()")
    (runs / "base/notes.yaml").unlink()
