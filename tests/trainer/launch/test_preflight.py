"""Preflight checks."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch

from headrace.console.errors import (
    CheckpointError,
    ConfigError,
    LayoutError,
    MissingError,
    MisuseError,
    PlanError,
    SeveralErrors,
    StorageError,
)
from headrace.models.kernels import choice
from headrace.models.layers.attention import flash4
from headrace.trainer.accounting.describe import describe, eager_operators, lines
from headrace.trainer.launch import preflight as checks
from headrace.trainer.launch import start
from headrace.trainer.launch.kernels import attention, scans
from headrace.trainer.launch.kernels.attention import check_flash4
from headrace.trainer.launch.kernels.scans import check_fla
from headrace.trainer.launch.options import StartOptions


def test_layouts_that_do_not_fit_are_rejected(ask: Any) -> None:
    with pytest.raises(LayoutError, match=r"data-parallel ranks \(5\): .* has 4"):
        checks.check(ask("processes=5"))
    with pytest.raises(LayoutError, match="does not divide 1 process"):
        checks.check(ask("layout.tp=2"))
    with pytest.raises(LayoutError, match="does not divide the 4"):
        checks.check(ask("processes=4", "engine.kind=fsdp2", "engine.shard=3"))
    checks.check(ask("processes=4", "engine.kind=fsdp2", "engine.shard=2"))
    with pytest.raises(LayoutError, match="sums bf16 gradients in bf16") as caught:
        checks.check(ask("engine.zero=0", "precision=bf16"))
    assert caught.value.hint is not None and "engine.zero=1" in caught.value.hint
    checks.check(ask("engine.zero=0", "precision=fp32"))


def test_stages_that_do_not_fit_are_rejected_together(ask: Any) -> None:
    with pytest.raises(
        LayoutError, match=r"ZeRO-3 \(engine.zero=3\) needs the same modules"
    ) as caught:
        checks.check(ask("processes=2", "layout.pp=2", "engine.zero=3"))
    assert caught.value.hint is not None and "engine.kind=fsdp2" in caught.value.hint
    with pytest.raises(SeveralErrors) as several:
        checks.check(ask("processes=8", "layout.pp=8", "engine.zero=3"))
    for part in ("needs the same modules", "are 8 chunks, and the model has 5 layers"):
        assert part in str(several.value)
    [_, layout] = several.value.errors
    assert "layout.pp" not in str(layout.hint), "ZeRO-3 has no stages"
    checks.check(ask("processes=2", "layout.pp=2", "engine.zero=2"))


def test_the_device_has_an_implementation_of_attention(ask: Any) -> None:
    with pytest.raises(LayoutError, match=r"\[cudnn, efficient\], and the CPU has flash and math"):
        checks.check(ask("kernels.attention=[cudnn, efficient]"))
    alone = ask("kernels.attention=[cudnn]", "deterministic=true", "device=cuda", dry_run=True)
    with pytest.raises(LayoutError, match="is not deterministic"):
        checks.check(alone)
    with pytest.raises(ConfigError, match=r"kernels\.attention"):
        ask("kernels.attention=[cudn]")
    checks.check(ask("kernels.attention=[cudnn, math]"))


def test_attention_that_nothing_computes_is_refused(
    ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = ["device=cuda", "precision=bf16"]
    options = "model.operators.attention={kind: attention, heads: 2, head_dim: 8, window: 8}"
    windowed = [options, *gpu]
    with pytest.raises(LayoutError, match=r"a window of 8 \(cudnn: it takes no windows\)"):
        checks.check(ask(*windowed, "kernels.attention=[cudnn]", dry_run=True))
    checks.check(ask(*windowed, "kernels.attention=[cudnn, flash]", dry_run=True))
    job = ask(*windowed, "kernels.attention=[flash4, math]", dry_run=True)
    checks.check(job)
    with pytest.raises(MissingError, match="flash-attn-4 is not installed") as missing:
        check_flash4(job)
    assert missing.value.hint == 'pip install "headrace[flash4]"'
    monkeypatch.setattr(flash4, "installed", lambda: "4.0.0b36")
    monkeypatch.setattr(attention, "gpu_capabilities", lambda: [(9, 0)])
    check_flash4(job)
    monkeypatch.setattr(attention, "gpu_capabilities", lambda: [(8, 0), (9, 0)])
    with pytest.raises(LayoutError, match=r"it needs compute capability 9\.0 .* not 8\.0"):
        check_flash4(job)
    monkeypatch.setattr(torch, "__version__", "2.14.1")
    with pytest.raises(LayoutError, match=r"torch 2\.14\.1 calls an older flash-attn-4"):
        check_flash4(job)


def test_scans_of_another_package_are_refused_where_they_cannot_run(
    ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fla = "model.operators.attention={kind: delta, heads: 2, kernel: fla}"
    with pytest.raises(LayoutError, match="which needs a GPU"):
        check_fla(ask(fla, dry_run=True))
    gpu = [fla, "device=cuda", "precision=bf16"]
    divided = ask(*gpu, "layout.cp=2", "processes=2", dry_run=True)
    with pytest.raises(LayoutError, match="passes no states between ranks"):
        check_fla(divided)
    job = ask(*gpu, dry_run=True)
    check_fla(job)
    monkeypatch.setattr(scans, "find_spec", lambda _: None)
    with pytest.raises(MissingError, match="flash-linear-attention is not installed") as missing:
        check_fla(job)
    assert missing.value.hint == 'pip install "headrace[fla]"'


def test_recompute_fits_the_layers_and_the_engine(ask: Any) -> None:
    with pytest.raises(ConfigError, match="recompute: has 2 rules, and the model 5 layers"):
        checks.check(ask("recompute=[none, block]"))
    with pytest.raises(LayoutError, match="a compiled block is one operation: its"):
        checks.check(ask("recompute={save: [matmul]}", "engine.kind=fsdp2", "engine.compile=true"))
    checks.check(ask("recompute={every: 2}", "engine.kind=fsdp2", "engine.compile=true"))


FP8 = ("precision=fp8", "fp8.smallest=64")


def test_fp8_that_computes_nothing_is_rejected(ask: Any) -> None:
    with pytest.raises(LayoutError, match=r"12 smaller than 2,048") as caught:
        checks.check(ask("precision=fp8"))
    assert "fp8.smallest" in str(caught.value.hint)
    checks.check(ask(*FP8, model="tiny-hybrid"))
    with pytest.raises(ConfigError, match="fp8 needs precision=fp8, not bf16"):
        ask("precision=bf16", "fp8.ends=0")


def test_a_gpu_without_fp8_is_rejected_by_name(ask: Any) -> None:
    """A CPU emulates FP8, and the start says so."""
    gpu = {"get_device_capability": (8, 0), "get_device_name": "NVIDIA A100"}
    with ExitStack() as stack:
        for name, value in {**gpu, "is_available": True, "device_count": 1}.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, lambda *_, v=value: v))
        job = ask(*FP8, "device=cuda", model="tiny-hybrid")
        with pytest.raises(LayoutError, match=r"GPU 0 \(NVIDIA A100\) has compute capability 8.0"):
            checks.check_machine(job)
        assert not describe(job)["warnings"]
        checks.check_machine(ask("precision=bf16", "device=cuda"))
        stack.enter_context(
            mock.patch.object(torch.cuda, "get_device_capability", lambda _: (8, 9))
        )
        checks.check_machine(job)
    emulated = ask(*FP8, "device=cpu", model="tiny-hybrid")
    checks.check_machine(emulated)
    about = describe(emulated)
    assert any("the CPU emulates FP8" in line for line in lines(about))
    assert any(line.startswith("fp8 ") and "in training" in line for line in lines(about))
    assert not describe(ask("precision=bf16"))["fp8"]


def test_compile_fits_the_engine(ask: Any) -> None:
    checks.check(ask("processes=2", "engine.compile=true", "layout.tp=2"))
    zero = ("engine.compile=true", "engine.zero=3")
    checks.check(ask(*zero))
    with pytest.raises(
        LayoutError, match=r"ZeRO-3 \(engine.zero=3\) gathers the shared block"
    ) as no:
        checks.check(ask(*zero, model="tiny-zamba"))
    assert "engine.kind=fsdp2" in str(no.value.hint)
    checks.check(ask("engine.compile=true", "engine.zero=2", model="tiny-zamba"))
    with pytest.raises(ConfigError, match="compile_backend and compile_fallback need compile"):
        ask("engine.compile_backend=eager")


def test_operators_that_run_eagerly_are_named(ask: Any) -> None:
    def warnings(*words: str) -> list[str]:
        return eager_operators(ask("processes=2", "layout.cp=2", *words))

    ring = ("layout.attention=ring", "engine.compile=true")
    [line] = warnings(*ring)
    assert line.startswith("engine.compile: `attention` runs eagerly: ring attention")
    assert not warnings("engine.compile=true") and not warnings("layout.attention=ring")


@pytest.mark.parametrize("compiler", ["missing", "broken"])
def test_a_missing_compiler_is_named_before_the_start(
    compiler: str, ask: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler is the only thing of this machine that counts here: its disk may be full, and
    its own compiler may fail there, while other tests run."""
    monkeypatch.setattr(checks, "check_disk", lambda job: None)
    script(tmp_path / "broken", "echo 'fatal error: Python.h is not here' >&2; exit 1")
    script(tmp_path / "works", 'while [ "$1" != -o ]; do shift; done; echo > "$2"')
    monkeypatch.setenv("CXX", str(tmp_path / compiler))
    words = "is not installed" if compiler == "missing" else "fails: fatal error: Python.h is not"
    result = ask("engine.compile=true")
    with pytest.raises(MissingError, match=rf"needs a C\+\+ compiler on CPU: .*{words}") as caught:
        start.start(result, StartOptions(), mock.Mock(), mock.Mock(), mock.Mock())
    assert "CXX" in str(caught.value.hint)
    assert not result.folder.root.exists()
    checks.check_machine(ask("engine.compile=true", "engine.compile_backend=aot_eager"))
    checks.check_machine(ask())
    monkeypatch.setenv("CXX", str(tmp_path / "works"))
    checks.check_machine(result)


