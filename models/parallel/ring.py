"""Ring attention: queries stay, keys and values travel round, and every rank does equal work.

A row is split into 2N chunks. For the ring, rank r holds chunks r and 2N−1−r: an early one, whose
queries see few keys, and a late one, whose queries see many:

    rank 0   0     7        At each of the N hops, a rank holds the keys of one rank (the owner).
    rank 1   1     6        If the owner is before it, both of its chunks see the owner's early
    rank 2   2     5        chunk; if the owner is behind it, its late chunk sees both. Either
    rank 3   3     4        way: two products of a chunk of queries and a chunk of keys, of four.

The outputs of the hops are merged by log-sum-exp. The backward pass recomputes the probabilities
from these sums, in a second ring, in which the gradients of keys and values travel with them back
to their owner. A rank holds its own part, one other rank's, and the scores of one tile: O(L/N)
memory. For each row it sends its part of keys and values N−1 times forward; backward, N−1 times
again, and their gradients, in fp32 or wider, N times.

The mask is given by the first key that each query sees: the start of its document or window.
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
from .exchange import rearranged
from .tiles import TILE
from .whole_results import as_one


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, first: FirstKeys | None, zigzag: Zigzag, *, scale: float
) -> Tensor:
    """q [rows, part, heads, dim], k and v [rows, part, kv_heads, dim] → like q. `first` None: each
    query sees all earlier keys of its row."""
    heads = [q.shape[2], k.shape[2], v.shape[2]]
    dealt = zigzag.deal(torch.cat([q, k, v], dim=2)).split(heads, dim=2)
    y: Tensor = _Ring.apply(*dealt, first, zigzag, scale)
    return zigzag.collect(y)


@dataclass(frozen=True)
class Chunk:
    """A piece of a row that a rank holds: positions [first, last) of the row."""

    here: int
    """Start in the rank's tensors."""
    first: int
    last: int


