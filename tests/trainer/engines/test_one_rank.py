"""FSDP2 on one rank: an engine without gathers, beside torch's FSDP2 by block, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.trainer.engines.deepspeed import DeepSpeedConfig
from headrace.trainer.engines.fsdp.one_rank import OneRankConfig
from headrace.trainer.engines.fsdp2 import Fsdp2Config
from headrace.trainer.engines.optimizers.config import GroupConfig
from headrace.trainer.engines.shard_groups import LayerShards

FROZEN = (GroupConfig(match="blocks.0.*", lr=0.0), GroupConfig(match="embedding.weight", lr=0.5))
BY_BLOCK = (
    Fsdp2Config(gather="block"),
    Fsdp2Config(gather="micro-batch"),
    Fsdp2Config(keep_last=1),
    Fsdp2Config(forward_prefetch=1),
    Fsdp2Config(backward_prefetch=2),
    Fsdp2Config(layers=(LayerShards(layers=(0, 1), reshard=False),)),
    Fsdp2Config(offload="cpu"),
)


@pytest.mark.parametrize("engine", [Fsdp2Config(), Fsdp2Config(gather="step", shard=1)])
def test_one_rank_gathers_nothing(engine: Fsdp2Config) -> None:
    assert isinstance(engine.for_ranks(1), OneRankConfig) and engine.for_ranks(2) is engine


@pytest.mark.parametrize("engine", BY_BLOCK)
def test_keys_that_hold_less_keep_torchs_engine(engine: Fsdp2Config) -> None:
    assert engine.for_ranks(1) is engine


def test_other_engines_have_no_defaults_of_one_rank() -> None:
    engine = DeepSpeedConfig()
    assert engine.for_ranks(1) is engine


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
    found = in_processes(1, "left_out", Path(), layouts=[layout], model="shared")
    assert found == {layout: [False, True, True, True]}
