"""Layers that FSDP2 shards in their own way: `engine.layers`."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.configs import CONFIGS
from support.tasks.parity import check_parity, differences

from headrace.console.errors import ConfigError, LayoutError
from headrace.models.accounting.memory import rank_shards
from headrace.models.accounting.state import Degrees, state_bytes
from headrace.models.config.config import load_model_config
from headrace.models.config.options.precision import PRECISIONS
from headrace.trainer.engines.fsdp2 import Fsdp2Config
from headrace.trainer.engines.shard_groups import LayerShards
from headrace.trainer.launch import preflight
from headrace.trainer.layout.config import LayoutConfig
from headrace.trainer.layout.groups import Parallel

TINY = CONFIGS / "tiny.yaml"
DEGREES = Degrees(dp=4)


def counted(engine: Fsdp2Config) -> dict[str, int]:
    """Bytes of the state of a rank of four."""
    shards = rank_shards(load_model_config(TINY), DEGREES, 0)
    parts = engine.state_layout(PRECISIONS["bf16"], 8, "cpu", LayoutConfig())
    return state_bytes(parts, shards, DEGREES)


def span(first: int, last: int, **choices: Any) -> LayerShards:
    return LayerShards(layers=(first, last), **choices)


def test_kept_layers_are_counted_as_the_last_ones_are() -> None:
    """Weights of layers that stay whole, at the fullest moment of a pass."""
    last = counted(Fsdp2Config(layers=(span(3, 4, reshard=False),)))
    assert last == counted(Fsdp2Config(keep_last=2))
    first = counted(Fsdp2Config(layers=(span(0, 0, reshard=False),)))
    plain = counted(Fsdp2Config())
    assert plain["weights"] < first["weights"]  # beside two others while these run
    assert {name: first[name] for name in ("masters", "optimizer")} == {
        name: plain[name] for name in ("masters", "optimizer")
    }


def test_a_layers_own_shard_group_is_counted() -> None:
    shards = rank_shards(load_model_config(TINY), DEGREES, 0)
    layer_shards = {name: shard for name, shard in shards.items() if name.startswith("blocks.2.")}
    more = counted(Fsdp2Config(layers=(span(2, 2, shard=1),)))["masters"]
    whole, parts = 0, 0
    for shard in layer_shards.values():
        rows, *rest = shard.local
        whole += rows * math.prod(rest)
        parts += -(-rows // 4) * math.prod(rest)
    assert more - counted(Fsdp2Config())["masters"] == 4 * (whole - parts)


def test_kept_weights_change_no_bit_on_one_rank(work: ModuleType, parallel: Parallel) -> None:
    layouts = ["fsdp2-0-fp32", "fsdp2-0-fp32-kept"]
    losses = [work.train(work.make_engine(layout, parallel), parallel, 0, 2) for layout in layouts]
    assert losses[0] == losses[1]


@pytest.mark.long
def test_kept_weights_change_no_bit_and_save_gathers(in_processes: Any, tmp_path: Path) -> None:
    layouts = ["fsdp2-0-fp32", "fsdp2-0-fp32-kept", "fsdp2-0-fp32-own"]
    result = in_processes(2, "parity", tmp_path, layouts=layouts, steps=2)
    assert result[layouts[0]] == result[layouts[1]]
    counts = in_processes(2, "collectives", tmp_path, layouts=layouts)
    gathers = [counts[layout]["all-gather"][0] for layout in layouts]
    assert gathers[0] - gathers[1] == 4 * 3, counts  # four micro-batches, three layers


@pytest.mark.long
@pytest.mark.timeout(900)
def test_own_shard_groups_are_the_same_model(in_processes: Any, tmp_path: Path) -> None:
    """Gradients of every parameter on four ranks; checkpoints load into other layouts."""
    layouts = [f"fsdp2-0-fp32-own{axes}" for axes in ("", "tp2", "cp2", "ep2", "pp2")]
    check_parity(differences(in_processes, tmp_path, [*layouts, "fsdp2-2-fp32-own"], "every"))
    saved = ["fsdp2-0-bf16-own", "fsdp2-0-bf16"]
    kept = in_processes(2, "save_all", tmp_path, layouts=saved, steps=2)
    result = in_processes(2, "load_all", tmp_path, sources=saved, targets=saved, steps=2, used=True)
    assert {worst for worst, _ in result.values()} == {0.0}
    assert all(result[f"{name} → {name}"][1] == kept[name] for name in saved)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("[{layers: [0, 2]}, {layers: [2, 3]}]", r"layer 2 is in \[0, 2\] and in \[2, 3\]"),
        ("[{layers: [3, 2]}]", r"engine\.layers\.0\.layers: first and last layer, not \[3, 2\]"),
        ("[{layers: [0, 0], shard: 0}]", "shard: must be at least 1, not 0"),
        ("[{layers: [0, 0], reshrd: false}]", "did you mean `reshard`"),
    ],
)
def test_wrong_spans_are_named(ask: Any, layers: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ask("engine.kind=fsdp2", f"engine.layers={layers}")


@pytest.mark.parametrize(
    ("layers", "words", "message"),
    [
        ("[{layers: [0, 0], shard: 3}]", [], r"engine\.layers\.0\.shard=3 does not divide the 4"),
        (
            "[{layers: [0, 0], reshard: false}]",
            ["engine.gather=step"],
            r"engine\.layers\.0\.reshard=false needs weights that are gathered block by block",
        ),
        ("[{layers: [4, 5], shard: 1}]", [], r"engine\.layers\.0\.layers=\[4, 5\]: the model has"),
    ],
)
def test_spans_that_do_not_fit_the_run_are_named(
    ask: Any, layers: str, words: list[str], message: str
) -> None:
    job = ask("engine.kind=fsdp2", "processes=4", f"engine.layers={layers}", *words)
    with pytest.raises(LayoutError, match=message):
        preflight.check(job)