def test_what_kernels_need_is_named_before_the_start(
    ask: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "check_disk", lambda job: None)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CC", "/nowhere/cc")
    monkeypatch.setattr(choice, "find_device_problem", lambda _: None)
    gpu = {"get_device_capability": (9, 0), "is_available": True, "device_count": 1}
    for name, value in gpu.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, v=value: v)
    job = ask("device=cuda", "precision=bf16")
    with pytest.raises(MissingError, match=r"a C compiler .* no /nowhere/cc") as caught:
        start.start(job, StartOptions(), mock.Mock(), mock.Mock(), mock.Mock())
    assert caught.value.hint == "apt-get install gcc" and not job.folder.root.exists()
    plain = [f"model.{key}kernel=torch" for key in ("", "operators.attention.", "operators.glu.")]
    checks.check_machine(ask("device=cuda", "precision=bf16", *plain, model="tiny-transformer"))
    checks.check_machine(ask("device=cpu"))
    monkeypatch.delenv("CC")
    checks.check_machine(job)


def script(file: Path, text: str) -> None:
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


def test_a_vocabulary_larger_than_the_models_is_rejected(ask: Any) -> None:
    result = ask()
    with pytest.raises(PlanError, match="has 50 ids, the model embeds 37"):
        checks.check(replace(result, plan=replace(result.plan, vocab_size=50)))


