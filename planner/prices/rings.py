"""Select the operations to price where a ring computes attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ..grid.split import Direction, Split
from ..traces.ring import Operations, Ring, map_operations, trace_expansion, trace_ring
from ..traces.trace import LayerTrace
from ..traces.work import Work
from .latents import find_latents
from .machine import RING, Machine

if TYPE_CHECKING:
    from ...models.config.config import ModelConfig
    from ...models.config.options.precision import Precision


def compute_rings(
    layer: LayerTrace,
    model: ModelConfig,
    seq_len: int,
    precision: Precision,
    machine: Machine,
    split: Split,
) -> dict[tuple[int, ...], Operations]:
    """Return a rank's operations in a layer's rings, by attention shape."""
    if split.cp == 1 or split.attention != "ring":
        return {}
    names = [layer.operators.get(name) for name in ("mixer", "mlp", "shared")]
    options = [model.operators[name] for name in names if name]
    rings = {}
    for work in layer.forward:
        if work.kind != "attention":
            continue
        width, heads, *_ = work.shape
        attention = next(option for option in options if option.attention_heads == heads)
        ring = Ring(
            heads=heads,
            kv_heads=getattr(attention, "kv_heads", None) or heads,
            width=width,
            window=getattr(attention, "window", None),
            rank_tokens=seq_len // split.cp,
            precision=precision,
            device=machine.hardware.file.device.kind,
        )
        operations = trace_ring(ring, split.cp)
        measured = operations.tiled and machine.has_kernel(RING)
        shard = partial(
            _shard_heads, rows=split.rows, tp=split.tp, traffic=machine.program.ring_traffic
        )
        priced = select_priced(operations, measured=measured)
        if latents := find_latents(work, layer, model, split):
            expansion = trace_expansion(latents, ring.rank_tokens, precision)
            priced = add_expansions(priced, expansion, split.cp)
        rings[work.shape] = map_operations(shard, priced)
    return rings


def add_expansions(ring: Operations, expansion: Operations, ranks: int) -> Operations:
    """Add the expansions of latents that arrive: one for each rank in both passes, and their
    gradients. The layer has those of its own latents already, but for the second one."""

    def repeat(operations: Sequence[Work], count: int) -> tuple[Work, ...]:
        return tuple(replace(work, count=work.count * count) for work in operations)

    backward = repeat(expansion.forward, ranks) + repeat(expansion.backward, ranks - 1)
    return Operations(ring.forward + repeat(expansion.forward, ranks - 1), ring.backward + backward)


def split_operations(
    work: Sequence[Work],
    direction: Direction,
    split: Split,
    rings: Mapping[tuple[int, ...], Operations],
) -> list[tuple[Work, Split]]:
    """Return (operation, split) pairs; the split divides the operation's price.

    A ring's operations replace its attention. They are counted per rank already.
    """
    rank_operations = []
    for operation in work:
        ring = rings.get(operation.shape) if operation.kind == "attention" else None
        if ring is None:
            rank_operations.append((operation, split))
            continue
        for step in ring.select(direction):
            repeated = replace(step, count=step.count * operation.count)
            rank_operations.append((repeated, Split()))
    return rank_operations


def select_priced(ring: Operations, *, measured: bool) -> Operations:
    """Return the operations to price.

    A `measured` rate for ring attention is per query-key pair and includes everything that a rank
    computes: then only the pairs count. Otherwise everything else does.
    """
    forward, backward = (
        tuple(work for work in direction if (work.kind == "pairs") == measured)
        for direction in (ring.forward, ring.backward)
    )
    return Operations(forward, backward)


def _shard_heads(work: Work, rows: int, tp: int, traffic: float) -> Work:
    """Return an operation on `rows` rows and a tensor rank's heads, with a program's `traffic`."""
    if work.kind == "launch":
        return work
    if work.kind == "matmul":  # a group per kv head
        groups, m, k, n = work.shape
        local_groups = max(1, groups * rows // tp)
        m = groups * m * rows // tp // local_groups
        return replace(work, shape=(local_groups, m, k, n))
    if work.kind in ("attention", "pairs"):
        width, heads, length, *keys = work.shape
        shape = width, max(1, heads // tp), length, *(max(1, count // tp) for count in keys)
        return replace(work, shape=shape, count=work.count * rows)
    return replace(work, bytes=int(traffic * (work.bytes * rows // tp)))
