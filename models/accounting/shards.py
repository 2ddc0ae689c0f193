"""Stored local shards: which part of each parameter a rank holds, without building the model."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..config.config import ModelConfig
from ..parallel.axes import Axis
from ..parallel.local_shard import LocalShard
from .sorts import one_of_each, sorts_of
from .state import Degrees, Shards
from .stored import stored

LAYERS = "blocks."


def stored_shards(config: ModelConfig, tp: int, ep: int) -> Shards:
    """Return the local shard of each parameter on the first rank of the tensor axis. Those of one
    layer of each sort are stored."""
    one = one_of_each(config)
    make = partial(_make, one, tp, ep)
    found = stored(f"shards {one!r} tp={tp} ep={ep}", make, _packed, _unpacked)
    return _of_all_layers(found, sorts_of(config)[1])


def _make(config: ModelConfig, tp: int, ep: int) -> Shards:
    from .memory import rank_shards

    return rank_shards(config, Degrees(dp=max(1, ep // tp), tp=tp, ep=ep), 0)


def _of_all_layers(shards: Shards, sorts: tuple[int, ...]) -> Shards:
    """Return the shards of a model from those of one layer of each sort; `sorts` have the sort of
    each layer."""
    own: dict[int, dict[str, LocalShard]] = {}
    for name, shard in shards.items():
        if name.startswith(LAYERS):
            sort, _, rest = name.removeprefix(LAYERS).partition(".")
            own.setdefault(int(sort), {})[rest] = shard
    layers = {
        f"{LAYERS}{number}.{name}": shard
        for number, sort in enumerate(sorts)
        for name, shard in own[sort].items()
    }
    found: dict[str, LocalShard] = {}
    for name, shard in shards.items():
        found |= layers if name.startswith(LAYERS) else {name: shard}
    return found


def _packed(shards: Shards) -> dict[str, Any]:
    return {
        name: {
            "shape": shard.shape,
            "dim": shard.dim,
            "runs": shard.runs and [(run.start, run.stop) for run in shard.runs],
            "copies": (shard.copies.rank, shard.copies.size),
            "experts": shard.experts,
        }
        for name, shard in shards.items()
    }


def _unpacked(packed: dict[str, Any]) -> Shards:
    return {
        name: LocalShard(
            shape=tuple(each["shape"]),
            dim=each["dim"],
            runs=each["runs"] and tuple(range(*run) for run in each["runs"]),
            copies=Axis(None, *each["copies"]),
            experts=each["experts"],
        )
        for name, each in packed.items()
    }