def test_an_impossible_folder_is_rejected_early(ask: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"cannot write to the run's folder .*is not a folder"):
        checks.check_disk(ask(out=tmp_path / "file" / "run"))
    assert not (tmp_path / "run").exists()


def test_all_problems_are_reported_together(ask: Any) -> None:
    result = ask("processes=5", "model.learned_positions=8", "engine.kind=fsdp2", "engine.shard=3")
    with pytest.raises(SeveralErrors) as caught:
        checks.check(result)
    for part in ("engine.shard=3 does not divide", "the model's position table"):
        assert part in str(caught.value)


def test_engine_and_layout_are_reported_together(ask: Any) -> None:
    words = ("processes=4", "layout.ep=4", "engine.kind=fsdp2", "engine.shard=3")
    with pytest.raises(SeveralErrors) as caught:
        checks.check(ask(*words))
    for part in ("engine.shard=3 does not divide", "ep=4 splits experts, and the model has none"):
        assert part in str(caught.value)


def test_engines_that_do_not_split_experts_are_rejected(ask: Any) -> None:
    split = partial(ask, "processes=4", "layout.ep=4", model="tiny-moe")
    for zero in (0, 3):
        with pytest.raises(LayoutError, match=rf"ZeRO-{zero}.*layout\.ep=4") as caught:
            checks.check(split(f"engine.zero={zero}"))
        assert "engine.kind=fsdp2" in str(caught.value.hint)
    checks.check(split("engine.zero=2"))
    three = ("processes=12", "synthetic.batch_rows=12", "engine.kind=fsdp2", "engine.shard=3")
    with pytest.raises(LayoutError, match="neither divides the other"):
        checks.check(ask(*three, "layout.ep=4", model="tiny-moe"))
    checks.check(split("engine.kind=fsdp2", "engine.shard=2"))


