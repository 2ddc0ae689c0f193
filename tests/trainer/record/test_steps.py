from __future__ import annotations

import io
import json
import math
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.console.errors import MissingError
from headrace.trainer.engines.update import Update
from headrace.trainer.loop.evaluate import Evaluation
from headrace.trainer.loop.guard import Harm
from headrace.trainer.loop.loop import StepRecord
from headrace.trainer.loop.step_stats import Facts
from headrace.trainer.loop.synthetic import SyntheticPlan
from headrace.trainer.record.steps import Records, Speed
from headrace.trainer.run.config import SyntheticConfig, WatchConfig

PLAN = SyntheticPlan(SyntheticConfig(steps=10, seq_len=8, batch_rows=5), 50, 1)


def record(step: int, loss: float = 3.0, *, harm: Harm | None = None) -> StepRecord:
    facts = Facts(
        losses=[loss * 40],
        weights=[40.0],
        rows=[5],
        data_wait=0.1,
        stop=False,
        save_failed=False,
        digests=[],
    )
    update = Update(1.5, applied=harm is None)
    return StepRecord(PLAN.step(step), facts, update, 1e-3, 0.4, f"hash{step}", harm)


def records(tmp_path: Path, stream: io.StringIO) -> Records:
    speed = Speed({8: 2000.0}, {8: 2500.0}, peak=1e6)
    watch = WatchConfig(log_seconds=1e9, tensorboard=False)
    return Records(tmp_path, PLAN, speed, watch, first_step=0, stream=stream)


def test_a_step_in_numbers(tmp_path: Path) -> None:
    kept = records(tmp_path, io.StringIO())
    kept.record(record(2))
    kept.close()
    (entry,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
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
    (line,) = [json.loads(line) for line in (tmp_path / "ledger.jsonl").open()]
    assert line == {"step": 2, "first_row": 10, "rows": 5, "hash": "hash2"}


def test_the_terminal_hears_of_edges_and_not_of_every_step(tmp_path: Path) -> None:
    stream = io.StringIO()
    kept = records(tmp_path, stream)
    for step in range(10):
        kept.record(record(step))
    kept.close()
    first, last = stream.getvalue().splitlines()
    assert first.startswith("step 0  10.0%  synthetic  loss 3.0000  lr 1.00e-03  100 tok/s")
    assert last.startswith("step 9 100.0%") and last.endswith("done")


def test_what_is_not_finite_is_null_and_said(tmp_path: Path) -> None:
    stream = io.StringIO()
    kept = records(tmp_path, stream)
    kept.record(record(0, math.nan, harm=Harm("not finite", "rollback", back_to=0)))
    kept.close()
    for name in ("metrics", "ledger"):
        (entry,) = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").open()]
        assert entry["skipped"] is True and entry["back_to"] == 0
        assert name == "ledger" or entry["loss"] is None
    (event,) = [json.loads(line) for line in (tmp_path / "events.jsonl").open()]
    assert event["event"] == "not finite" and "rows 0 to" in event["where"]
    assert "loss not finite" in stream.getvalue()
    assert stream.getvalue().endswith("skipped: not finite  back to step 0\n")


def test_an_evaluation_is_a_line_of_its_own(tmp_path: Path) -> None:
    stream = io.StringIO()
    kept = records(tmp_path, stream)
    facts = replace(record(0).facts, losses=[6.0, 9.0], weights=[3.0, 3.0], rows=[1, 1])
    kept.evaluated(PLAN.step(4), Evaluation(["web", "code"], facts, 0.5))
    kept.close()
    (entry,) = [json.loads(line) for line in (tmp_path / "evaluations.jsonl").open()]
    assert (entry["step"], entry["loss"]) == (4, 2.5)
    assert {name: each["loss"] for name, each in entry["sources"].items()} == {"web": 2, "code": 3}
    assert "step 4  50.0%  held out  all 2.5000  web 2.0000  code 3.0000" in stream.getvalue()


def test_tensorboard_is_written_beside(tmp_path: Path) -> None:
    watch = WatchConfig(log_seconds=1e9)
    speed = Speed({8: 2000.0}, {8: 2000.0}, peak=None)
    kept = Records(tmp_path, PLAN, speed, watch, first_step=0, stream=io.StringIO())
    kept.record(record(0))
    kept.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert board.Scalars("loss/all")[0].value == pytest.approx(3.0)
    assert "speed/mfu" not in board.Tags()["scalars"]


class Page:
    """Stands in for a page of Weights & Biases: what was asked of it."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, object]] = []

    def log(self, values: dict[str, float], *, step: int) -> None:
        self.asked.append(("log", (step, values)))

    def finish(self) -> None:
        self.asked.append(("finish", None))


def test_weights_and_biases_gets_the_same_charts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, opened = Page(), []

    def init(**options: object) -> Page:
        opened.append(options)
        return page

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    watch = WatchConfig(log_seconds=1e9, tensorboard=False, wandb="rivers")
    for _ in range(2):  # a restart goes on with the page
        kept = Records(
            tmp_path,
            PLAN,
            Speed({8: 2000.0}, {8: 2000.0}, None),
            watch,
            first_step=0,
            stream=io.StringIO(),
        )
        kept.record(record(3))
        kept.close()
    assert opened[0] == opened[1]
    assert opened[0]["project"] == "rivers" and opened[0]["resume"] == "allow"
    assert [name for name, _ in page.asked] == ["log", "finish"] * 2
    step, values = page.asked[0][1]  # type: ignore[misc]
    assert step == 3 and values["loss/all"] == pytest.approx(3.0) and "speed/mfu" not in values


def test_without_its_extra_it_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    watch = WatchConfig(tensorboard=False, wandb="rivers")
    with pytest.raises(MissingError, match=r"pip install 'headrace\[wandb\]'"):
        Records(tmp_path, PLAN, Speed({8: 2000.0}, {8: 2000.0}, None), watch, first_step=0)
