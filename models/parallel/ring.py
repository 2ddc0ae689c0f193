"""Ring attention: queries stay, keys and values travel along the ring, and ranks do equal work.

A row is split into 2N chunks. For the ring, rank r holds chunks r and 2N−1−r: an early chunk, whose
queries see few keys, and a late chunk, whose queries see many:

    rank 0   0     7        At each of N hops, a rank holds the keys of another rank, the owner.
    rank 1   1     6        If the owner precedes it, both local chunks see the owner's early chunk;
    rank 2   2     5        if the owner follows, the local late chunk sees both. Either way: two
    rank 3   3     4        of four products between query chunks and key chunks.

The hops' outputs are merged by log-sum-exp. The backward pass recomputes the probabilities from
these sums in a second ring, where key and value gradients travel along and return to the owner. A
rank holds its own shard, a remote shard, and a tile's scores: O(L/N) memory. Per row it sends its
keys and values N−1 times forward; backward, N−1 times again, and their gradients, in fp32 or wider,
N times.

The mask is defined by the first key that each query sees: the start of its document or window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..config.precision import widen
from .axes import Axis
from .collectives import start_all_to_all, wait
from .exchange import rearrange_chunks
from .tiles import TILE
from .whole_results import run_composite


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first_keys: FirstKeys | None,
    zigzag: Zigzag,
    *,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """q [rows, local_length, heads, dim], k and v [rows, local_length, kv_heads, dim] → y like q.
    Without `first_keys`, queries see all earlier keys in their row. A head's softmax also counts
    its score in `sinks` [heads]."""
    heads = [q.shape[2], k.shape[2], v.shape[2]]
    zigzag_qkv = zigzag.deal(torch.cat([q, k, v], dim=2)).split(heads, dim=2)
    y: Tensor = _Ring.apply(*zigzag_qkv, sinks, first_keys, zigzag, scale)
    return zigzag.collect(y)


@dataclass(frozen=True)
class RowChunk:
    """A rank's chunk: positions [start, end) in the row."""

    offset: int
    """Index of `start` in the rank's tensors."""
    start: int
    end: int


