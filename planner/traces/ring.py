"""Traces of ring attention: one rank's operations, forward and backward.

A rank in a ring does not compute a share of whole-row attention: it computes tiles, or calls fused
attention on parts of rows, and merges the results. So the ring itself runs, on meta tensors. All
hops but the first are equal: a long ring follows from two short ones. Where fused attention
computes the hops, all shapes grow with the tokens per rank, so that one length stands for all.
Where tiles do, their rate is measured (`ring_attention` in the hardware file), because operations
on tiles are far slower than large ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from ...models.accounting.stored import load_or_compute
from ..grid.split import Direction
from .trace import PLANNER
from .work import Work, merge_equal

if TYPE_CHECKING:
    from ...models.config.options.mla import MLAOptions
    from ...models.config.options.precision import Precision
    from ...models.parallel.ring.attention import Tile
    from .recorder import OperationRecorder

MAX_RANKS, MAX_WINDOW_RANKS = 4, 12
"""Ranks in the longest recorded ring. A window needs more: its far keys drop out."""
FUSED_TOKENS = 512
"""Tokens per rank in a recorded ring with fused attention."""


@dataclass(frozen=True)
class Ring:
    """Attention of one row over a ring."""

    heads: int
    kv_heads: int
    width: int
    """Channels per head."""
    window: int | None
    rank_tokens: int
    precision: Precision
    device: str


@dataclass(frozen=True)
class Operations:
    """One rank's operations."""

    forward: tuple[Work, ...]
    backward: tuple[Work, ...]

    def select(self, direction: Direction) -> tuple[Work, ...]:
        return self.forward if direction == "forward" else self.backward

    @property
    def tiled(self) -> bool:
        """True if no fused attention computes the hops."""
        return any(work.kind == "pairs" for work in self.forward)


@cache
def trace_ring(ring: Ring, ranks: int) -> Operations:
    """Return the operations of the last rank for one row."""
    if ring.device == "cuda" and ring.window is None:
        operations = _extrapolate_ranks(replace(ring, rank_tokens=FUSED_TOKENS), ranks)
        if not operations.tiled:
            return map_operations(
                partial(_scale, factor=ring.rank_tokens / FUSED_TOKENS), operations
            )
    return _extrapolate_ranks(ring, ranks)


def _scale(work: Work, factor: float) -> Work:
    """Return an operation of fused attention on longer parts."""
    if work.kind == "attention":
        width, heads, length, kv_heads = work.shape
        return replace(work, shape=(width, heads, round(length * factor), kv_heads))
    return replace(work, bytes=round(work.bytes * factor))


def map_operations(function: Callable[[Work], Work], operations: Operations) -> Operations:
    forward, backward = operations.forward, operations.backward
    return Operations(tuple(map(function, forward)), tuple(map(function, backward)))


def _extrapolate_ranks(ring: Ring, ranks: int) -> Operations:
    """Return the operations; a long ring follows from two short ones that differ by one rank."""
    max_ranks = MAX_WINDOW_RANKS if ring.window else MAX_RANKS
    if ranks <= max_ranks:
        return _load_ring(ring, ranks)
    shorter, longer = (_load_ring(ring, number) for number in (max_ranks - 1, max_ranks))
    extra_hops = ranks - max_ranks
    return Operations(
        _add_hops(shorter.forward, longer.forward, extra_hops),
        _add_hops(shorter.backward, longer.backward, extra_hops),
    )


def _add_hops(shorter: Sequence[Work], longer: Sequence[Work], hops: int) -> tuple[Work, ...]:
    """Add hops to the longer ring. One hop is the difference between the two rings."""
    shorter_work = {_key(work): work for work in shorter}
    extended = []
    for work in longer:
        before = shorter_work.get(_key(work), replace(work, count=0))
        if work.kind == "memory":
            extended.append(replace(work, bytes=work.bytes + hops * (work.bytes - before.bytes)))
        else:
            extended.append(replace(work, count=work.count + hops * (work.count - before.count)))
    return tuple(work for work in extended if work.count)


def _key(work: Work) -> tuple[Any, ...]:
    return work.kind, work.name, work.shape, work.saved


def _load_ring(ring: Ring, ranks: int) -> Operations:
    record = partial(_record_ring, ring, ranks)
    question = f"ring attention {ring!r} {ranks}"
    return load_or_compute(question, record, asdict, _parse_operations, PLANNER)


