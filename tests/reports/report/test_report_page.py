"""Reports in a real Chromium, opened as files: zoom, hover, comparison, phones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.pages.board_runs import write_plan, write_run
from support.pages.chromium import Chromium

from headrace.reports.report.write import write_report

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

STEPS = 60
OFF_SCREEN = (
    "return [...document.querySelectorAll(arguments[0])]"
    ".filter(each => each.getBoundingClientRect().right > innerWidth).length"
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("page")
    plan = write_plan(root, STEPS)
    for name, lr, taken in (("base", 1e-3, STEPS), ("other <b>&", 2e-3, 40)):
        write_report([str(write_run(root / "runs" / name, plan, lr=lr, taken=taken))])
    write_report([str(root / "runs" / name) for name in ("base", "other <b>&")])
    return root / "runs"


class Page:
    """A report in the browser."""

    def __init__(self, browser: Chromium, file: Path) -> None:
        self.browser, self.file = browser, file
        self.open()

    def open(self, width: int = 1280, height: int = 900, **device: bool) -> None:
        self.browser.device(width, height, **device)
        self.browser.errors()
        self.browser.requests()
        self.browser.open(self.file.as_uri())
        self.browser.until("return document.body.dataset.drawn")

    def curve(self, panel: str, name: str, statistic: str = "mean") -> list[float]:
        """Return a drawn curve of the panel, by its label."""
        script = (
            "const card = cards.find(each => each.panel.key === arguments[0]);"
            "card.plot.canvas.scrollIntoView();"
            "const found = card.plot.curves.find(curve => curve.label === arguments[1]);"
            "return found && [...found[arguments[2]]]"
        )
        result: list[float] = self.browser.until(script, panel, name, statistic)
        return result

    def at_step(self, step: int, panel: str = "Loss") -> tuple[float, float]:
        """Return the place of a step's point of the first curve in the window."""
        script = (
            "const card = cards.find(each => each.panel.key === arguments[0]);"
            "card.plot.canvas.scrollIntoView({block: 'center'});"
            "const box = card.plot.canvas.getBoundingClientRect(), s = card.plot.scale;"
            "const curve = card.plot.curves[0], i = nearest(curve.first, arguments[1]);"
            "return [box.left + s.px(curve.x[i]), box.top + s.py(curve.mean[i])]"
        )
        x, y = self.browser.run(script, panel, step)
        return x, y

    def window(self) -> list[float | None]:
        result: list[float | None] = self.browser.run("return [state.low, state.high]")
        return result


@pytest.fixture
def page(browser: Chromium, runs: Path) -> Iterator[Page]:
    """The report of a run; at the end of the test, nothing may have gone wrong in it."""
    yield from opened(browser, runs / "base/report.html")


@pytest.fixture
def compared(browser: Chromium, runs: Path) -> Iterator[Page]:
    yield from opened(browser, runs / "base/compare.html")


def opened(browser: Chromium, file: Path) -> Iterator[Page]:
    page = Page(browser, file)
    yield page
    assert browser.errors() == []
    sent = [url for url in browser.requests() if not url.startswith(("chrome:", "data:"))]
    assert set(sent) == {file.as_uri()}, "the page loads another file"


