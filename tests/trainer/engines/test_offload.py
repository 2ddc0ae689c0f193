"""Optimizers in host memory: the same bits, checkpoints that load everywhere, and numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.console.errors import ConfigError, LayoutError
from headrace.console.machine import free_memory
from headrace.models.accounting.state import host_bytes
from headrace.trainer.accounting.describe import describe, lines
from headrace.trainer.launch import preflight

PAIRS = {
    "deepspeed-1-bf16-offload": "deepspeed-1-bf16",
    "deepspeed-2-fp32-offload": "deepspeed-2-fp32",
    "deepspeed-3-bf16-offload": "deepspeed-3-bf16",
    "fsdp2-0-bf16-away": "fsdp2-0-bf16",
}
"""Layouts that offload, and the same without."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        ["deepspeed-1-bf16-offload", "fsdp2-0-bf16-away"],
        pytest.param([*PAIRS], marks=pytest.mark.long),
    ],
    ids=["some", "all"],
)
def test_offloading_changes_no_bit(in_processes: Any, tmp_path: Path, names: list[str]) -> None:
    pairs = {name: PAIRS[name] for name in names}
    layouts = [*pairs, *pairs.values()]
    result = in_processes(2, "parity", tmp_path, layouts=layouts, steps=2)
    for offloaded, plain in pairs.items():
        assert result[offloaded] == result[plain], offloaded
        have, expected = (torch.load(tmp_path / f"{name}.pt") for name in (offloaded, plain))
        assert have.keys() == expected.keys()
        assert all(torch.equal(have[key], expected[key]) for key in expected), offloaded


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "layouts"),
    [
        (2, ["deepspeed-1-bf16-offload-ep2"]),
        pytest.param(
            4,
            ["deepspeed-1-bf16-offload-ep2", "deepspeed-2-fp32-offload-ep2"],
            marks=pytest.mark.long,
        ),
    ],
    ids=["alone", "replicas"],
)
def test_offloading_split_experts_changes_no_bit(
    in_processes: Any, tmp_path: Path, world: int, layouts: list[str]
) -> None:
    """On four ranks, two hold each expert."""
    plain = [layout.replace("-offload", "") for layout in layouts]
    every = [*layouts, *plain]
    result = in_processes(world, "parity", tmp_path, layouts=every, steps=2, model="shared")
    for name, plain_name in zip(layouts, plain, strict=True):
        assert result[name] == result[plain_name], name
        have, expected = (torch.load(tmp_path / f"{item}.pt") for item in (name, plain_name))
        assert have.keys() == expected.keys()
        assert all(torch.equal(have[key], expected[key]) for key in expected), name


@pytest.mark.long
def test_checkpoints_load_with_and_without(in_processes: Any, tmp_path: Path) -> None:
    layouts = ["deepspeed-3-bf16-offload", "fsdp2-0-bf16"]
    kept = in_processes(2, "save_all", tmp_path, layouts=layouts, steps=1)
    task = {"sources": layouts, "targets": layouts, "steps": 1, "used": True}
    result = in_processes(2, "load_all", tmp_path, **task)
    assert {worst for worst, _ in result.values()} == {0.0}
    assert all(result[f"{name} → {name}"][1] == kept[name] for name in layouts)


@pytest.mark.long
def test_a_refused_step_leaves_nothing_behind(in_processes: Any) -> None:
    layouts = ["deepspeed-1-bf16-offload", "deepspeed-2-bf16-offload", "deepspeed-3-bf16-offload"]
    skipped = in_processes(2, "left_out", layouts=layouts)
    assert all(results == [False, True, True, True] for results in skipped.values()), skipped


def test_host_memory_is_counted_apart(ask: Any) -> None:
    words = ("processes=2", "device=cpu", "precision=bf16", "engine.zero=2")
    plain, away = (describe(ask(*words, *more)) for more in ((), ("engine.offload_optimizer=cpu",)))
    for part in ("masters", "optimizer"):
        assert away["memory"][f"host {part}"] == plain["memory"][part] - fp32_part(away, part)
    shown = "\n".join(lines(away))
    assert " of host memory (" in shown and "optimizer on the CPU" in shown
    assert " of host memory (" not in "\n".join(lines(plain))


def fp32_part(about: dict[str, Any], part: str) -> int:
    """Return the bytes of the fp32 parameters, which stay on the device."""
    return int(about["memory"][part])


@pytest.mark.parametrize(
    "keys", [["engine.offload_optimizer=cpu"], ["engine.kind=fsdp2", "engine.offload=cpu"]]
)
def test_too_little_host_memory_is_an_error_before_the_start(
    ask: Any, monkeypatch: pytest.MonkeyPatch, keys: list[str]
) -> None:
    job = ask("processes=2", "device=cpu", *keys)
    preflight.check_machine(job)
    needed = 2 * host_bytes(describe(job)["memory"])
    monkeypatch.setattr(preflight, "free_memory", lambda: needed - 1)
    with pytest.raises(LayoutError, match="of host memory free for 2 ranks"):
        preflight.check_machine(job)
    monkeypatch.setattr(preflight, "free_memory", lambda: needed)
    preflight.check_machine(job)
    preflight.check_machine(ask("processes=2", "device=cpu"))


def test_muon_is_not_offloaded(ask: Any) -> None:
    job = ask("engine.offload_optimizer=cpu", "optimizer.kind=muon")
    with pytest.raises(LayoutError, match=r"optimizer\.kind=muon multiplies whole matrices"):
        preflight.check(job)


def test_a_container_bounds_the_memory(tmp_path: Path) -> None:
    everything = free_memory(tmp_path)
    assert everything > 1 << 20
    files = {"max": "5000", "current": "3000", "stat": "anon 10\ninactive_file 500\n"}
    for name, text in files.items():
        (tmp_path / f"memory.{name}").write_text(text)
    assert free_memory(tmp_path) == 2500
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory(tmp_path) > 1 << 20


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["engine.offload=nvme"], "engine.offload"),
        (["engine.backward_prefetch=0"], "backward_prefetch must be at least 1, not 0"),
        (["engine.keep_last=-1"], "keep_last must be at least 0, not -1"),
    ],
)
def test_keys_of_fsdp2_have_limits(ask: Any, words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ask("engine.kind=fsdp2", *words)


def test_keys_for_blocks_need_blocks(ask: Any) -> None:
    job = ask("engine.kind=fsdp2", "engine.gather=step", "engine.keep_last=2")
    with pytest.raises(LayoutError, match=r"engine\.keep_last=2 needs weights that are gathered"):
        preflight.check(job)
