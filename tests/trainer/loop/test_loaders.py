from __future__ import annotations

from pathlib import Path

import pytest
from support.configs import CONFIGS
from support.data.small_data import random_documents, write_dataset

from headrace.console import yaml_text
from headrace.console.config import build
from headrace.console.errors import ConfigError
from headrace.trainer.layout.groups import Parallel
from headrace.trainer.loop import evaluate
from headrace.trainer.loop import loaders as rows
from headrace.trainer.loop.config import DataConfig
from headrace.trainer.run.job import Job
from headrace.trainer.run.request import RunRequest
from headrace.trainer.run.resolve import resolve

TINY = str(CONFIGS / "tiny.yaml")
PHASE = "{tokens: 512, seq_len: 16, batch: 128, weights: {web: 1}}"


def a_job(tmp_path: Path, *overrides: str, mixture: str | None = None) -> Job:
    words = ["model.vocab_size=512", *overrides]
    return resolve(
        RunRequest(model=TINY, out=str(tmp_path / "run"), mixture=mixture, overrides=words)
    )


@pytest.mark.parametrize(
    ("text", "number"), [("64MB", 64 * 10**6), ("64MiB", 64 << 20), ("64e6", 64 * 10**6)]
)
def test_the_size_of_the_cache_is_in_bytes(text: str, number: int) -> None:
    data, _ = yaml_text.parse(f"cache_bytes: {text}", source="a test")
    result = build(DataConfig, data, source="a test").cache_bytes
    assert result == number and type(result) is int


def test_a_count_is_no_size(tmp_path: Path) -> None:
    """In YAML 64B is a count of 64 billion."""
    with pytest.raises(ConfigError, match=r"data\.cache_bytes: `64B` is not a size in bytes"):
        a_job(tmp_path, "synthetic.steps=4", "data.cache_bytes=64B")


def test_synthetic_rows_arrive_step_by_step(tmp_path: Path, parallel: Parallel) -> None:
    result = a_job(tmp_path, "synthetic.steps=4", "synthetic.batch_rows=6", "synthetic.seq_len=8")
    steps = rows.training_steps(result.plan, parallel, result.run.data)(1, 3)
    seen = [[row for batch in step for row in batch.rows] for step in steps]
    assert seen == [[*range(6 * n, 6 * n + 6)] for n in (1, 2, 3)]


def test_mixture_rows_and_held_out_rows_are_loaded(tmp_path: Path, parallel: Parallel) -> None:
    for split in ("train", "val"):
        write_dataset(str(tmp_path / "web" / split), random_documents(len(split), 30, longest=60))
    mixture = tmp_path / "mixture.yaml"
    data = tmp_path / "web" / "train"
    mixture.write_text(f"sources: {{web: {{data: {data}}}}}\nphases: {{one: {PHASE}}}\n")
    result = a_job(tmp_path, "evaluate.rows=5", mixture=str(mixture))
    steps = list(rows.training_steps(result.plan, parallel, result.run.data)(0, 4))
    assert [[len(batch.tokens) for batch in step] for step in steps] == [[4, 4]] * 4
    result.folder.prepare()
    assert result.run.evaluate is not None
    evaluate.plan_held_out(result.run.evaluate, result.plan).save(result.held_out)
    run = result.run
    evaluator = rows.load_evaluator(
        result.held_out, result.run.evaluate, parallel, run.data, run.micro_batch_tokens
    )
    assert evaluator.names == ["web"]
    (step,) = evaluator.steps
    assert sum(row >= 0 for batch in step for row in batch.rows) == 5
