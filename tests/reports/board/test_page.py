"""The board in a real Chromium: what is clicked does what it says, and nothing leaves the machine.

Chromium and chromedriver are installed with apt-get where they are missing.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.pages.board_runs import write_checkpoint, write_plan, write_run, write_scores
from support.pages.chromium import Chromium

from headrace.reports.board.board import Board
from headrace.reports.board.server import Server

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

STEPS = 60


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("page")
    plan = write_plan(root, STEPS)
    write_checkpoint(write_run(root / "runs/base", plan), plan, 30)
    write_scores(root / "runs/base", {10: 0.5, 30: 0.625})
    write_scores(write_run(root / "runs/other <b>&", plan, lr=2e-3, taken=40), {30: 0.25})
    return root / "runs"


@pytest.fixture(scope="module")
def url(runs: Path) -> Iterator[str]:
    board = Board([str(runs)])
    board.scan()
    board.refresh()
    board.follow()
    server = Server(board, 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.url
    board.end()
    server.shutdown()
    server.server_close()


@pytest.fixture
def page(browser: Chromium, url: str) -> Iterator[Chromium]:
    """The page at its begin; at the end of the test, nothing may have gone wrong in it."""
    browser.device(1440, 950)
    browser.requests()
    browser.errors()
    browser.open(url)
    browser.until("return document.body.dataset.first")
    yield browser
    assert browser.errors() == []
    assert browser.run("return document.body.dataset.error || ''") == ""
    sent = browser.requests()
    assert len(sent) > 4
    host = url.rsplit("/", 2)[0]
    assert all(item.startswith((f"{host}/", "data:,")) for item in sent), sent


def canvas(page: Chromium, panel: str = "Loss") -> list[float]:
    script = (
        "const plot = document.querySelector(`[data-panel='${arguments[0]}'] canvas`);"
        "plot.scrollIntoView({block: 'center'}); const box = plot.getBoundingClientRect();"
        "return [box.left, box.top, box.width, box.height]"
    )
    box: list[float] = page.run(script, panel)
    return box


def at_step(page: Chromium, step: float, panel: str = "Loss") -> tuple[float, float]:
    """Return the place of a step's point of the first curve in the window."""
    left, top, *_ = canvas(page, panel)
    script = (
        "const card = cards.find(each => each.panel.key === arguments[0]);"
        "const curve = card.plot.curves[0];"
        "const i = nearest(curve.x, arguments[1]), s = card.plot.scale;"
        "return [s.px(curve.x[i]), s.py(curve.mean[i])]"
    )
    x, y = page.run(script, panel, step)
    return left + x, top + y


def window(page: Chromium) -> list[float | None]:
    result: list[float | None] = page.run("return [state.low, state.high]")
    return result


def inked(page: Chromium) -> int:
    """Return the number of colours in the plot of the loss: more than an empty one has."""
    script = (
        "const plot = document.querySelector('[data-panel=Loss] canvas');"
        "const data = plot.getContext('2d').getImageData(0, 0, plot.width, plot.height).data;"
        "const found = new Set(); for (let i = 0; i < data.length; i += 4)"
        " found.add(data.slice(i, i + 4).join()); return found.size"
    )
    return int(page.run(script))


def drawn(page: Chromium) -> str:
    turn: str = page.run("return document.body.dataset.turn")
    return turn


def test_a_drag_zooms_all_plots_and_the_button_shows_the_whole_run(page: Chromium) -> None:
    assert inked(page) > 20
    x, y = at_step(page, 10)
    to, _ = at_step(page, 20)
    before = drawn(page)
    page.mouse(("move", x, y), ("down", 0, 0), ("move", to, y), ("up", 0, 0))
    low, high = window(page)
    assert low == pytest.approx(10, abs=0.3) and high == pytest.approx(20, abs=0.3)
    page.until("return document.body.dataset.turn !== arguments[0]", before)
    ranges = page.run(
        "const seen = cards.filter(card => card.seen).map(card => card.plot.scale);"
        "return seen.map(scale => [scale.x0, scale.x1])"
    )
    assert len(ranges) > 2 and all(item == [low, high] for item in ranges)
    page.mouse(("move", x, y), ("down", 0, 0), ("up", 0, 0))  # a click is no zoom
    assert window(page) == [low, high]
    page.until("return document.querySelector('#drawer .proof')")
    page.click("#drawer .close")
    page.click("#reset")
    assert window(page) == [None, None]


