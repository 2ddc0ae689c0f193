"""Ranks of one run that would train different runs end before the first step."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.data.small_data import random_documents, write_dataset
from support.ranks.ranks import Ranks

import headrace
from headrace.console import sources
from headrace.trainer.checkpoints import store

MIXTURE = """
sources:
  web: {{data: {web}}}
  code: {{data: {code}}}
phases:
  one: {{tokens: 384, seq_len: 16, batch: 64, weights: {{web: {share}, code: {rest}}}, lr: {lr}}}
"""
RAMP, WARM = "{warmup: 64}", "{warmup: 128}"


@pytest.mark.long
def test_another_learning_rate_on_one_rank_ends_the_run(trainer: Any, tmp_path: Path) -> None:
    """Rank 1 has a folder of its own: in that of rank 0 it may find the run, and refuse its key."""
    for code, stderr in trainer.join([], ["optimizer.lr=2e-2"], out=tmp_path / "other"):
        assert code == 1, stderr
        assert "the ranks do not agree on the run" in stderr
        assert "optimizer.lr: rank 0 has 0.01, rank 1 has 0.02" in stderr
    assert not (trainer.out / "ledger.jsonl").exists(), "no step was taken"


@pytest.mark.slow
def test_a_misspelt_key_on_one_rank_ends_both_at_once(trainer: Any) -> None:
    """Before, rank 0 waited for rank 1 until `watch.join_seconds`."""
    words = ["watch.join_seconds=500"]  # less than the patience of `join`
    (code, stderr), (second_code, cause) = trainer.join(words, [*words, "otpimizer.lr=1"])
    assert (code, second_code) == (1, 2)
    assert "otpimizer: unknown key" in cause
    assert "rank 1 failed before it joined the others: 1 problem in the run" in stderr
    assert "otpimizer: unknown key" in stderr


@pytest.mark.slow
def test_a_rank_that_does_not_see_the_checkpoint_ends_the_run(trainer: Any, tmp_path: Path) -> None:
    """Rank 1 sees step 2, rank 0 step 4: before, rank 1 trained on from step 2."""
    trainer.run("--stop-after", "4", code=85)
    stale = tmp_path / "stale"
    shutil.copytree(trainer.out, stale)
    shutil.rmtree(stale / "checkpoints" / store.name(4))
    for code, stderr in trainer.join([], [], out=stale):
        assert code == 1, stderr
        assert f"rank 0 can read the checkpoint {store.name(4)}, and rank 1 cannot" in stderr
        assert f"rank 1: {stale / 'checkpoints' / store.name(4)} is not there" in stderr
    assert len(trainer.lines("ledger.jsonl")) == 4


@pytest.mark.long
def test_a_lost_ledger_is_the_error_of_every_rank(trainer: Any) -> None:
    """Rank 0 alone reads it. Before, the other rank ended with an error of the network."""
    trainer.run("--stop-after", "4", code=85)
    (trainer.out / "ledger.jsonl").unlink()
    for code, stderr in trainer.join([], []):
        assert code == 1, stderr
        assert "ledger.jsonl" in stderr and "--new-ledger" in stderr


def test_ranks_that_start_alike_agree(two_ranks: Ranks, tmp_path: Path) -> None:
    assert two_ranks.run("start", tmp_path, [[], []]) == ["agreed"] * 2


def test_other_keys_on_one_rank_are_named(two_ranks: Ranks, tmp_path: Path) -> None:
    words = ["optimizer.lr=2e-2", "engine.zero=2", "model.operators.glu.hidden=60", "threads=2"]
    words += ["deterministic=true", "micro_batch_tokens=64", "checkpoints.every=7"]
    answers = two_ranks.run("start", tmp_path, [[], words])
    assert answers[0] == answers[1]
    assert sorted(answers[0].split("; ")) == [
        "checkpoints.every: rank 0 has 500, rank 1 has 7",
        "deterministic: rank 0 has False, rank 1 has True",
        "engine.zero: rank 0 has 1, rank 1 has 2",
        "micro_batch_tokens: rank 0 has 8192, rank 1 has 64",
        "model.operators.glu.hidden: rank 0 has 50, rank 1 has 60",
        "optimizer.lr: rank 0 has 0.0003, rank 1 has 0.02",
        "the ranks do not agree on the run",
        "threads: rank 0 has 1, rank 1 has 2",
    ]


def test_keys_that_change_nothing_may_differ(two_ranks: Ranks, tmp_path: Path) -> None:
    words = ["data.cache=/elsewhere", "data.workers=2", "slurm.nodes=3"]
    assert two_ranks.run("start", tmp_path, [[], words]) == ["agreed"] * 2


def test_another_machine_of_one_rank_is_named(two_ranks: Ranks, tmp_path: Path) -> None:
    """Versions, kernels, environment, and an option of the command."""
    changed = {"headrace": "0.0.9", "torch": "9.9", "kernels": "no Triton", "stop_after": 3}
    changed["sources"] = "another checkout"
    changed["NVIDIA_TF32_OVERRIDE"] = "1"
    answers = two_ranks.run("start", tmp_path, [[], []], changed=changed)
    assert answers[0] == answers[1]
    torch_version = importlib.metadata.version("torch")
    lines = sorted(re.sub(rf"'{torch_version}\S*'", "'ours'", answers[0]).split("; "))
    assert lines == [
        "environment.NVIDIA_TF32_OVERRIDE: rank 0 has no value, rank 1 has '1'",
        "kernels: rank 0 has 'the tensors are on cpu, and Triton needs a GPU', "
        "rank 1 has 'no Triton'",
        "start.stop_after: rank 0 has no value, rank 1 has 3",
        "the ranks do not agree on the run",
        f"versions.headrace sources: rank 0 has '{sources.digest()}', "
        "rank 1 has 'another checkout'",
        f"versions.headrace: rank 0 has '{headrace.__version__}', rank 1 has '0.0.9'",
        "versions.torch: rank 0 has 'ours', rank 1 has '9.9'",
    ]


def test_another_mixture_on_one_rank_is_named(two_ranks: Ranks, tmp_path: Path) -> None:
    """Weights change the plan; a learning rate does not. A mirror of a dataset changes nothing."""
    for name, seed in (("web", 1), ("code", 2), ("mirror", 1)):
        write_dataset(str(tmp_path / name), random_documents(seed, 60, longest=60))
    places = {"web": tmp_path / "web", "code": tmp_path / "code"}
    texts = {
        "first": MIXTURE.format(**places, share=0.5, rest=0.5, lr=RAMP),
        "weights": MIXTURE.format(**places, share=0.75, rest=0.25, lr=RAMP),
        "lr": MIXTURE.format(**places, share=0.5, rest=0.5, lr=WARM),
        "mirror": MIXTURE.format(
            **{**places, "web": tmp_path / "mirror"}, share=0.5, rest=0.5, lr=RAMP
        ),
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.yaml").write_text(text)

    def answers(name: str) -> str:
        mixtures = [str(tmp_path / f"{item}.yaml") for item in ("first", name)]
        first, second = two_ranks.run("start", tmp_path, [[], []], mixtures=mixtures)
        assert first == second
        return str(first)

    weights = answers("weights")
    assert "mixture.phases.one.weights.web: rank 0 has 0.5, rank 1 has 0.75" in weights
    assert "plan.hash: rank 0 has '" in weights
    lr = answers("lr")
    assert "mixture.phases.one.lr.warmup: rank 0 has 64, rank 1 has 128" in lr
    assert "plan.hash" not in lr and "plan.phases.one.lr" in lr
    assert answers("mirror") == "agreed"


def test_all_ranks_load_the_checkpoint_that_rank_0_lists(two_ranks: Ranks, tmp_path: Path) -> None:
    """A listing may be stale where the files can be opened: at the start, and at a rollback."""
    two_ranks.run("save", tmp_path / "run", [2, 4])
    assert two_ranks.run("resume", tmp_path / "run", hidden=[4]) == [[4, 4]] * 2


def test_another_checkpoint_of_the_same_step_on_one_rank_is_named(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    two_ranks.run("save", tmp_path / "run", [2, 4])
    two_ranks.run("save", tmp_path / "other", [2, 4], seed=4)
    answers = two_ranks.run("resume", tmp_path / "run", other_root=tmp_path / "other")
    assert answers[0] == answers[1]
    assert "do not agree on the checkpoint" in answers[0] and "seal: rank 0 has '" in answers[0]


def test_a_checkpoint_that_one_rank_lacks_is_no_reason_to_fall_back(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    two_ranks.run("save", tmp_path / "run", [2, 4])
    two_ranks.run("save", tmp_path / "other", [2])
    answers = two_ranks.run(
        "resume", tmp_path / "run", other_root=tmp_path / "other", fallback=True
    )
    assert answers[0] == answers[1]
    assert f"rank 1: {tmp_path}/other/checkpoints/step-00000004 is not there" in answers[0]
    assert store.parse_step(store.committed(tmp_path / "run" / "checkpoints")[-1]) == 4


def test_other_files_of_initial_weights_on_one_rank_are_named(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    places = [tmp_path / "a", tmp_path / "b"]
    for place in places:
        two_ranks.run("export_model", place)
    assert two_ranks.run("initialize", tmp_path / "run", places) == ["loaded"] * 2
    with (places[1] / "model.safetensors").open("ab") as file:
        file.write(b"more")
    answers = two_ranks.run("initialize", tmp_path / "run", places)
    assert answers[0] == answers[1]
    assert "the initial weights; model.safetensors: rank 0 has" in answers[0]
