"""Operations of a rank whose attention is computed by a ring, as they are priced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ..grid.split import Direction, Split
from ..traces.trace import LayerTrace, Operations, Ring, mapped, operations
from ..traces.work import Work
from .machine import RING, Machine

if TYPE_CHECKING:
    from ...models.config.config import ModelConfig
    from ...models.config.options.precision import Precision


def rings_of(
    layer: LayerTrace,
    model: ModelConfig,
    seq_len: int,
    precision: Precision,
    machine: Machine,
    split: Split,
) -> dict[tuple[int, ...], Operations]:
    """Return a rank's operations of each ring of a layer, by the shape of the attention."""
    if split.cp == 1 or split.attention != "ring":
        return {}
    names = [layer.layer.get(name) for name in ("mixer", "mlp", "shared")]
    options = [model.operators[name] for name in names if name]
    found = {}
    for work in layer.forward:
        if work.kind != "attention":
            continue
        width, heads, *_ = work.shape
        own = next(each for each in options if each.attention_heads == heads)
        ring = Ring(
            heads=heads,
            kv_heads=getattr(own, "kv_heads", None) or heads,
            width=width,
            window=getattr(own, "window", None),
            part=seq_len // split.cp,
            precision=precision,
            device=machine.hardware.file.device.kind,
        )
        made = operations(ring, split.cp)
        made = priced(made, measured=made.tiled and machine.has_kernel(RING))
        found[work.shape] = mapped(partial(_of_heads, rows=split.rows, tp=split.tp), made)
    return found


def of_rank(
    work: Sequence[Work],
    direction: Direction,
    split: Split,
    rings: Mapping[tuple[int, ...], Operations],
) -> list[tuple[Work, Split]]:
    """Return operations with the ranks and rows that they are shared by: those of a ring stand for
    its attention, and are already a rank's own."""
    found = []
    for each in work:
        ring = rings.get(each.shape) if each.kind == "attention" else None
        if ring is None:
            found.append((each, split))
        else:
            own = ring.of(direction)
            found += [(replace(part, count=part.count * each.count), Split()) for part in own]
    return found


def priced(found: Operations, *, measured: bool) -> Operations:
    """Return the operations to price: the pairs of tiles where the ring's own rate is `measured`,
    which is that of all its operations on one rank; else all but the pairs."""
    forward, backward = (
        tuple(work for work in each if (work.kind == "pairs") == measured)
        for each in (found.forward, found.backward)
    )
    return Operations(forward, backward)


def _of_heads(work: Work, rows: int, tp: int) -> Work:
    """Return an operation for so many rows, and the heads of one of the tensor ranks."""
    if work.kind == "launch":
        return work
    if work.kind == "matmul":  # a group for each head of keys
        groups, m, k, n = work.shape
        own = max(1, groups * rows // tp)
        return replace(work, shape=(own, groups * m * rows // tp // own, k, n))
    if work.kind in ("attention", "pairs"):
        width, heads, length, *keys = work.shape
        shape = width, max(1, heads // tp), length, *(max(1, each // tp) for each in keys)
        return replace(work, shape=shape, count=work.count * rows)
    return replace(work, bytes=work.bytes * rows // tp)
