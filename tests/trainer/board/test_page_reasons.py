"""The board in a real Chromium: what it says where it has nothing to draw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chromium import Chromium

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]


def test_the_mixture_of_a_damaged_plan_names_the_damage(
    browser: Chromium, open_board: Any, runs: Path
) -> None:
    (runs / "base/plan.json").write_text('{"phases')
    browser.open(open_board(runs / "base").server.url)
    browser.until("return document.body.dataset.first")
    browser.click("#tabs button", 1)
    said = browser.until("return document.querySelector('#view .card .problem')?.innerText")
    assert "base/plan.json is not a whole plan" in said
