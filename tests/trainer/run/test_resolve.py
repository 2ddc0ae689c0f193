"""Resolving a request, and resuming only the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.configs import CONFIGS

from headrace.console.errors import ConfigError, LayoutError, MisuseError, RunError, SeveralErrors
from headrace.models.config.options.precision import Fp8Config
from headrace.trainer.engines.deepspeed import DeepSpeedConfig
from headrace.trainer.folders.folder import RunFolder
from headrace.trainer.run import job as jobs
from headrace.trainer.run import resolve
from headrace.trainer.run.job import Job
from headrace.trainer.run.request import RunRequest

TINY = str(CONFIGS / "tiny.yaml")


def saved(job: Job) -> Job:
    job.folder.prepare()
    job.save()
    return job


def test_a_job_is_resolved_and_loaded_back_equal(ask: Any) -> None:
    first = saved(ask("optimizer.lr=1e-2", "processes=2"))
    assert (first.run.precision, first.run.device, first.run.processes) == ("fp32", "cpu", 2)
    assert first.threads >= 1
    again = resolve.load(first.folder)
    assert (again.run, again.model, again.plan.hash) == (first.run, first.model, first.plan.hash)
    assert ask("optimizer.lr=1e-2", "processes=2").run == first.run


def test_threads_follow_the_processes_of_each_start(
    ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "threads_per_rank", lambda processes: 8 // processes)
    first = saved(ask("processes=2"))
    assert first.threads == 4
    assert resolve.load(first.folder, ["processes=8"]).threads == 1
    assert resolve.load(first.folder, ["processes=8", "threads=3"]).threads == 3


def test_an_external_launcher_decides_the_world_size(
    ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = saved(ask("processes=2"))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert resolve.load(first.folder).processes == 4  # what is in the folder is of the start before
    for start_it in (
        lambda: ask("processes=2"),
        lambda: resolve.load(first.folder, ["processes=2"]),
    ):
        with pytest.raises(LayoutError, match="processes=2, but the launcher"):
            start_it()
    assert ask("processes=4").processes == ask().processes == 4


def test_another_run_cannot_take_over_the_folder(ask: Any, tmp_path: Path) -> None:
    saved(ask("optimizer.lr=1e-2"))
    with pytest.raises(RunError, match="holds another run") as caught:
        ask("optimizer.lr=1e-3", "model.width=48", "seed=9")
    with pytest.raises(RunError, match="seed: 1 there, 5 here"):
        resolve.load(RunFolder(tmp_path / "run"), ["seed=5"])
    for line in ("optimizer.lr: 0.01 there, 0.001 here", "model.width: 36 there", "seed: 1 there"):
        assert line in str(caught.value)


def test_fp8_defines_a_run(ask: Any, tmp_path: Path) -> None:
    """The defaults of fp8 are written out; each of its keys makes another run."""
    bf16 = ask("precision=bf16", out=tmp_path / "bf16")
    default = saved(ask("precision=fp8"))
    assert default.run.fp8 == default.precision.fp8 == Fp8Config()
    assert ask("precision=fp8", "fp8.ends=1").identity == default.identity != bf16.identity
    with pytest.raises(RunError, match=r"fp8\.ends: 1 there, 0 here"):
        ask("precision=fp8", "fp8.ends=0")
    fewer_layers = ask("precision=fp8", "fp8.ends=0", out=tmp_path / "other")
    assert fewer_layers.identity != default.identity
    assert fewer_layers.precision.fp8 == Fp8Config(ends=0)
    assert bf16.precision.fp8 is None


def test_the_layout_may_change(ask: Any) -> None:
    saved(ask("processes=2"))
    result = ask("processes=4", "engine.zero=3", "checkpoints.every=7", "micro_batch_tokens=16")
    assert result.dp == 4 and result.run.checkpoints.every == 7


def test_what_divides_a_micro_batch_defines_a_run_that_balances_over_it(
    ask: Any, tmp_path: Path
) -> None:
    over = "model.operators.moe.balance_over="
    rows = saved(ask("processes=2", over + "row", model="tiny-moe", out=tmp_path / "rows"))
    again = resolve.load(rows.folder, ["processes=4", "micro_batch_tokens=16"])
    assert again.dp == 4 and again.identity == rows.identity

    coupled = saved(ask("processes=2", over + "micro-batch", model="tiny-moe"))
    assert resolve.load(coupled.folder, ["processes=4", "layout.tp=2"]).identity == coupled.identity
    for word, line in (
        ("processes=4", "dp: 2 there, 4 here"),
        ("micro_batch_tokens=16", "micro_batch_tokens: 8192 there, 16 here"),
        ("layout.cp=2", "layout.cp: 1 there, 2 here"),
    ):
        with pytest.raises(RunError, match=line) as caught:
            resolve.load(coupled.folder, [word])
        assert "moe balances over a micro-batch" in str(caught.value.hint)
    by_micro_batch = ask(
        "processes=4", over + "micro-batch", model="tiny-moe", out=tmp_path / "other"
    )
    assert by_micro_batch.identity != coupled.identity


def test_a_resume_may_change_the_engine(ask: Any) -> None:
    """The folder stores every option of the first engine."""
    folder = saved(ask("engine.kind=fsdp2", "engine.gather=micro-batch")).folder
    assert resolve.load(folder, ["engine.kind=deepspeed"]).run.engine == DeepSpeedConfig()
    changed = resolve.load(folder, ["engine.kind=deepspeed", "engine.zero=3"])
    assert changed.run.engine == DeepSpeedConfig(zero=3)
    with pytest.raises(ConfigError, match="shard"):
        resolve.load(folder, ["engine.kind=deepspeed", "engine.shard=2"])


def test_wrong_keys_are_reported_together(ask: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        ask("optimiser.lr=1", "checkpoints.evry=2", "engine.zero=4")
    for word in ("optimiser", "evry", "zero"):
        assert word in str(caught.value)


def test_wrong_keys_of_all_files_are_reported_together(tmp_path: Path) -> None:
    mixture = tmp_path / "mixture.yaml"
    mixture.write_text("sources: {web: {date: x}}")
    words = ["checkpoints.evry=2", "model.witdh=3", "mixture.phazes.a=1"]
    asked = RunRequest(model=TINY, mixture=str(mixture), out=str(tmp_path / "run"), overrides=words)
    with pytest.raises(SeveralErrors) as caught:
        resolve.resolve(asked)
    for near in ("`every`", "`width`", "`phases`", "`data`"):
        assert f"did you mean {near}?" in str(caught.value)


def test_mixture_overrides_need_a_mixture(ask: Any) -> None:
    with pytest.raises(ConfigError, match=r"mixture\.seed.*there is no mixture") as caught:
        ask("mixture.seed=2", "mixture.phases.a.tokens=1M")
    assert "mixture.phases.a.tokens" in str(caught.value)


def test_a_run_needs_exactly_one_source_of_rows(tmp_path: Path) -> None:
    with pytest.raises(MisuseError, match="no source of rows"):
        resolve.resolve(RunRequest(model=TINY, out=str(tmp_path / "run")))
    with pytest.raises(SeveralErrors, match="not both") as caught:
        words = ["synthetic.steps=2"]
        resolve.resolve(
            RunRequest(model=TINY, out=str(tmp_path), mixture="m.yaml", overrides=words)
        )
    assert "file not found: m.yaml" in str(caught.value)


def test_a_batch_job_decides_its_own_world_size(
    ask: Any,
) -> None:
    folder = saved(ask("processes=2")).folder
    words = ["slurm.nodes=2", "slurm.processes=2"]
    assert resolve.load(folder, words, slurm=True).processes == 4
    with pytest.raises(MisuseError, match=r"processes=2, but a batch job of 2 × 2 has 4"):
        resolve.load(folder, [*words, "processes=2"], slurm=True)
