"""The board in a real Chromium: what it says where it has nothing to draw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.pages.chromium import Chromium
from support.pages.written_runs import rewrite

from headrace.reports.report.write import write_report

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]


def test_the_mixture_of_a_damaged_plan_names_the_damage(
    browser: Chromium, open_board: Any, runs: Path
) -> None:
    (runs / "base/plan.json").write_text('{"phases')
    browser.open(open_board(runs / "base").server.url)
    browser.until("return document.body.dataset.first")
    browser.click("#tabs button", 1)
    said = browser.until("return document.querySelector('#view .card .problem')?.innerText")
    assert "base/plan.json is damaged" in said


def test_an_unknown_noise_scale_has_its_reason(
    browser: Chromium, open_board: Any, runs: Path
) -> None:
    noise = {"noise_scale": None, "noise_trace": -1.0, "noise_square": 0.5}
    rewrite(
        runs / "base/signals.jsonl",
        lambda e: e.update(
            noise | {"noise_steps": e["step"] // 6 + 1} if e["step"] % 6 == 0 else {}
        ),
    )
    write_report([str(runs / "base")])
    script = "return document.querySelector(`[data-panel='Gradient noise scale']`)?.innerText"
    for url in (open_board(runs / "base").server.url, (runs / "base/report.html").as_uri()):
        browser.open(url)
        said = browser.until(script)
        assert "Measured in 4 steps" in said and "not both above 0 yet" in said
    rewrite(runs / "base/signals.jsonl", lambda e: e.update({"noise_scale": 9.0}))
    browser.open(open_board(runs / "base").server.url)
    assert "Measured" not in browser.until(script)
