"""The rows of a run that decides its shares while the page is open."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from support.data.plan_data import write_taken_run

from headrace.console import config as reader
from headrace.dataplane.order.stream import Stream
from headrace.dataplane.runlog import decisions
from headrace.mixtures.mixture_file.mixture import Mixture
from headrace.mixtures.planning.resolve_mixture import resolve
from headrace.mixtures.steering.decide import decide_by_hand
from headrace.reports.board.rows import StepRows


def test_a_decision_changes_the_rows_of_an_open_page(
    dataset: Callable[..., str], tmp_path: Path
) -> None:
    sources = {name: {"data": dataset(name, count=60)} for name in ("web", "code")}
    phase = {"tokens": 960, "seq_len": 16, "batch": 64, "weights": {"web": 0.5, "code": 0.5}}
    spec = {"sources": sources, "phases": {"main": phase}}
    plan = resolve(reader.build(Mixture, spec, source="a test"))
    folder = write_taken_run(tmp_path / "run", plan, 2)
    run: Any = SimpleNamespace(url=str(folder), plan={"hash": plan.hash})
    pages = StepRows()
    auditor = pages._auditor(run)
    assert pages._auditor(run) is auditor
    result = decide_by_hand(Stream(plan), [], {"web": 1.0}, 4, None, "id")
    decisions.append(folder / decisions.NAME, result)
    rows = range(plan.step(5).first_row, plan.end_row)
    assert {row.source for row in auditor.rows(rows)} == {"web", "code"}
    assert {row.source for row in pages._auditor(run).rows(rows)} == {"web"}
