"""Panels of several runs, their colours, and the words for a mouse and a finger."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.pages.chromium import Chromium

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

HINTS = (
    "return [...document.querySelectorAll('.hint')].filter(each => each.checkVisibility())"
    ".map(each => each.innerText)"
)


@pytest.fixture
def page(browser: Chromium, open_board: Any, runs: Path) -> Chromium:
    browser.device(1440, 950)
    browser.open(open_board(runs).server.url)
    browser.until("return document.body.dataset.first")
    return browser


def test_panels_of_each_source_are_folded_where_there_are_several_runs(page: Chromium) -> None:
    shown = (
        "return cards.filter(card => card.element.checkVisibility()).map(card => card.panel.key)"
    )
    page.until(f"return (() => {{ {shown} }})().includes('Held-out loss')")
    folds = "return [...document.querySelectorAll('.fold summary')].map(each => each.innerText)"
    assert page.run(folds)[0] == "Loss by source 2 panels"
    assert not {"loss/web", "speed/code"} & set(page.run(shown))
    page.click(".fold summary")
    web = "return cards.find(card => card.panel.key === 'loss/web').plot"
    page.until(f"{web}.curves.length === 2")
    page.click("#runs input", 1)  # the page is built anew
    page.click("#runs input", 1)
    page.until(f"{web}.curves.length === 2")
    assert {"loss/web", "loss/code"} <= set(page.run(shown))
    page.click(".fold summary")
    assert "loss/web" not in page.run(shown)


def test_a_run_keeps_its_colour_when_another_appears(page: Chromium) -> None:
    colours = (
        "state.runs.unshift({...state.runs[0], id: 'new', number: 2});"
        "return state.runs.map(colourOf).map(colour => state.palette.indexOf(colour))"
    )
    assert page.run("return state.runs.map(colourOf)") == page.run("return state.palette")[:2]
    assert page.run(colours) == [2, 0, 1]


def test_a_mouse_has_its_own_words(page: Chromium) -> None:
    [hint] = page.run(HINTS)
    assert "drag: zoom" in hint and "click" in hint and "tap" not in hint
    page.device(390, 844)
    page.click("#tabs [role=tab]", 4)
    page.until("return document.querySelector('#view .scroll.cut')")
    cut = "return getComputedStyle(document.querySelector('#view .scroll'), '::after').content"
    assert "scroll sideways" in page.run(cut)


def test_a_finger_has_its_own_words(page: Chromium) -> None:
    page.device(390, 844, phone=True)
    assert page.run(HINTS) == ["pinch: zoom · drag: move · tap: rows of the step"]
