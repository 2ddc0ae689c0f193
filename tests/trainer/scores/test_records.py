from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from headrace.console.errors import InputError
from headrace.dataplane.runlog.writer import read
from headrace.models.config.config import ModelConfig, load_model_config
from headrace.models.weights import Weights
from headrace.reports.scores import tables
from headrace.trainer.folders.folder import SCORES, RunFolder
from headrace.trainer.scores import records
from headrace.trainer.weights.source import Checkpoint


@dataclass(frozen=True)
class Described:
    """A source of weights of which only the model is known."""

    model: ModelConfig
    where: str = "elsewhere"

    def weights(self) -> Weights:
        raise AssertionError("no weight is needed")


def scored(value: float | None, task: str = "arc") -> dict[str, Any]:
    metrics = {"acc,none": value, "acc_stderr,none": 0.02, "f1,strict": 0.5}
    return {"from": "x", "tasks": {task: {"metrics": metrics}}}


def test_scores_are_lines_beside_the_run_and_a_table_by_step(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for step, value in ((20, 0.125), (3, 0.75), (20, 0.25), (40, None)):
        source = Checkpoint(str(run.checkpoints / f"step-{step:08d}"), run)
        assert records.store(source, SCORES, scored(value)) == str(tmp_path / "scores.jsonl")
    entries = list(read(run.scores))
    assert [entry["step"] for entry in entries] == [20, 3, 20, 40]
    table = tables.scores_section([*entries, {"step": 50, **scored(0.9, "<mine>")}])
    cells = [cell.partition("</td>")[0] for cell in table.split("<td>")]
    assert cells[1:6] == ["acc", "0.7500 ± 0.02", "0.2500 ± 0.02", "not finite ± 0.02", "–"]
    assert "f1 (strict)" in table and "&lt;mine&gt;" in table and "0.1250" not in table
    assert tables.scores_section([]) == ""


def test_scores_of_a_few_documents_do_not_replace_those_of_all() -> None:
    few = {"step": 3, "limit": 2, **scored(1.0)}
    table = tables.scores_section([{"step": 3, "limit": None, **scored(0.25)}, few])
    assert "<td>acc</td><td>0.2500 ± 0.02</td>" in table
    assert "<td>acc, limit 2</td><td>1.0000 ± 0.02</td>" in table


def test_scores_of_weights_without_a_run_are_not_stored(tmp_path: Path) -> None:
    assert records.store(Checkpoint(str(tmp_path / "step-00000003")), SCORES, scored(1.0)) is None
    assert not list(tmp_path.iterdir())


def test_the_context_is_no_longer_than_learned_positions() -> None:
    endless = Described(load_model_config("tiny-transformer"))
    assert records.context_length(endless, None) == records.LENGTH
    assert records.context_length(endless, 99) == 99
    learned = Described(load_model_config("tiny-transformer", ["learned_positions=64"]))
    assert records.context_length(learned, None) == records.context_length(learned, 64) == 64
    with pytest.raises(InputError, match="64 learned positions"):
        records.context_length(learned, 65)
