"""Entries of steps, evaluations and events, and the JSON lines that hold them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from headrace.trainer.engines.layer_norms import LayerNorm
from headrace.trainer.loop.evaluate import Evaluation
from headrace.trainer.loop.guard import SkippedStep
from headrace.trainer.record.logger import step_scalars


def test_a_step_is_a_line_of_metrics_and_of_the_ledger(records: Any) -> None:
    run = records()
    recorder = run.open()
    recorder.record(run.step(2))
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
    recorder.record(run.step(0, skipped=skipped))
    recorder.close()
    root = run.folder.root
    assert (root / "ledger.jsonl").read_bytes() == (
        b'{"step": 0, "first_row": 0, "rows": 5, "hash": "hash0", "skipped": true, '
        b'"why": "spike", "back_to": 0}\n'
    )
    assert (root / "metrics.jsonl").read_bytes() == (
        b'{"step": 0, "row": 5, "tokens": 40, "phase": "synthetic", "loss": 3.0, "lr": 0.001, '
        b'"grad_norm": 1.5, "tokens_per_second": 100.0, "mfu": 0.2, "hfu": 0.25, "memory": 0, '
        b'"data_wait": 0.25, "seconds": 0.4, '
        b'"sources": {"synthetic": {"loss": 3.0, "weight": 40.0, "rows": 5}}, '
        b'"skipped": true, "why": "spike", "back_to": 0}\n'
    )


def test_norms_by_layer_are_a_part_of_the_line(records: Any) -> None:
    run = records()
    recorder = run.open(layers=1)
    recorder.record(replace(run.step(0), layers={"blocks.0": LayerNorm(3.0, math.nan, 0.0)}))
    recorder.close()
    (entry,) = run.lines("metrics")
    assert entry["layers"] == {
        "blocks.0": {"weight_norm": 3.0, "gradient_norm": None, "update_norm": 0.0}
    }
    scalars = step_scalars(entry)
    assert scalars["weight_norm/blocks.0"] == 3.0 and "gradient_norm/blocks.0" not in scalars


def test_a_loss_that_is_not_finite_is_null(records: Any) -> None:
    run = records()
    recorder = run.open()
    recorder.record(run.step(0, math.nan, skipped=SkippedStep("not finite", "rollback", back_to=0)))
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
    assert {name: each["loss"] for name, each in entry["sources"].items()} == {"web": 2, "code": 3}
