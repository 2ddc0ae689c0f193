"""Plans for steps by length: each length by its share of the steps, on the shipped H100."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from support.data.corpora import ONE
from support.data.small_data import random_documents, write_dataset

from headrace.console.progress import format_seconds
from headrace.dataplane.loader import Loader
from headrace.dataplane.order.plan import Plan
from headrace.dataplane.order.row_lengths import name_steps, split_by_length
from headrace.mixtures.planning.resolve_mixture import resolve_file
from headrace.models.config.config import load_model_config
from headrace.models.config.options.precision import PRECISIONS
from headrace.tokenize.views.pack import PackConfig, pack_lengths
from headrace.trainer.cli import main
from headrace.trainer.loop.batches import micro_batches, micro_rows
from headrace.trainer.run.config import RunConfig
from headrace.trainer.run.layout_plan import load_plan
from headrace.trainer.run.plan_check import find_differences

L, BATCH = 256, 8
SHARES = {64: 0.25, 128: 0.125, 256: 0.625}
CLUSTER = ("--hardware", "h100", "--roofline", "--model", "tiny-transformer")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lengths")
    documents = [
        document
        for seed, longest in enumerate(SHARES)
        for document in random_documents(seed, 400, longest=longest)
    ]
    write_dataset(str(folder / "base"), documents, shard_documents=400)
    config = PackConfig(
        dataset=str(folder / "base"),
        length=L,
        lengths=tuple(SHARES),
        out=str(folder / "packed"),
        group_bins=16,
        engine=ONE,
    )
    assert all(pack_lengths(config).values())
    weights = {f"to-{length}": share for length, share in SHARES.items()}
    phase = {"tokens": 16 * BATCH * L, "seq_len": L, "batch": BATCH * L, "weights": weights}
    file = folder / "mixture.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "seed": 5,
                "chunk": 4 * L,
                "window": 2,
                "steps_by_length": True,
                "sources": {
                    name: {"data": str(folder / "packed" / name.removeprefix("to-"))}
                    for name in weights
                },
                "phases": {"first": phase, "then": phase},
            }
        )
    )
    return file


@pytest.fixture(scope="module")
def plan(mixture: Path) -> Plan:
    return resolve_file(str(mixture))


def ask(*words: str) -> Any:
    result = CliRunner().invoke(main, ["plan", *words, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout), result.stderr


def test_phases_are_the_steps_that_the_model_gets(plan: Plan) -> None:
    shapes = [tuple(batches[0].tokens.shape) for batches in Loader(plan, micro_batch=1)]
    names = name_steps(plan, range(plan.steps))
    assert names == [f"{'first' if n < 16 else 'then'}/{shapes[n][1]}" for n in range(32)]
    steps, phases = Counter(names), split_by_length(plan)
    assert {phase.name: phase.steps for phase in phases} == steps and len(steps) == 6
    assert sum(phase.tokens for phase in phases) == plan.tokens
    for phase in phases:
        assert phase.batch_rows * phase.seq_len == BATCH * L
        for dp, tokens in ((1, L), (2, 3 * L), (3, 2 * L), (8, L)):
            rows = micro_rows(tokens, phase, dp)
            whole = micro_rows(tokens, phase.whole, dp)
            assert rows * phase.seq_len == whole * L
            assert micro_batches(rows, phase, dp) == micro_batches(whole, phase.whole, dp)


def test_each_length_is_priced_by_its_share(mixture: Path, plan: Plan, tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(f"precision: bf16\nmicro_batch_tokens: {L}\n")
    words = ("price", str(run), *CLUSTER, "--gpus", "4", "--no-search")
    priced, text = ask(*words, "--mixture", str(mixture))
    phases, means = priced[:3], priced[3:]
    alone = {
        length: ask(*words, "--seq-len", str(length), "--batch-tokens", str(BATCH * L))[0][0]
        for length in SHARES
    }
    for length, phase in zip(SHARES, phases, strict=True):
        assert phase["phase"] == f"first/{length}"
        assert [phase[key] for key in ("seconds", "memory", "layout")] == [
            alone[length][key] for key in ("seconds", "memory", "layout")
        ]
    steps = Counter(name_steps(plan, range(plan.steps)))
    for name, mean in zip(("first", "then"), means, strict=True):
        expected = sum(steps[f"{name}/{n}"] / 16 * alone[n]["seconds"] for n in SHARES)
        assert mean["phase"] == name and mean["seconds"] == pytest.approx(expected, rel=1e-12)
    assert max(seconds := [alone[n]["seconds"] for n in SHARES]) > 1.0001 * min(seconds)
    assert "of the steps have rows of 64 tokens" in text


def test_a_plan_serves_all_lengths(mixture: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.yaml"
    words = (*CLUSTER, "--mixture", str(mixture))
    answer, text = ask(*words, "--gpus", "4", "--out", str(out), "--explain", "pp=1")
    planned = yaml.safe_load(out.read_text())
    by_length = {phase["seq_len"]: phase for phase in planned["planned"]["phases"]}
    assert {*by_length} == {*SHARES}
    assert planned["predicted"]["memory"] == max(phase["memory"] for phase in by_length.values())
    for mean in answer["means"]:
        assert {s["seq_len"]: s["seconds"] for s in mean["steps"]} == {
            length: phase["seconds"] for length, phase in by_length.items()
        }
    assert "pp=1 in phase first:" in text and "a step on average" in text
    [*_, first, then] = ask(*words, "--gpus", "2,4")[0]
    assert (first["phase"], then["phase"]) == ("first", "then")
    assert first["seconds"] == pytest.approx(answer["means"][0]["seconds"], rel=1e-12)
    job: Any = SimpleNamespace(
        plan=resolve_file(str(mixture)),
        model=load_model_config("tiny-transformer"),
        processes=4,
        precision=PRECISIONS["bf16"],
        run=replace(RunConfig(), device="cuda"),
    )
    stored = load_plan(str(out))
    assert [(mean.phase, mean.seconds) for mean in stored.planned.means] == [
        (mean["phase"], mean["seconds"]) for mean in answer["means"]
    ]
    shown = CliRunner().invoke(main, ["plan", "show", str(out)])
    seconds = format_seconds(first["seconds"])
    assert f"time         a step on average: {seconds} in first, " in shown.output + shown.stderr
    assert not list(find_differences(stored, job))
    [_, *later_phases] = stored.planned.phases
    incomplete = replace(stored, planned=replace(stored.planned, phases=tuple(later_phases)))
    assert "phase first/64: 64 tokens a row" in "\n".join(find_differences(incomplete, job))