def test_wheel_and_keys_zoom_and_move(page: Chromium) -> None:
    x, y = at_step(page, 30)
    scroll = {"type": "scroll", "x": round(x), "y": round(y), "deltaX": 0, "deltaY": -100}
    turn = {"type": "wheel", "id": "wheel", "actions": [scroll]}
    control = {"type": "key", "id": "keys", "actions": [{"type": "keyDown", "value": "\ue009"}]}
    page.post("/actions", {"actions": [control]})
    page.post("/actions", {"actions": [turn]})
    control["actions"] = [{"type": "keyUp", "value": "\ue009"}]
    page.post("/actions", {"actions": [control]})
    low, high = page.until("return state.low === null ? null : [state.low, state.high]")
    assert 0 <= low < 30 < high < 59
    press = (
        "document.querySelector('[data-panel=Loss] canvas')"
        ".dispatchEvent(new KeyboardEvent('keydown', {key: arguments[0]}))"
    )
    page.run(press, "+")
    nearer = window(page)
    assert low < nearer[0] < nearer[1] < high  # type: ignore[operator]
    page.run(press, "ArrowRight")
    moved = window(page)
    assert moved[0] > nearer[0] and moved[1] - moved[0] == pytest.approx(nearer[1] - nearer[0])  # type: ignore[operator]
    page.run(press, "0")
    assert window(page) == [None, None]


def test_the_pointer_shows_values_and_a_click_shows_the_rows(page: Chromium, runs: Path) -> None:
    file = runs / "other <b>&/metrics.jsonl"  # its curve is drawn over that of the other run
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    x, y = at_step(page, 7)
    page.mouse(("move", x, y))
    tip = page.until(
        "return document.querySelector('[data-panel=Loss] .tip:not([hidden])')?.innerText"
    )
    assert "step 7" in tip and f"{lines[7]['loss']:.4g}" in tip and "other <b>&" in tip
    page.mouse(("move", x, y), ("down", 0, 0), ("up", 0, 0))
    page.until("return document.querySelectorAll('#drawer .rowcard').length === 4")
    text = page.run("return document.getElementById('drawer').innerText")
    assert "Step 7" in text and "Proved" in text and f"{lines[7]['loss']:.4f}" in text
    assert "slowest rank 3: the others wait for it in 5% of the step" in text
    assert "corpus-0.txt:" in text and "row 28" in text and "row 31" in text
    page.click("[aria-label='step after']")
    page.until("return document.querySelector('#drawer h2').innerText.startsWith('Step 8')")
    page.until("return document.querySelector('#drawer .proof.good')")
    page.mouse(("move", 40, 400), ("down", 0, 0), ("up", 0, 0))  # beside the drawer
    assert page.run("return document.getElementById('drawer').open") is False


def test_text_that_is_cut_can_be_opened(page: Chromium) -> None:
    """Twenty short lines are cut, a long one that fits is not."""
    piece = "{tokens: 1, first: 0, at: 0, document: 1, position: 2, file: 'a', text: arguments[0]}"
    row = f"{{row: 1, source: 'a', epoch: 0, phase: 'p', hash: 'ff', documents: [{piece}]}}"
    result = f"{{proved: true, count: 1, page: 8, first: 0, rows: [{row}]}}"
    show = (
        f"const found = {result}; window.fetch = async () => new Response(JSON.stringify(found));"
        "return openStep(state.runs[0].id, 7).then(() => {"
        " const button = document.querySelector('#drawer .more');"
        " const before = document.querySelector('#drawer pre').clientHeight; button.click();"
        " const after = document.querySelector('#drawer pre').clientHeight;"
        " return [button.hidden, after > before] })"
    )
    assert page.run(show, "x\n" * 20) == [False, True]
    assert page.run(show, "x " * 160) == [True, False]


def test_runs_and_curves_are_switched_off_and_on(page: Chromium) -> None:
    shown = (
        "return cards.find(card => card.panel.key === arguments[0])"
        "?.plot.curves.map(curve => curve.label)"
    )

    def become(panel: str, *curves: str) -> None:
        """Wait for the curves of a panel: the page draws again when an answer has come."""
        query = f"return JSON.stringify((() => {{ {shown} }})()) === JSON.stringify(arguments[1])"
        page.until(query.replace("arguments[0]", repr(panel)), panel, curves)

    become("Loss", "base", "other <b>&")
    assert page.run("return document.querySelectorAll('#runs b').length") == 0, "a name became HTML"
    page.click("#runs input", 1)
    become("Loss by source", "web", "code")
    page.click("[data-panel='Loss by source'] .key")
    become("Loss by source", "code")
    page.click("[data-panel='Loss by source'] .key")
    become("Loss by source", "web", "code")
    page.click("#runs input", 1)
    become("Loss", "base", "other <b>&")
    page.run("filter.value = 'lr=0.002'; filter.dispatchEvent(new Event('input'))")
    page.until(shown + "?.length === 1", "Loss")
    result = (
        "filter.value = arguments[0]; filter.dispatchEvent(new Event('input'));"
        "return [...document.querySelectorAll('#runs .title')].map(each => each.innerText)"
    )
    assert page.run(result, "lr=0.002") == page.run(result, "lr=2e-3") == ["other <b>&"]
    assert page.run(result, "lr=0.00") == [] and page.run(result, "optimizer.lr=") != []
    assert page.run(result, "BASE") == page.run(result, "lr = 1e-3") == ["base"]