class Zigzag:
    """The arrangement in which rank r holds chunks r and 2N−1−r."""

    def __init__(self, part: int, axis: Axis) -> None:
        self.axis = axis
        ranks = range(axis.size)
        self.sizes = [part - part // 2, part // 2] * axis.size
        self.contiguous = [[2 * rank, 2 * rank + 1] for rank in ranks]
        self.dealt = [[rank, 2 * axis.size - 1 - rank] for rank in ranks]

    def deal(self, x: Tensor) -> Tensor:
        """Rearrange contiguous parts x [rows, part, …] into the zigzag."""
        return rearranged(x, self.contiguous, self.dealt, self.sizes, self.axis)

    def collect(self, x: Tensor) -> Tensor:
        """The reverse of `deal`."""
        return rearranged(x, self.dealt, self.contiguous, self.sizes, self.axis)

    def chunks(self, rank: int) -> list[Chunk]:
        chunks, here = [], 0
        for number in self.dealt[rank]:
            first = sum(self.sizes[:number])
            chunks.append(Chunk(here, first, first + self.sizes[number]))
            here += self.sizes[number]
        return chunks

    def index(self, device: torch.device) -> Tensor:
        """int64 [part]: position in the row of each position that this rank holds."""
        chunks = self.chunks(self.axis.rank)
        return torch.cat([torch.arange(c.first, c.last, device=device) for c in chunks])


def tiles_of_queries(zigzag: Zigzag) -> list[Chunk]:
    """Return the pieces of this rank's chunks whose scores are in memory at once."""
    return [
        Chunk(chunk.here + start, chunk.first + start, min(chunk.first + start + TILE, chunk.last))
        for chunk in zigzag.chunks(zigzag.axis.rank)
        for start in range(0, chunk.last - chunk.first, TILE)
    ]


@dataclass(frozen=True)
class FirstKeys:
    """The first key that each query of this rank sees."""

    keys: Tensor
    """int64 [rows or 1, part], as positions in whole rows."""
    bounds: Sequence[tuple[int, int]]
    """Lowest and highest one of each tile of queries."""

    @classmethod
    def build(cls, past: Tensor, zigzag: Zigzag) -> FirstKeys:
        """`past` [rows or 1, length] is the number of earlier keys that each position of whole rows
        sees. It is read, so it should lie in host memory."""
        index = zigzag.index(past.device)
        keys = index - past[:, index]
        spans = [keys[:, q.here : q.here + q.last - q.first] for q in tiles_of_queries(zigzag)]
        return cls(keys, [(int(span.min()), int(span.max())) for span in spans])

    @classmethod
    def of_window(cls, window: int, zigzag: Zigzag, device: torch.device) -> FirstKeys:
        """Build for rows of one document: a query sees itself and `window` − 1 earlier keys."""
        keys = (zigzag.index(device) - window + 1).clamp(min=0)
        spans = [(query.first, query.last - 1) for query in tiles_of_queries(zigzag)]
        bounds = [(max(0, a - window + 1), max(0, b - window + 1)) for a, b in spans]
        return cls(keys.unsqueeze(0), bounds)

    def to(self, device: torch.device) -> FirstKeys:
        return FirstKeys(self.keys.to(device), self.bounds)


@dataclass(frozen=True)
class Tile:
    """Some queries, and the keys of the current hop that they may see."""

    queries: slice
    keys: slice
    seen: Callable[[], Tensor] | None
    """Return bool [rows or 1, 1, 1, queries, keys]; None: all."""


around_tiles: Callable[[Iterator[Tile]], Iterator[Tile]] = iter
"""Iterates over the tiles of a hop. A count of operations computes one tile of each size."""


class Hops:
    """The tiles to compute at each hop."""

    def __init__(self, first: FirstKeys | None, zigzag: Zigzag, device: torch.device) -> None:
        self.first = first
        self.zigzag = zigzag
        self.device = device
        self.queries = tiles_of_queries(zigzag)
        self.bounds = first.bounds if first is not None else [(0, 0)] * len(self.queries)

    def tiles(self, owner: int) -> Iterator[Tile]:
        """Return the tiles of the hop that holds the keys of `owner`.

        A rank's own keys come first, the nearest chunk before all: a query then sees itself before
        it meets keys that it does not see.
        """
        return around_tiles(self._tiles(owner))

    def _tiles(self, owner: int) -> Iterator[Tile]:
        for chunk in reversed(self.zigzag.chunks(owner)):
            for query, (low, high) in zip(self.queries, self.bounds, strict=True):
                begin, end = max(chunk.first, low), min(chunk.last, query.last)
                if begin >= end:
                    continue
                queries = slice(query.here, query.here + query.last - query.first)
                shift = chunk.here - chunk.first
                seen = None
                if end - 1 > query.first or high > begin:
                    seen = partial(self._seen, query, queries, begin, end)
                yield Tile(queries, slice(begin + shift, end + shift), seen)

    def _seen(self, query: Chunk, queries: slice, begin: int, end: int) -> Tensor:
        key = torch.arange(begin, end, device=self.device)
        place = torch.arange(query.first, query.last, device=self.device).unsqueeze(-1)
        seen = (key <= place).unsqueeze(0)
        if self.first is not None:
            seen = seen & (key >= self.first.keys[:, queries].unsqueeze(-1))
        return seen[:, None, None]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        first: FirstKeys | None,
        zigzag: Zigzag,
        scale: float,
    ) -> Tensor:
        hops = Hops(first, zigzag, q.device)
        output, logarithm = as_one("attention", partial(_Ring.attend, q, k, v, hops, scale))
        ctx.save_for_backward(q, k, v, output, logarithm)
        ctx.hops, ctx.scale = hops, scale
        return ungrouped(output).to(q.dtype)

    @staticmethod
    def attend(q: Tensor, k: Tensor, v: Tensor, hops: Hops, scale: float) -> tuple[Tensor, Tensor]:
        """Return the output, grouped by heads of keys, and the log-sum-exp of the scores."""
        queries = grouped(q, k.shape[2]) * scale
        output = torch.zeros_like(queries)
        total = queries.new_zeros(queries.shape[:-1])
        peak = torch.full_like(total, float("-inf"))
        for owner, (keys, values) in circulate(torch.stack([k, v]), hops.zigzag.axis):
            for tile in hops.tiles(owner):
                at = (..., tile.queries)
                scores = scores_of(queries, keys, tile)
                higher = torch.maximum(peak[at], scores.amax(dim=-1))
                weights = torch.exp(scores - higher.unsqueeze(-1))
                shrink = torch.exp(peak[at] - higher)
                total[at] = total[at] * shrink + weights.sum(dim=-1)
                added = torch.einsum("bhgqk,bkhd->bhgqd", weights, widen(values[:, tile.keys]))
                output[(*at, slice(None))] = (
                    output[(*at, slice(None))] * shrink.unsqueeze(-1) + added
                )
                peak[at] = higher
        return output / total.unsqueeze(-1), peak + total.log()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, output, logarithm = ctx.saved_tensors
        hops: Hops = ctx.hops
        axis = hops.zigzag.axis
        queries = grouped(q, k.shape[2]) * ctx.scale
        dy = grouped(gradient, k.shape[2])
        mean = (dy * output).sum(dim=-1, keepdim=True)
        dq = torch.zeros_like(queries)

        def add(owner: int, here: Tensor, gradients: Tensor) -> None:
            keys, values = here
            for tile in hops.tiles(owner):
                at = (..., tile.queries, slice(None))
                scores = scores_of(queries, keys, tile)
                weights = torch.exp(scores - logarithm[..., tile.queries].unsqueeze(-1))
                dweights = torch.einsum("bhgqd,bkhd->bhgqk", dy[at], widen(values[:, tile.keys]))
                dscores = weights * (dweights - mean[at])
                dq[at] += torch.einsum("bhgqk,bkhd->bhgqd", dscores, widen(keys[:, tile.keys]))
                dkeys = torch.einsum("bhgqk,bhgqd->bkhd", dscores, queries[at])
                dvalues = torch.einsum("bhgqk,bhgqd->bkhd", weights, dy[at])
                gradients[0, :, tile.keys] += dkeys
                gradients[1, :, tile.keys] += dvalues

        dk, dv = circulate_with_gradients(torch.stack([k, v]), axis, add).to(k.dtype)
        return ungrouped(dq * ctx.scale).to(q.dtype), dk, dv, None, None, None


