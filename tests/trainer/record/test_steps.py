"""Entries of steps, evaluations and events, and the JSON lines that hold them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from headrace.trainer.loop.evaluate import Evaluation
from headrace.trainer.loop.guard import SkippedStep
from headrace.trainer.record.logger import step_scalars


def test_a_step_is_a_line_of_metrics_and_of_the_ledger(records: Any) -> None:
    run = records()
    recorder = run.open()
    recorder.step_done(run.step(2))
    recorder.close()
    (entry,) = run.lines("metrics")
    assert entry == {
        "step": 2,
        "row": 15,
        "tokens": 120,
        "phase": "synthetic",
        "loss": pytest.approx(3.0),
        "lr": 1e-3,
        "grad_norm": 1.5,
        "tokens_per_second": 100.0,
        "mfu": pytest.approx(0.2),
        "hfu": pytest.approx(0.25),
        "memory": 0,
        "data_wait": 0.25,
        "seconds": 0.4,
        "sources": {"synthetic": {"loss": pytest.approx(3.0), "weight": 40.0, "rows": 5}},
    }
    assert run.lines("ledger") == [{"step": 2, "first_row": 10, "rows": 5, "hash": "hash2"}]


def test_the_bytes_of_a_line_stay(records: Any) -> None:
    """Programs that read these files, and `mixtures audit`, rely on them."""
    run = records()
    recorder = run.open()
    skipped = SkippedStep("spike", "rollback", 2.0, back_to=0)
    recorder.step_done(run.step(0, skipped=skipped))
    recorder.close()
    root = run.folder.root
    assert (root / "ledger.jsonl").read_bytes() == (
        b'{"step": 0, "first_row": 0, "rows": 5, "hash": "hash0", "skipped": true, '
        b'"why": "spike", "back_to": 0, "check": "6d16c7dc"}\n'
    )
    assert (root / "metrics.jsonl").read_bytes() == (
        b'{"step": 0, "row": 5, "tokens": 40, "phase": "synthetic", "loss": 3.0, "lr": 0.001, '
        b'"grad_norm": 1.5, "tokens_per_second": 100.0, "mfu": 0.2, "hfu": 0.25, "memory": 0, '
        b'"data_wait": 0.25, "seconds": 0.4, '
        b'"sources": {"synthetic": {"loss": 3.0, "weight": 40.0, "rows": 5}}, '
        b'"skipped": true, "why": "spike", "back_to": 0, "check": "93c0f143"}\n'
    )


def test_signals_of_watched_steps_have_lines_of_their_own(records: Any) -> None:
    run = records()
    recorder = run.open(layers=2)
    norms = {"weight_norm": 3.0, "gradient_norm": math.nan, "activation_rms": 0.5}
    step = run.step(0)
    stats = replace(step.stats, metrics={"own_seconds": (0.25, 0.5)})
    recorder.step_done(replace(step, stats=stats, layers={"blocks.0": norms}))
    recorder.step_done(replace(run.step(1), stats=stats))
    recorder.close()
    shown = {"weight_norm": 3.0, "gradient_norm": None, "activation_rms": 0.5}
    assert run.lines("signals") == [
        {"step": 0, "tokens": 40, "layers": {"blocks.0": shown}, "own_seconds": [0.25, 0.5]}
    ]
    first, second = run.lines("metrics")
    assert first.keys() == second.keys()
    scalars = step_scalars({**first, **run.lines("signals")[0]})
    assert scalars["weight_norm/blocks.0"] == 3.0 and "gradient_norm/blocks.0" not in scalars


def test_a_run_that_watches_nothing_has_no_file_of_signals(records: Any) -> None:
    run = records()
    run.open().close()
    assert run.folder.metrics.exists() and not run.folder.signals.exists()


def test_a_loss_that_is_not_finite_is_null(records: Any) -> None:
    run = records()
    recorder = run.open()
    recorder.step_done(
        run.step(0, math.nan, skipped=SkippedStep("not finite", "rollback", back_to=0))
    )
    recorder.close()
    (metrics,), (ledger,), (event,) = (run.lines(n) for n in ("metrics", "ledger", "events"))
    assert metrics["loss"] is None
    for entry in (metrics, ledger):
        assert entry["skipped"] is True and entry["back_to"] == 0
    assert event["event"] == "not finite" and "rows 0 to" in event["where"]


def test_an_evaluation_is_a_line_with_each_source(records: Any) -> None:
    run = records()
    recorder = run.open()
    step = run.step(4)
    stats = replace(step.stats, losses=[6.0, 9.0], weights=[3.0, 3.0], rows=[1, 1])
    recorder.evaluated(step.step, Evaluation(["web", "code"], stats, 0.5))
    recorder.close()
    (entry,) = run.lines("evaluations")
    assert (entry["step"], entry["loss"]) == (4, 2.5)
    assert {name: source["loss"] for name, source in entry["sources"].items()} == {
        "web": 2,
        "code": 3,
    }


def test_the_memory_of_the_ranks_is_an_event_when_it_has_grown(records: Any) -> None:
    run = records()
    recorder = run.open()
    for number, memory in enumerate([(100, 90), (104, 90), (104, 95), (104, 95), (120, 95)]):
        record = run.step(number)
        recorder.step_done(replace(record, stats=replace(record.stats, metrics={"memory": memory})))
    recorder.close()
    grown = [(entry["step"], entry["memory"]) for entry in run.lines("events")]
    assert grown == [(0, [100, 90]), (2, [104, 95]), (4, [120, 95])]
    assert [entry["memory"] for entry in run.lines("metrics")] == [100, 104, 104, 104, 120]