def lines(runs: Path, name: str = "base") -> list[dict[str, Any]]:
    text = (runs / name / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_curves_are_those_of_the_lines(page: Page, runs: Path) -> None:
    entries = lines(runs)
    assert page.curve("Loss", "loss") == pytest.approx([entry["loss"] for entry in entries])
    assert page.curve("Loss", "loss", "x") == [entry["tokens"] for entry in entries]
    drawn = iter(page.curve("Loss by source", "code"))
    known = [entry["sources"]["code"]["loss"] for entry in entries if "code" in entry["sources"]]
    assert [value for value in drawn if value is not None] == pytest.approx(known)
    speed = [
        entry["tokens_per_second"] * entry["sources"].get("web", {}).get("rows", 0) / 4
        for entry in entries
    ]
    assert page.curve("Tokens per second by source", "web") == pytest.approx(speed)
    assert len(page.curve("Held-out loss", "all")) == STEPS // 5


def test_a_drag_zooms_and_the_pointer_shows_values(page: Page, runs: Path) -> None:
    entries, browser = lines(runs), page.browser
    (x, y), (to, _) = page.at_step(10), page.at_step(20)
    browser.mouse(("move", x, y), ("down", 0, 0), ("move", to, y), ("up", 0, 0))
    low, high = page.window()
    assert low == pytest.approx(entries[10]["tokens"], rel=0.03)
    assert high == pytest.approx(entries[20]["tokens"], rel=0.03)
    ranges = browser.run(
        "return cards.filter(c => c.seen).map(c => [c.plot.scale.x0, c.plot.scale.x1])"
    )
    assert len(ranges) > 2 and all(item == [low, high] for item in ranges)
    browser.mouse(("move", *page.at_step(15)))
    tip = browser.until(
        "return document.querySelector('[data-panel=Loss] .tip:not([hidden])')?.innerText"
    )
    assert "step 15" in tip and f"loss {entries[15]['loss']:.2f}" in tip
    browser.mouse(("down", 0, 0), ("up", 0, 0))
    text = browser.run("return document.getElementById('rows').innerText")
    assert "step 15" in text and f"mixtures audit {runs / 'base'} --step 15 --text" in text
    place = "return document.getElementById('rows').closest('[data-panel]').dataset.panel"
    assert browser.run(place) == "Loss", "the answer stands where the click was"
    browser.click("#reset")
    assert page.window() == [None, None]


def test_axes_smoothing_and_series(page: Page) -> None:
    browser, ends = page.browser, "const s = cards[0].plot.scale; return [s.x0, s.x1]"
    for number, last in ((0, 59), (2, 60 * 0.25 / 3600), (1, 60 * 256)):
        browser.click("#axis button", number)
        assert browser.run(ends)[1] == pytest.approx(last)
    rough = browser.run("return [...cards[0].plot.curves[0].line]")
    browser.run("smooth.value = 30; smooth.dispatchEvent(new Event('input'))")
    fine = browser.run("return [...cards[0].plot.curves[0].line]")
    assert max(fine) - min(fine) < (max(rough) - min(rough)) / 2
    browser.click("#logy")
    assert browser.run("return cards[0].plot.scale.y0") > 0
    labels = (
        "return cards.find(card => card.panel.key === 'Loss by source')"
        ".plot.curves.map(curve => curve.label)"
    )
    assert browser.run(labels) == ["web", "code"]
    browser.click("[data-panel='Loss by source'] .key")
    assert browser.run(labels) == ["code"]


def test_a_line_goes_on_over_steps_without_rows_of_its_source(page: Page) -> None:
    script = (
        "const values = arguments[1].map(value => value ?? NaN);"
        "const curve = joined(arguments[0], {x: values.map((_, i) => i), mean: values});"
        "return curve.x.map((x, i) => [x, curve.mean[i]])"
    )
    values = [3.0, None, 2.5, 2.4, None, 2.3, *[None] * 20, 2.2, 2.1]
    joined = page.browser.run(script, "loss/web", values)
    assert joined == [
        [0, 3.0], [2, 2.5], [3, 2.4], [5, 2.3], [6, None], [25, None], [26, 2.2], [27, 2.1],
    ]  # fmt: skip
    assert len(page.browser.run(script, "loss", values)) == len(values), "not finite: a true gap"
    assert page.browser.run(script, "loss/web", [None, None]) == []


def test_runs_are_compared_and_switched_off(compared: Page, runs: Path) -> None:
    browser, titles = compared.browser, "return cards.map(card => card.panel.key)"
    result = browser.run(titles)
    assert result[:2] == ["Loss", "Loss minus the loss of base"]
    assert {"loss/web", "loss/code", "Gradient norm", "speed/web"} <= set(result)
    assert browser.run("return document.querySelectorAll('main b').length") == 0, "a name is HTML"
    difference = compared.curve("Loss minus the loss of base", "other <b>&")
    both = zip(lines(runs, "other <b>&"), lines(runs), strict=False)
    expected = [first_line["loss"] - second_line["loss"] for first_line, second_line in both]
    assert difference == pytest.approx(expected, abs=1e-6)
    browser.click("#runs button", 1)
    assert "Loss by source" in browser.run(titles)
    assert browser.run("return cards[0].plot.curves.map(curve => curve.label)") == ["loss"]


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("name", ["page", "compared"])
def test_nothing_is_cut_on_a_phone(
    name: str, dark: bool, request: pytest.FixtureRequest, runs: Path
) -> None:
    page: Page = request.getfixturevalue(name)
    page.open(390, 844, phone=True, dark=dark)
    browser = page.browser
    assert browser.run("return Math.max(document.documentElement.scrollWidth, innerWidth)") == 390
    over = (
        "return [...document.querySelectorAll('main *')].filter(each =>"
        " each.getBoundingClientRect().right > 391 && !each.closest('.scroll'))"
        ".map(each => each.outerHTML.slice(0, 90))"
    )
    assert browser.run(over) == []
    hinted = (
        "return [...document.querySelectorAll('.scroll')].filter(each =>"
        " each.scrollWidth > each.clientWidth + 1"
        " && getComputedStyle(each, '::after').content === 'none')"
        ".map(each => each.outerHTML.slice(0, 90))"
    )
    assert browser.run(hinted) == [], "a table is cut without a hint"
    heads = (
        "return [...document.querySelectorAll('table')].flatMap(table => {"
        " const head = table.querySelector('th[colspan]'), range = document.createRange();"
        " if (head) range.selectNodeContents(head);"
        " const left = each => each.getBoundingClientRect().left;"
        " return head ? [left(range) - left(head)] : [] })"
    )
    lefts = browser.run(heads)
    assert lefts and max(lefts) < 20, "a name stands above columns that are off the screen"
    assert browser.run(OFF_SCREEN, "table.sides *") == 0, "a value of a run is off the screen"
    paper = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, paper.strip("rgb()").split(","))) < 150) is dark
    scales = (
        "return cards.filter(card => card.plot.scale).map(({plot: {scale}}) =>"
        " ticks(scale.x0, scale.x1, 3).filter(x => x >= scale.x0 && x <= scale.x1).length)"
    )
    assert min(browser.run(scales)) > 1, "one label shows no scale"
    x, y = page.at_step(15)
    browser.mouse(("move", x, y), ("down", 0, 0), ("up", 0, 0), touch=True)
    tip = browser.until(
        "return document.querySelector('[data-panel=Loss] .tip:not([hidden])')?.innerText"
    )
    assert "step" in tip