def _parse_operations(data: Any) -> Operations:
    return Operations(
        *(tuple(map(Work.parse, data[direction])) for direction in ("forward", "backward"))
    )


def _record_ring(ring: Ring, ranks: int) -> Operations:
    """Record the last rank, which has all keys before its part."""
    import torch

    from ...models.config.options.attention import AttentionOptions
    from ...models.config.precision import compute_dtype
    from ...models.kernels.choice import as_on_gpu
    from ...models.operators import BatchContext
    from ...models.operators.attention import Attention
    from ...models.parallel.axes import Axes, Axis
    from .recorder import OperationRecorder

    options = AttentionOptions(
        heads=ring.heads, kv_heads=ring.kv_heads, head_dim=ring.width, window=ring.window
    )
    axes = Axes(context=Axis(None, ranks - 1, ranks), attention="ring")
    dtype = compute_dtype(ring.precision)
    on_gpu = as_on_gpu() if ring.device == "cuda" else nullcontext()
    with on_gpu, torch.device("meta"):
        operator = Attention(options, ring.width)
        batch = BatchContext(torch.arange(ring.rank_tokens).unsqueeze(0), axes=axes)
        q, k, v = (
            torch.empty(1, ring.rank_tokens, heads, ring.width, dtype=dtype, requires_grad=True)
            for heads in (ring.heads, ring.kv_heads, ring.kv_heads)
        )
        with OperationRecorder(ring.rank_tokens) as forward, _run_one_tile_per_size(forward, ring):
            y = operator.attend_across_ranks(q, k, v, batch)
        with (
            OperationRecorder(ring.rank_tokens) as backward,
            _run_one_tile_per_size(backward, ring),
        ):
            torch.autograd.grad(y, (q, k, v), torch.empty_like(q))
    return Operations(merge_equal(forward.work), merge_equal(backward.work))


@cache
def trace_expansion(options: MLAOptions, rank_tokens: int, precision: Precision) -> Operations:
    """Return the operations that expand the latents of a rank's tokens to keys and values, and
    those of its gradients."""
    record = partial(_record_expansion, options, rank_tokens, precision)
    question = f"expansion {options!r} {rank_tokens} {precision!r}"
    return load_or_compute(question, record, asdict, _parse_operations, PLANNER)


def _record_expansion(options: MLAOptions, rank_tokens: int, precision: Precision) -> Operations:
    import torch

    from ...models.config.precision import compute_dtype
    from ...models.operators.mla import MLA
    from .recorder import OperationRecorder

    dtype = compute_dtype(precision)
    with torch.device("meta"):
        operator = MLA(options, options.latent_width).to(dtype)
        tokens = torch.empty(1, rank_tokens, options.latent_width, dtype=dtype, requires_grad=True)
        with OperationRecorder(rank_tokens) as forward:
            forward.saved_kind = "attention"
            kv = operator.expand(tokens, operator.kv_b.weight)
        with OperationRecorder(rank_tokens) as backward:
            torch.autograd.grad(kv, (tokens, operator.kv_b.weight), torch.empty_like(kv))
    return Operations(merge_equal(forward.work), merge_equal(backward.work))


@contextmanager
def _run_one_tile_per_size(recorder: OperationRecorder, ring: Ring) -> Iterator[None]:
    """Let a ring compute one tile per size, which counts for all tiles of the size. The query-key
    pairs are recorded too."""
    from ...models.parallel.ring import attention as module

    shape = ring.width, ring.heads, ring.rank_tokens

    def run_one_per_size(tiles: Iterator[Tile]) -> Iterator[Tile]:
        tiles_by_size: dict[tuple[int, int, bool], list[Tile]] = {}
        for tile in tiles:
            num_queries, num_keys = (
                tokens.stop - tokens.start for tokens in (tile.queries, tile.keys)
            )
            size = num_queries, num_keys, tile.mask is None
            tiles_by_size.setdefault(size, []).append(tile)
        for (num_queries, num_keys, _), equal_tiles in tiles_by_size.items():
            pairs = num_queries * num_keys * len(equal_tiles)
            recorder.work.append(Work("pairs", "", shape, pairs, 0, recorder.saved_kind))
            recorder.repeats = len(equal_tiles)
            yield equal_tiles[0]
            recorder.repeats = 1

    around_tiles, module.around_tiles = module.around_tiles, run_one_per_size
    try:
        yield
    finally:
        module.around_tiles = around_tiles
