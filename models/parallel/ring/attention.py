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
N times. Latents travel in place of keys and values that follow from them: each rank expands those
that arrive, in both passes, and adds up its gradients of the expansion's weight.

The mask is defined by the first key that each query sees: the start of its document or window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...config.precision import widen
from ..whole_results import run_composite
from .circulation import (
    Expand,
    KeysAndValues,
    Latents,
    circulate_keys,
    circulate_with_gradients,
)
from .zigzag import RowChunk, Zigzag, split_query_tiles


def ring_attention(
    q: Tensor,
    keys: KeysAndValues | Latents,
    first_keys: FirstKeys | None,
    zigzag: Zigzag,
    *,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """q [rows, local_length, heads, dim] → y like q, as wide as the values. Without `first_keys`,
    queries see all earlier keys in their row. A head's softmax also counts its score in `sinks`
    [heads]."""
    q, sources, expand = keys.deal(q, zigzag)
    y: Tensor = _Ring.apply(q, *sources, expand, sinks, first_keys, zigzag, scale)
    return zigzag.collect(y[..., : keys.value_dim])


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
        first: Tensor,
        second: Tensor,
        expand: Expand | None,
        sinks: Tensor | None,
        first_keys: FirstKeys | None,
        zigzag: Zigzag,
        scale: float,
    ) -> Tensor:
        hops, sources = Hops(first_keys, zigzag, q.device), (first, second)
        kv_heads = q.shape[2] if expand is not None else first.shape[2]
        output, log_sum = run_composite(
            "attention", partial(_Ring.attend, q, sources, expand, kv_heads, sinks, hops, scale)
        )
        ctx.save_for_backward(q, *sources, sinks, output, log_sum)
        ctx.hops, ctx.scale, ctx.expand, ctx.kv_heads = hops, scale, expand, kv_heads
        return ungroup_heads(output).to(q.dtype)

    @staticmethod
    def attend(
        q: Tensor,
        sources: tuple[Tensor, Tensor],
        expand: Expand | None,
        kv_heads: int,
        sinks: Tensor | None,
        hops: Hops,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Return the output [rows, kv_heads, group, local_length, dim] and the scores'
        log-sum-exp."""
        queries = group_heads(q, kv_heads) * scale
        output = torch.zeros_like(queries)
        total = queries.new_zeros(queries.shape[:-1])
        peak = torch.full_like(total, float("-inf"))
        if sinks is not None:  # a first score, with the value 0
            total = total + 1
            peak = torch.zeros_like(total) + group_sinks(sinks, kv_heads)
        for owner, (keys, values) in circulate_keys(sources, expand, hops.zigzag.axis):
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
        q, first, second, sinks, output, log_sum = ctx.saved_tensors
        hops: Hops = ctx.hops
        kv_heads: int = ctx.kv_heads
        queries = group_heads(q, kv_heads) * ctx.scale
        dy = group_heads(out_grad, kv_heads)
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

        sources = first, second
        source_grads = circulate_with_gradients(sources, ctx.expand, hops.zigzag.axis, add)
        dsinks = None
        if sinks is not None:
            weights = torch.exp(group_sinks(sinks, kv_heads) - log_sum)
            dsinks = -(weights * mean.squeeze(-1)).sum(dim=(0, 3)).flatten().to(sinks.dtype)
        dq = ungroup_heads(dq * ctx.scale).to(q.dtype)
        return dq, *source_grads, None, dsinks, None, None, None


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