class Zigzag:
    """Arrangement in which rank r holds chunks r and 2N−1−r."""

    def __init__(self, local_length: int, axis: Axis) -> None:
        self.axis = axis
        ranks = range(axis.size)
        self.sizes = [local_length - local_length // 2, local_length // 2] * axis.size
        self.contiguous = [[2 * rank, 2 * rank + 1] for rank in ranks]
        self.zigzag = [[rank, 2 * axis.size - 1 - rank] for rank in ranks]

    def deal(self, x: Tensor) -> Tensor:
        """Rearrange contiguous parts x [rows, local_length, …] into the zigzag."""
        return rearrange_chunks(x, self.contiguous, self.zigzag, self.sizes, self.axis)

    def collect(self, x: Tensor) -> Tensor:
        """Reverse `deal`."""
        return rearrange_chunks(x, self.zigzag, self.contiguous, self.sizes, self.axis)

    def chunks(self, rank: int) -> list[RowChunk]:
        chunks, offset = [], 0
        for number in self.zigzag[rank]:
            start = sum(self.sizes[:number])
            chunks.append(RowChunk(offset, start, start + self.sizes[number]))
            offset += self.sizes[number]
        return chunks

    def index(self, device: torch.device) -> Tensor:
        """Return this rank's row positions, int64 [local_length]."""
        chunks = self.chunks(self.axis.rank)
        return torch.cat([torch.arange(chunk.start, chunk.end, device=device) for chunk in chunks])


def split_query_tiles(zigzag: Zigzag) -> list[RowChunk]:
    """Split this rank's chunks into query tiles, whose scores are in memory at once."""
    return [
        RowChunk(
            chunk.offset + start, chunk.start + start, min(chunk.start + start + TILE, chunk.end)
        )
        for chunk in zigzag.chunks(zigzag.axis.rank)
        for start in range(0, chunk.end - chunk.start, TILE)
    ]


@dataclass(frozen=True)
class FirstKeys:
    """First key visible to each query on this rank."""

    keys: Tensor
    """int64 [rows or 1, local_length], positions in full rows."""
    bounds: Sequence[tuple[int, int]]
    """Lowest and highest first key per query tile."""

    @classmethod
    def build(cls, past: Tensor, zigzag: Zigzag) -> FirstKeys:
        """Build from `past` [rows or 1, length]: the number of earlier keys visible to each
        position in full rows. Its values are read, so it should be in host memory."""
        index = zigzag.index(past.device)
        keys = index - past[:, index]
        spans = [keys[:, q.offset : q.offset + q.end - q.start] for q in split_query_tiles(zigzag)]
        return cls(keys, [(int(span.min()), int(span.max())) for span in spans])

    @classmethod
    def build_window(cls, window: int, zigzag: Zigzag, device: torch.device) -> FirstKeys:
        """Build for single-document rows: a query sees itself and `window` − 1 earlier keys."""
        keys = (zigzag.index(device) - window + 1).clamp(min=0)
        spans = [(query.start, query.end - 1) for query in split_query_tiles(zigzag)]
        bounds = [(max(0, a - window + 1), max(0, b - window + 1)) for a, b in spans]
        return cls(keys.unsqueeze(0), bounds)

    def to(self, device: torch.device) -> FirstKeys:
        return FirstKeys(self.keys.to(device), self.bounds)


@dataclass(frozen=True)
class Tile:
    """Queries, and the current hop's keys that they may see."""

    queries: slice
    keys: slice
    mask: Callable[[], Tensor] | None
    """Return bool [rows or 1, 1, 1, queries, keys]; None: all."""


around_tiles: Callable[[Iterator[Tile]], Iterator[Tile]] = iter
"""Iterates over a hop's tiles. To count operations, it yields a single tile per size."""


class Hops:
    """Tiles to compute at each hop."""

    def __init__(self, first_keys: FirstKeys | None, zigzag: Zigzag, device: torch.device) -> None:
        self.first_keys = first_keys
        self.zigzag = zigzag
        self.device = device
        self.queries = split_query_tiles(zigzag)
        self.bounds = first_keys.bounds if first_keys is not None else [(0, 0)] * len(self.queries)

    def tiles(self, owner: int) -> Iterator[Tile]:
        """Return the hop's tiles, with keys from rank `owner`.

        Local keys come first, starting with the nearest chunk: a query then sees itself before any
        masked keys, so its running maximum is finite.
        """
        return around_tiles(self._tiles(owner))

    def _tiles(self, owner: int) -> Iterator[Tile]:
        for chunk in reversed(self.zigzag.chunks(owner)):
            for query, (min_key, max_key) in zip(self.queries, self.bounds, strict=True):
                start, end = max(chunk.start, min_key), min(chunk.end, query.end)
                if start >= end:
                    continue
                queries = slice(query.offset, query.offset + query.end - query.start)
                shift = chunk.offset - chunk.start
                mask = None
                if end - 1 > query.start or max_key > start:
                    mask = partial(self._mask, query, queries, start, end)
                yield Tile(queries, slice(start + shift, end + shift), mask)

    def _mask(self, query: RowChunk, queries: slice, begin: int, end: int) -> Tensor:
        key = torch.arange(begin, end, device=self.device)
        position = torch.arange(query.start, query.end, device=self.device).unsqueeze(-1)
        mask = (key <= position).unsqueeze(0)
        if self.first_keys is not None:
            mask = mask & (key >= self.first_keys.keys[:, queries].unsqueeze(-1))
        return mask[:, None, None]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        first_keys: FirstKeys | None,
        zigzag: Zigzag,
        scale: float,
    ) -> Tensor:
        hops = Hops(first_keys, zigzag, q.device)
        output, log_sum = run_composite(
            "attention", partial(_Ring.attend, q, k, v, sinks, hops, scale)
        )
        ctx.save_for_backward(q, k, v, sinks, output, log_sum)
        ctx.hops, ctx.scale = hops, scale
        return ungroup_heads(output).to(q.dtype)

    @staticmethod
    def attend(
        q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, hops: Hops, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return the output [rows, kv_heads, group, local_length, dim] and the scores'
        log-sum-exp."""
        queries = group_heads(q, k.shape[2]) * scale
        output = torch.zeros_like(queries)
        total = queries.new_zeros(queries.shape[:-1])
        peak = torch.full_like(total, float("-inf"))
        if sinks is not None:  # a first score, with the value 0
            total = total + 1
            peak = torch.zeros_like(total) + group_sinks(sinks, k.shape[2])
        for owner, (keys, values) in circulate(torch.stack([k, v]), hops.zigzag.axis):
            for tile in hops.tiles(owner):
                index = (..., tile.queries)
                scores = compute_scores(queries, keys, tile)
                new_peak = torch.maximum(peak[index], scores.amax(dim=-1))
                weights = torch.exp(scores - new_peak.unsqueeze(-1))
                shrink = torch.exp(peak[index] - new_peak)
                total[index] = total[index] * shrink + weights.sum(dim=-1)
                update = torch.einsum("bhgqk,bkhd->bhgqd", weights, widen(values[:, tile.keys]))
                output[(*index, slice(None))] = (
                    output[(*index, slice(None))] * shrink.unsqueeze(-1) + update
                )
                peak[index] = new_peak
        return output / total.unsqueeze(-1), peak + total.log()

    @staticmethod
    def backward(ctx: Any, out_grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, output, log_sum = ctx.saved_tensors
        hops: Hops = ctx.hops
        axis = hops.zigzag.axis
        queries = group_heads(q, k.shape[2]) * ctx.scale
        dy = group_heads(out_grad, k.shape[2])
        mean = (dy * output).sum(dim=-1, keepdim=True)
        dq = torch.zeros_like(queries)

        def add(owner: int, chunk: Tensor, gradients: Tensor) -> None:
            keys, values = chunk
            for tile in hops.tiles(owner):
                index = (..., tile.queries, slice(None))
                scores = compute_scores(queries, keys, tile)
                weights = torch.exp(scores - log_sum[..., tile.queries].unsqueeze(-1))
                dweights = torch.einsum("bhgqd,bkhd->bhgqk", dy[index], widen(values[:, tile.keys]))
                dscores = weights * (dweights - mean[index])
                dq[index] += torch.einsum("bhgqk,bkhd->bhgqd", dscores, widen(keys[:, tile.keys]))
                dkeys = torch.einsum("bhgqk,bhgqd->bkhd", dscores, queries[index])
                dvalues = torch.einsum("bhgqk,bhgqd->bkhd", weights, dy[index])
                gradients[0, :, tile.keys] += dkeys
                gradients[1, :, tile.keys] += dvalues

        dk, dv = circulate_with_gradients(torch.stack([k, v]), axis, add).to(k.dtype)
        dsinks = None
        if sinks is not None:
            weights = torch.exp(group_sinks(sinks, k.shape[2]) - log_sum)
            dsinks = -(weights * mean.squeeze(-1)).sum(dim=(0, 3)).flatten().to(sinks.dtype)
        return ungroup_heads(dq * ctx.scale).to(q.dtype), dk, dv, dsinks, None, None, None


def compute_scores(queries: Tensor, keys: Tensor, tile: Tile) -> Tensor:
    """Return scores [rows, kv_heads, group, queries, keys]; −∞ where masked."""
    visible = widen(keys[:, tile.keys])
    scores = torch.einsum("bhgqd,bkhd->bhgqk", queries[..., tile.queries, :], visible)
    return scores if tile.mask is None else scores.masked_fill(~tile.mask(), float("-inf"))


def group_heads(x: Tensor, kv_heads: int) -> Tensor:
    """x [rows, local_length, heads, dim] → [rows, kv_heads, group, local_length, dim], in fp32 or
    wider."""
    heads: Tensor = widen(x).unflatten(2, (kv_heads, -1))
    return heads.permute(0, 2, 3, 1, 4)


def group_sinks(sinks: Tensor, kv_heads: int) -> Tensor:
    """sinks [heads] → [kv_heads, group, 1], in fp32 or wider."""
    grouped: Tensor = widen(sinks).view(kv_heads, -1, 1)
    return grouped


def ungroup_heads(x: Tensor) -> Tensor:
    """Reverse `group_heads`."""
    return x.permute(0, 3, 1, 2, 4).flatten(2, 3)


def circulate(x: Tensor, axis: Axis) -> Iterator[tuple[int, Tensor]]:
    """Yield (rank, that rank's x), starting with this rank. The next x travels meanwhile."""
    for hop in range(axis.size):
        wait_for_next = send_along_ring(x, axis) if hop + 1 < axis.size else None
        yield (axis.rank - hop) % axis.size, x
        if wait_for_next is not None:
            x = wait_for_next()


def circulate_with_gradients(
    x: Tensor, axis: Axis, add: Callable[[int, Tensor, Tensor], None]
) -> Tensor:
    """Return this rank's x gradient, in fp32 or wider. `add(rank, x, gradient)` adds this rank's
    contribution to `rank`'s gradient, which follows x along the ring to its owner."""
    returning: Callable[[], Tensor] | None = None
    for owner, local in circulate(x, axis):
        gradient = torch.zeros_like(widen(local))
        add(owner, local, gradient)
        if returning is not None:
            gradient += returning()
        returning = send_along_ring(gradient, axis)
    assert returning is not None
    return returning()


def send_along_ring(x: Tensor, axis: Axis) -> Callable[[], Tensor]:
    """Start sending x to the next rank. Return a function that waits for the previous rank's
    tensor."""
    x = x.contiguous()
    if axis.size == 1:
        return lambda: x
    sent, received = ([0] * axis.size for _ in range(2))
    sent[(axis.rank + 1) % axis.size] = received[(axis.rank - 1) % axis.size] = x.numel()
    arriving = start_all_to_all(x.view(-1), received, sent, axis)

    def wait_for_arrival(_sent: Tensor = x) -> Tensor:  # keeps the sent tensor alive until then
        return wait(arriving).view_as(x)

    return wait_for_arrival
