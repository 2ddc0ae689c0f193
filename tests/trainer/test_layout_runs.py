"""The command with stages and split experts, on a dataset: held-out losses, skipped steps, export
and samples equal those of one process."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from support.configs import CONFIGS

from headrace.models.conversion.folders import read_model
from headrace.tokenize.cli import main as tokenize
from headrace.trainer.cli import main

MODEL = str(CONFIGS / "experts.yaml")
LAYOUTS = {
    "one": (),
    "pp2": ("--processes", "2", "layout.pp=2", "layout.cuts=[2]"),
    "ep2": ("--processes", "2", "layout.ep=2"),
    "pp2ep2": ("--processes", "4", "layout.pp=2", "layout.cuts=[2]", "layout.ep=2"),
}
SAME_BITS = ("model.tie_embeddings=false", "optimizer.clip=0")
"""Without tied embeddings and without a limit of the norm, stages change no bit."""


def call(command: Any, *words: str) -> str:
    done = CliRunner().invoke(command, words)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, trainer_in: Any) -> Callable[[str], Any]:
    """Return a run of a layout on a dataset of text; each is trained once."""
    folder = tmp_path_factory.mktemp("data")
    texts = [{"text": f"{n} times {m} is {n * m}"} for n in range(20) for m in range(20)]
    (folder / "text.jsonl").write_text("\n".join(map(json.dumps, texts)))
    data = ("--tokenizer", "byte", "--split", "val=0.2", "--out", str(folder / "sums"))
    call(tokenize, "build", str(folder / "text.jsonl"), *data)
    mixture = folder / "mixture.yaml"
    mixture.write_text(
        f"sources: {{sums: {{data: {folder}/sums/train}}}}\n"
        "phases: {one: {tokens: 512, seq_len: 16, batch: 64, weights: {sums: 1}}}\n"
    )
    words = ["--model", MODEL, "--mixture", str(mixture), "model.vocab_size=300", *SAME_BITS]
    words += ["synthetic=null", "z_loss=1e-3", "evaluate.every=4", "evaluate.rows=5"]
    words += ["micro_batch_tokens=16"]

    @functools.cache
    def run(layout: str) -> Any:
        trainer = trainer_in(tmp_path_factory.mktemp(layout))
        trainer.run(*words, *LAYOUTS[layout])
        return trainer

    return run


def held_out(trainer: Any) -> list[float]:
    """Return the held-out loss of each evaluation."""
    result = trainer.lines("evaluations.jsonl")
    assert [entry["step"] for entry in result] == [3, 7]
    return [entry["loss"] for entry in result]


def exported(trainer: Any, out: Path) -> dict[str, torch.Tensor]:
    call(main, "export", str(trainer.out), str(out), "--format", "headrace")
    _, weights = read_model(out)
    return {name: weights[name] for name in weights}


def sampled(trainer: Any) -> list[str]:
    words = ("--prompt", "3 times 4", "--prompt", "7", "--tokens", "12", "--seed", "5", "--json")
    result = json.loads(call(main, "sample", str(trainer.out), *words))["samples"]
    return [sample["text"] for sample in result]


def max_difference(numbers: list[float], expected: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(numbers, expected, strict=True))


@pytest.mark.long
@pytest.mark.parametrize("layout", ["pp2", "ep2", "pp2ep2"])
def test_a_run_equals_that_of_one_process(
    trained: Callable[[str], Any], tmp_path: Path, layout: str
) -> None:
    """Routers with losses on every stage, z-loss, packed documents, held-out rows that the ranks
    do not divide; then export and samples in one process."""
    one_process, laid_out = trained("one"), trained(layout)
    assert laid_out.lines("ledger.jsonl") == one_process.lines("ledger.jsonl")
    limit = 0.0 if layout == "pp2" else 2e-6
    assert max_difference(laid_out.losses(), one_process.losses()) <= limit
    assert max_difference(held_out(laid_out), held_out(one_process)) <= limit
    norms = [
        [e["grad_norm"] for e in item.lines("metrics.jsonl")] for item in (laid_out, one_process)
    ]
    assert max_difference(*norms) <= 2e-5 * min(norms[1])
    z_losses = [
        [e["z_loss"] for e in item.lines("metrics.jsonl")] for item in (laid_out, one_process)
    ]
    assert max_difference(*z_losses) <= 2e-5 * min(z_losses[1])
    expected, result = (
        exported(one_process, tmp_path / "one"),
        exported(laid_out, tmp_path / "other"),
    )
    assert result.keys() == expected.keys()
    weights = max(float((result[name] - expected[name]).abs().max()) for name in expected)
    assert weights <= (0.0 if layout == "pp2" else 2e-4)
    assert sampled(laid_out) == sampled(one_process)


@pytest.mark.long
@pytest.mark.parametrize("layout", ["pp2", "ep2", "pp2ep2"])
@pytest.mark.parametrize(
    ("why", "words"),
    [
        # With a bound of 0 every second loss is a spike, and the weights are rolled back.
        ("spike", ["watch.spike=rollback", "watch.spike_bound=0", "watch.spike_window=8"]),
        ("not finite", ["watch.not_finite=skip", "optimizer.lr=1e38"]),
    ],
)
def test_the_same_steps_are_skipped(trainer: Any, layout: str, why: str, words: list[str]) -> None:
    more = ["--model", MODEL, "synthetic.steps=12", "checkpoints.every=5", "watch.rollbacks=9"]
    more += ["micro_batch_tokens=16", *words]
    alone = trainer.folder / "alone"
    trainer.run(*more, out=alone)
    trainer.run(*more, *LAYOUTS[layout])
    ledger = trainer.lines("ledger.jsonl")
    skipped = [entry for entry in ledger if entry.get("skipped")]
    assert skipped and all(entry["why"] == why for entry in skipped)
    assert ledger == trainer.lines("ledger.jsonl", alone)
    pairs = zip(trainer.losses(), trainer.losses(alone), strict=True)
    assert all(a == b or abs(a - b) < 2e-6 for a, b in pairs)  # None where it is not finite