def test_a_source_has_one_colour_on_all_tabs(page: Chromium) -> None:
    page.click("#runs input", 1)
    page.until("return cards.some(card => card.panel.key === 'Held-out loss')")
    colours = (
        "return Object.fromEntries([...document.querySelectorAll(arguments[0] + ' .key')]"
        ".map(key => [key.textContent, getComputedStyle(key.querySelector('i')).backgroundColor]))"
    )
    losses, held_out = (
        page.until(f"const found = (() => {{ {colours} }})(); return found.web && found", panel)
        for panel in ("[data-panel='Loss by source']", "[data-panel='Held-out loss']")
    )
    page.click("#tabs [role=tab]", 1)
    page.until("return document.querySelector('#view .strip')")
    mixture = page.run(colours, "#view")
    assert mixture == losses == {name: held_out[name] for name in ("web", "code")}


def test_a_reader_without_a_mouse_stays_where_they_are(page: Chromium) -> None:
    focus = "return document.activeElement.outerHTML"
    page.run("document.querySelectorAll('#runs input')[1].focus()")
    before = page.run(focus)
    page.run("document.querySelector('#runs input').dataset.old = 'yes'")
    page.until("return !document.querySelector('#runs input').dataset.old")  # drawn anew
    assert page.run(focus) == before and "checkbox" in before
    page.run("const tab = document.querySelectorAll('#tabs button')[2]; tab.focus(); tab.click()")
    page.until("return document.querySelector('#view table.sides')")
    assert "Settings" in page.run(focus)
    page.run("document.querySelector('#tabs button').click()")
    page.run(
        "const tokens = document.querySelectorAll('#axis button')[1]; tokens.focus();tokens.click()"
    )
    assert "tokens" in page.run(focus)
    page.run("document.querySelector('#axis button').click()")
    page.until("return cards[0].plot.curves.length && cards[0].plot.scale.x1 === 59")
    page.run("document.querySelector('[data-panel=Loss] canvas').focus()")
    enter = {"type": "keyDown", "value": "\ue007"}
    keys = {"type": "key", "id": "keys", "actions": [enter, {**enter, "type": "keyUp"}]}
    page.post("/actions", {"actions": [keys]})
    page.until("return /^Step (29|30)/.test(document.querySelector('#drawer h2')?.innerText)")
    page.until("return document.querySelector('#drawer .proof.good')")
    page.run("document.querySelector('[aria-label=\"step after\"]').focus()")
    page.post("/actions", {"actions": [keys]})
    page.until("return /^Step (30|31)/.test(document.querySelector('#drawer h2').innerText)")
    page.until("return document.querySelector('#drawer .proof.good')")
    assert "step after" in page.run(focus)


def test_axes_smoothing_and_logarithms(page: Chromium) -> None:
    ends = "const s = cards[0].plot.scale; return [s.x0, s.x1]"
    for number, last in ((1, 60 * 256), (2, 60 * 0.25 / 3600), (0, 59)):
        before = drawn(page)
        page.click("#axis button", number)
        page.until("return document.body.dataset.turn !== arguments[0]", before)
        assert page.run(ends)[1] == pytest.approx(last)
    rough = page.run("return [...cards[0].plot.curves[0].line]")
    page.run("smooth.value = 30; smooth.dispatchEvent(new Event('input'))")
    fine = page.run("return [...cards[0].plot.curves[0].line]")
    assert max(fine) - min(fine) < (max(rough) - min(rough)) / 2
    assert sum(fine) / len(fine) == pytest.approx(sum(rough) / len(rough), rel=0.1)
    before = drawn(page)
    page.click("#logx")
    page.until("return document.body.dataset.turn !== arguments[0]", before)
    middle = page.run("const s = cards[0].plot.scale; return s.back((s.px(s.x0) + s.px(s.x1)) / 2)")
    assert middle == pytest.approx((1 * 59) ** 0.5, rel=0.02)
    page.click("#logy")
    low, high = page.run("const s = cards[0].plot.scale; return [s.y0, s.y1]")
    assert low > 0 and page.run("return cards[0].plot.scale.up(TOP + NAMES)") == pytest.approx(high)


