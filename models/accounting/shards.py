"""Local shards from the cache, without building a model."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..config.config import ModelConfig
from ..parallel.axes import Axis
from ..parallel.local_shard import LocalShard
from .layer_kinds import find_layer_kinds, reduce_to_kinds
from .state import Degrees, Shards
from .stored import load_or_compute

LAYERS = "blocks."


def load_shards(config: ModelConfig, tp: int, ep: int) -> Shards:
    """Return all local shards on the tensor axis' first rank. The cache has a single layer per
    kind."""
    reduced = reduce_to_kinds(config)
    compute = partial(_compute_shards, reduced, tp, ep)
    shards = load_or_compute(f"shards {reduced!r} tp={tp} ep={ep}", compute, _pack, _unpack)
    return _expand_kinds(shards, find_layer_kinds(config)[1])


def _compute_shards(config: ModelConfig, tp: int, ep: int) -> Shards:
    from .memory import rank_shards

    return rank_shards(config, Degrees(dp=max(1, ep // tp), tp=tp, ep=ep), 0)


def _expand_kinds(shards: Shards, layer_kinds: tuple[int, ...]) -> Shards:
    """Return shards for all layers, from a single layer per kind."""
    shards_by_kind: dict[int, dict[str, LocalShard]] = {}
    for name, shard in shards.items():
        if name.startswith(LAYERS):
            kind, _, local_name = name.removeprefix(LAYERS).partition(".")
            shards_by_kind.setdefault(int(kind), {})[local_name] = shard
    layer_shards = {
        f"{LAYERS}{number}.{local_name}": shard
        for number, kind in enumerate(layer_kinds)
        for local_name, shard in shards_by_kind[kind].items()
    }
    expanded: dict[str, LocalShard] = {}
    for name, shard in shards.items():
        expanded |= layer_shards if name.startswith(LAYERS) else {name: shard}
    return expanded


def _pack(shards: Shards) -> dict[str, Any]:
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


def _unpack(packed: dict[str, Any]) -> Shards:
    return {
        name: LocalShard(
            shape=tuple(fields["shape"]),
            dim=fields["dim"],
            runs=fields["runs"] and tuple(range(*run) for run in fields["runs"]),
            copies=Axis(None, *fields["copies"]),
            experts=fields["experts"],
        )
        for name, fields in packed.items()
    }