def test_phases_that_are_too_small_have_one_hint(ask: Any) -> None:
    """The phase with the fewest rows decides; a hint for each would contradict the others."""
    job = ask("processes=4", "layout.tp=1")
    rows = {"warm": 2, "stable": 8, "anneal": 1}
    phases = [
        replace(job.plan.phases[0], name=name, batch_rows=count) for name, count in rows.items()
    ]
    small = replace(job, plan=cast(Any, SimpleNamespace(phases=phases)))
    with pytest.raises(LayoutError, match="phase warm has 2, phase anneal has 1") as caught:
        checks._check_batches(small)
    assert caught.value.hint == "use at most processes=1, or larger batches"


def test_the_noise_of_a_batch_of_one_row_is_rejected(ask: Any) -> None:
    words = ["synthetic.batch_rows=1", "processes=1"]
    with pytest.raises(PlanError, match=r"watch\.noise .* phase synthetic has 1 row in a step"):
        checks.check(ask(*words, "watch.noise=10"))
    checks.check(ask("synthetic.batch_rows=2", "processes=1", "watch.noise=10"))


def test_rows_longer_than_the_position_table_are_rejected(ask: Any) -> None:
    checks.check(ask("model.learned_positions=16"))
    with pytest.raises(
        PlanError, match="rows of 16 tokens, and the model's position table"
    ) as caught:
        checks.check(ask("model.learned_positions=8"))
    assert caught.value.hint is not None and "learned_positions=16" in caught.value.hint


def test_a_disk_too_small_for_a_checkpoint_is_rejected(
    ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:

    result = ask()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(StorageError, match="one checkpoint takes"):
        start.start(result, StartOptions(), mock.Mock(), mock.Mock(), mock.Mock())
    assert not result.folder.root.exists()
    with pytest.raises(StorageError, match="1 byte free, and one checkpoint takes"):
        checks.check_disk(result)


def test_initial_weights_define_the_model_and_fit_it(
    ask: Any, checkpoint_of: Any, tmp_path: Path
) -> None:
    from headrace.models.config.config import load_model_config
    from headrace.models.model.model import Model

    model = Model(load_model_config("tiny-transformer"))
    run = checkpoint_of(model, 3)
    result = ask(f"init_from.path={run.root}", model=None, out=tmp_path / "new")
    assert result.model == model.config and result.run.init_from.step == 3, "pinned"
    checks.check(result)
    foreign_job = ask(f"init_from.path={run.root}", out=tmp_path / "new")
    with pytest.raises(CheckpointError, match="belong to another model") as caught:
        checks.check(foreign_job)
    assert "norm.weight: [128] there, [36] here" in str(caught.value)


def test_a_snapshot_needs_a_gpu_and_a_step_of_the_plan(ask: Any) -> None:
    result = ask()
    with pytest.raises(MisuseError, match="needs a GPU") as caught:
        checks.check_profile(result, StartOptions(memory_snapshot=2))
    assert "--profile 2:3" in str(caught.value.hint)
    gpu = replace(result, run=replace(result.run, device="cuda"))
    checks.check_profile(gpu, StartOptions(memory_snapshot=2))
    with pytest.raises(MisuseError, match="--memory-snapshot 6: the plan has steps 0 to 5"):
        checks.check_profile(gpu, StartOptions(memory_snapshot=6))
