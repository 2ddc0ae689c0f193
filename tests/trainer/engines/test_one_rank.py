"""FSDP2 on one rank: an engine without gathers, beside torch's FSDP2 by block, to the bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.trainer.engines.config import EngineConfig
from headrace.trainer.engines.deepspeed import DeepSpeedConfig
from headrace.trainer.engines.fsdp.one_rank import OneRankConfig
from headrace.trainer.engines.fsdp2 import Fsdp2Config
from headrace.trainer.engines.optimizers.config import GroupConfig
from headrace.trainer.engines.shard_groups import LayerShards

FROZEN = (GroupConfig(match="blocks.0.*", lr=0.0), GroupConfig(match="embedding.weight", lr=0.5))
WHOLE = (
    *(Fsdp2Config(gather=gather) for gather in (None, "step", "micro-batch")),
    Fsdp2Config(gather="step", shard=1),
    *(DeepSpeedConfig(zero=zero) for zero in (0, 1, 2, 3)),  # type: ignore[arg-type]
)
LESS = (
    Fsdp2Config(gather="block"),
    Fsdp2Config(keep_last=1),
    Fsdp2Config(forward_prefetch=1),
    Fsdp2Config(backward_prefetch=2),
    Fsdp2Config(layers=(LayerShards(layers=(0, 1), reshard=False),)),
    Fsdp2Config(offload="cpu"),
    DeepSpeedConfig(offload_optimizer="cpu"),
    DeepSpeedConfig(extra={"wall_clock_breakdown": True}),
)


@pytest.mark.parametrize("engine", WHOLE)
def test_one_rank_gathers_nothing(engine: EngineConfig) -> None:
    compiled = replace(engine, compile=True, compile_backend="eager")
    for config in (engine, compiled):
        one_rank = config.for_ranks(1)
        assert isinstance(one_rank, OneRankConfig) and config.for_ranks(2) is config
        assert one_rank.compile == config.compile
        assert one_rank.compile_backend == config.compile_backend


@pytest.mark.parametrize("engine", LESS)
def test_keys_that_hold_less_and_deepspeeds_keep_their_engine(engine: EngineConfig) -> None:
    assert engine.for_ranks(1) is engine


def test_plans_try_what_one_rank_keeps_apart() -> None:
    """The rule of a run, and no second one: no two candidates are one engine."""
    kinds = (Fsdp2Config, DeepSpeedConfig)
    candidates = [engine for kind in kinds for engine in kind.candidates(None, alone=True)]
    assert candidates == [Fsdp2Config(), Fsdp2Config(gather="block")]
    engines = {engine.for_ranks(1) for engine in (*candidates, *WHOLE, LESS[0])}
    assert engines == {engine.for_ranks(1) for engine in candidates}


def differences(
    in_processes: Any, folder: Path, layout: str, model: str, ranks: int, **options: Any
) -> list[str]:
    """Return what differs between the engine of one rank and torch's, after training: `steps`, and
    tensors of the state."""
    names = [layout, f"{layout}-block"]
    results = in_processes(ranks, "parity", folder, layouts=names, model=model, **options)
    ours, torchs = (torch.load(folder / f"{name}.pt") for name in names)
    assert ours.keys() == torchs.keys()
    wrong = [key for key in ours if not torch.equal(ours[key], torchs[key])]
    return wrong + ["steps"] * (results[names[0]] != results[names[1]])


@pytest.mark.parametrize(("model", "precision"), [("shared", "bf16"), ("tiny", "fp32")])
def test_one_rank_has_the_bits_of_fsdp2(
    in_processes: Any, tmp_path: Path, model: str, precision: str
) -> None:
    """Two micro-batches a step; experts without tokens, a block that is called twice."""
    layout = f"fsdp2-0-{precision}"
    assert differences(in_processes, tmp_path, layout, model, 1, steps=3) == []


@pytest.mark.parametrize(("fault", "equal"), [(None, True), ("half sums", False)])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_one_rank_computes_what_deepspeed_does(
    in_processes: Any, tmp_path: Path, precision: str, fault: str | None, equal: bool
) -> None:
    """To rounding: DeepSpeed's tensors are parts of a flat one, so the norm is summed in another
    order, and the CPU's AdamW rounds the last elements of a tensor otherwise than those before.
    ZeRO-3 has another function for linear layers."""
    bounds = {1: 1e-6, 2: 1e-6, 3: 3e-2 if precision == "bf16" else 1e-4}
    zeros = list(bounds) if fault is None else [1]
    layouts = [f"fsdp2-0-{precision}", *(f"deepspeed-{zero}-{precision}" for zero in zeros)]
    results = in_processes(
        1, "parity", tmp_path, layouts=layouts, model="tiny", steps=2, fault=fault
    )
    ours, *references = (torch.load(tmp_path / f"{layout}.pt") for layout in layouts)
    for zero, layout, reference in zip(zeros, layouts[1:], references, strict=True):
        steps = torch.tensor(results[layouts[0]]), torch.tensor(results[layout])
        pairs = [steps, *((ours[key], reference[key]) for key in reference)]
        errors = [float((a - b).norm() / b.norm().clamp(min=1e-30)) for a, b in pairs]
        assert ours.keys() == reference.keys() and (max(errors) < bounds[zero]) == equal, layout


@pytest.mark.parametrize("fault", ["late weights", "half sums"])
def test_faults_of_the_weights_are_found(in_processes: Any, tmp_path: Path, fault: str) -> None:
    """Negative control."""
    options = {"steps": 2, "fault": fault}
    assert "steps" in differences(in_processes, tmp_path, "fsdp2-0-bf16", "tiny", 1, **options)


MODELS = (
    *("tiny", "tiny-transformer", "tiny-hybrid", "tiny-zamba", "tiny-moe", "tiny-mamba"),
    "tiny-delta",
)
OPTIONS: dict[str, dict[str, Any]] = {
    "one micro-batch": {"at_once": 8},
    "eight micro-batches": {"at_once": 1},
    "frozen": {"groups": FROZEN},
    "muon": {"optimizer": "muon"},
    "average": {"ema": 0.9},
    "no clipping": {"clip": 0.0},
    "recompute": {"recompute": "block"},
    "compiled": {"backend": "eager"},
}


@pytest.mark.long
@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp8"])
@pytest.mark.parametrize("model", [*MODELS, "shared", "experts"])
def test_every_model_has_the_bits_of_fsdp2(
    in_processes: Any, tmp_path: Path, model: str, precision: str
) -> None:
    layout = f"fsdp2-0-{precision}"
    assert differences(in_processes, tmp_path, layout, model, 1, steps=3) == []


@pytest.mark.long
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("model", ["tiny", "shared"])
def test_every_option_has_the_bits_of_fsdp2(
    in_processes: Any, tmp_path: Path, model: str, precision: str, option: str
) -> None:
    layout, options = f"fsdp2-0-{precision}", OPTIONS[option]
    assert differences(in_processes, tmp_path, layout, model, 1, steps=2, **options) == []


@pytest.mark.long
@pytest.mark.parametrize("words", ["pp2", "pp2x2", "tp2", "pp2gpipe", "tp2ep2"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("model", ["tiny", "shared"])
def test_stages_and_tensor_ranks_have_the_bits_of_fsdp2(
    in_processes: Any, tmp_path: Path, model: str, precision: str, words: str
) -> None:
    if "ep" in words and model == "tiny":
        pytest.skip("no experts")
    layout = f"fsdp2-0-{precision}-{words}"
    assert differences(in_processes, tmp_path, layout, model, 2, steps=2) == []


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_each_engine_continues_the_others_checkpoint(
    in_processes: Any, tmp_path: Path, precision: str
) -> None:
    """After an evaluation: weights are cast again when a checkpoint replaces their masters."""
    names = [f"fsdp2-0-{precision}", f"fsdp2-0-{precision}-block"]
    saved = in_processes(1, "save_all", tmp_path, layouts=names, steps=2, model="shared")
    assert saved[names[0]] == saved[names[1]]
    loaded = in_processes(
        1, "load_all", tmp_path, sources=names, targets=names, steps=2, used=True, model="shared"
    )
    for pair, (distance, steps) in loaded.items():
        assert distance == 0.0 and steps == saved[names[0]][: len(steps)], pair


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_discarded_step_changes_nothing(in_processes: Any, precision: str) -> None:
    layout = f"fsdp2-0-{precision}"
    result = in_processes(1, "left_out", Path(), layouts=[layout], model="shared")
    assert result == {layout: [False, True, True, True]}
