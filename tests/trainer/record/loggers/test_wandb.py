from __future__ import annotations

import sys
import types
from typing import Any

import pytest


class Page:
    """Stand-in for a page of Weights & Biases: keeps the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def log(self, values: dict[str, float], *, step: int) -> None:
        self.calls.append(("log", (step, values)))

    def finish(self) -> None:
        self.calls.append(("finish", None))


def test_each_start_continues_the_page(records: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    page, opened = Page(), []

    def init(**options: Any) -> Page:
        opened.append(options)
        return page

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    run = records(peak=None)
    for _ in range(2):
        recorder = run.open(wandb="rivers")
        recorder.step_done(run.step(3))
        recorder.close()
    assert opened[0] == opened[1]
    assert opened[0]["project"] == "rivers" and opened[0]["resume"] == "allow"
    assert [name for name, _ in page.calls] == ["log", "finish"] * 2
    step, values = page.calls[0][1]
    assert step == 3 and values["loss/all"] == pytest.approx(3.0) and "speed/mfu" not in values