@pytest.mark.parametrize(
    ("tab", "words"),
    [
        (1, ["stable", "anneal", "75%", "25%", "7.68K of 7.68K"]),
        (2, ["Settings that differ", "optimizer.lr", "0.001", "0.002"]),
        (3, ["FSDP2", "dp 2", "tp 2", "3GB"]),
        (4, ["30", "whole", "7.68K"]),
        (5, ["arc <easy>", "0.6250 ± 0.01", "0.2500 ± 0.01", "step 30", "75.00%"]),
        (6, ["resume", "finish", "run.yaml", "scores.jsonl"]),
    ],
)
def test_tabs_show_the_run(page: Chromium, tab: int, words: list[str]) -> None:
    page.click("#tabs [role=tab]", tab)
    shown = "return document.getElementById('view').innerText.includes(arguments[0])"
    page.until(shown, words[0])
    text = page.run("return document.getElementById('view').innerText")
    assert all(word in text for word in words), text


def test_scores_of_one_run_stand_beside_each_other_by_step(page: Chromium) -> None:
    page.click("#runs input", 1)
    page.click("#tabs [role=tab]", 5)
    page.until("return document.querySelectorAll('#view th').length > 3")
    heads = page.run(
        "return [...document.querySelectorAll('#view thead th')].map(e => e.innerText)"
    )
    cells = page.run("return [...document.querySelectorAll('#view td')].map(e => e.innerText)")
    assert heads == ["task", "metric", "step 10", "step 30"]
    assert "0.5000 ± 0.01" in cells and "0.6250 ± 0.01" in cells and "0.2500 ± 0.01" not in cells


def test_new_steps_appear_by_themselves(page: Chromium, runs: Path) -> None:
    file = runs / "other <b>&/metrics.jsonl"
    text = file.read_text()
    last = json.loads(text.splitlines()[-1])
    with file.open("a") as lines:
        line = {**last, "step": 40, "tokens": last["tokens"] + 256, "loss": None}
        lines.write(json.dumps(line) + "\n")
    page.until("return cards[0].plot.curves[1].x.length === 41")
    page.until("return document.getElementById('runs').innerText.includes('loss not finite')")
    file.write_text(text)  # as a resume cuts the run back
    page.until("return cards[0].plot.curves[1].x.length === 40")


@pytest.mark.parametrize("dark", [False, True])
def test_nothing_is_cut_on_a_phone(page: Chromium, dark: bool) -> None:
    page.device(390, 844, phone=True, dark=dark)
    page.run("location.reload()")
    page.until("return document.body.dataset.first")
    assert page.run("return Math.max(document.documentElement.scrollWidth, innerWidth)") == 390
    over = (
        "return [...document.querySelectorAll('main *')].filter(each =>"
        " each.getBoundingClientRect().right > 391"
        " && !each.closest('.scroll, #tabs')).length"
    )
    assert page.run(over) == 0
    page.click("#tabs [role=tab]", 1)
    choice = "return document.querySelector('#which select')"
    page.until(choice)
    page.run(f"{choice}.options[0].textContent = 'a-long-name-'.repeat(9)".replace("return ", ""))
    box = page.run(f"{choice}.getBoundingClientRect()")
    assert 0 <= box["left"] < box["right"] <= 390, "the name of the run is off the screen"
    page.click("#tabs [role=tab]", 2)
    page.until("return document.querySelector('#view table.sides')")
    right = "return document.querySelector('#view td:last-child').getBoundingClientRect().right"
    assert page.run(right) < 390, "the setting of a run is off the screen"
    page.click("#tabs [role=tab]", 4)
    page.until("return document.querySelector('#view table:not(.sides)')")
    hint = "return getComputedStyle(document.querySelector('#view .scroll'), '::after').content"
    assert "swipe sideways" in page.run(hint), "the table of checkpoints is wider than a phone"
    page.click("#list summary")
    assert page.run("return document.querySelectorAll('#runs .run').length") == 2
    paper = page.run("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, paper.strip("rgb()").split(","))) < 150) is dark


def test_a_tap_on_a_phone_shows_the_rows(page: Chromium) -> None:
    page.device(390, 844, phone=True)
    page.run("location.reload()")
    page.until("return cards[0]?.plot.curves.length && cards[0].plot.scale")
    page.tap(*at_step(page, 30))
    page.until("return document.querySelector('#drawer .proof.good')")
    assert page.run("return document.getElementById('drawer').open")
    left, top = page.run(
        "const box = document.querySelector('#drawer h2').getBoundingClientRect();"
        "return [box.left, box.top]"
    )
    page.tap(left - 10, top)  # its own margin
    assert page.run("return document.getElementById('drawer').open")


def test_a_page_of_an_earlier_start_says_so(browser: Chromium, runs: Path) -> None:
    """Another board has its port, and another token."""
    live = "return document.getElementById('live').textContent"
    server = Server(Board([str(runs)]), 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    browser.open(server.url)
    browser.until(f"{live} === 'live'")
    server.token = "another"
    browser.until(f"{live}.includes('started anew: open its new URL')")
    browser.open("about:blank")
    browser.errors()
    server.shutdown()
    server.server_close()