def scores_of(queries: Tensor, keys: Tensor, tile: Tile) -> Tensor:
    """Scores [rows, kv_heads, heads of each, queries, keys]; −∞ where not seen."""
    near = widen(keys[:, tile.keys])
    scores = torch.einsum("bhgqd,bkhd->bhgqk", queries[..., tile.queries, :], near)
    return scores if tile.seen is None else scores.masked_fill(~tile.seen(), float("-inf"))


def grouped(x: Tensor, kv_heads: int) -> Tensor:
    """[rows, part, heads, dim] → [rows, kv_heads, heads of each, part, dim], in fp32 or wider."""
    heads: Tensor = widen(x).unflatten(2, (kv_heads, -1))
    return heads.permute(0, 2, 3, 1, 4)


def ungrouped(x: Tensor) -> Tensor:
    """The reverse of `grouped`."""
    return x.permute(0, 3, 1, 2, 4).flatten(2, 3)


def circulate(x: Tensor, axis: Axis) -> Iterator[tuple[int, Tensor]]:
    """Yield x of each rank with the rank, this rank's first. The next one travels meanwhile."""
    for hop in range(axis.size):
        arriving = pass_on(x, axis) if hop + 1 < axis.size else None
        yield (axis.rank - hop) % axis.size, x
        if arriving is not None:
            x = arriving()


def circulate_with_gradients(
    x: Tensor, axis: Axis, add: Callable[[int, Tensor, Tensor], None]
) -> Tensor:
    """Return the gradient of this rank's x, in fp32 or wider. `add(rank, x of the rank, gradient)`
    adds what this rank has to the gradient, which travels behind x back to its rank."""
    returning: Callable[[], Tensor] | None = None
    for owner, here in circulate(x, axis):
        gradient = torch.zeros_like(widen(here))
        add(owner, here, gradient)
        if returning is not None:
            gradient += returning()
        returning = pass_on(gradient, axis)
    assert returning is not None
    return returning()


def pass_on(x: Tensor, axis: Axis) -> Callable[[], Tensor]:
    """Start to send x to the next rank of the ring. Return a function that waits for the tensor
    from the previous rank."""
    x = x.contiguous()
    if axis.size == 1:
        return lambda: x
    to, source = ([0] * axis.size for _ in range(2))
    to[(axis.rank + 1) % axis.size] = source[(axis.rank - 1) % axis.size] = x.numel()
    arriving = start_all_to_all(x.view(-1), source, to, axis)

    def arrived(_sent: Tensor = x) -> Tensor:  # keeps the sent tensor alive until then
        return wait(arriving).view_as(x)

    return arrived
