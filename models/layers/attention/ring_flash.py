"""Ring attention by flash attention, on CUDA in half precision, as parallel/ring.py arranges it.

Each hop is one call of torch's flash attention (two where a rank has its own keys), whose outputs
are merged by their log-sum-exp:

    z = log(exp z₁ + exp z₂),   y = exp(z₁ − z)·y₁ + exp(z₂ − z)·y₂

The backward pass calls flash attention's, with the merged output and log-sum-exp: the
probabilities exp(score − z) are then those of the whole row, and the gradients of the hops are
added, in fp32.

Packed documents need no mask. Of the keys of an earlier chunk, queries see those of the one
document that reaches from there into their own chunk: one range of keys, which one range of
queries sees. Within a chunk, documents are segments of one causal call.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from ...config.precision import widen
from ...documents import Documents, moved
from ...parallel.axes import Axis
from ...parallel.ring import Chunk, Zigzag, circulate, circulate_with_gradients
from ...parallel.whole_results import as_one

Range = tuple[int, int]
"""First and last + 1 of a range of tokens."""


def ring_flash_attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents | None, axis: Axis, *, scale: float
) -> Tensor:
    """q [rows, part, heads, dim], k and v [rows, part, kv_heads, dim] → like q. `documents` are
    those of whole rows; None: each row is one document."""
    rows, part = q.shape[:2]
    heads = [q.shape[2], k.shape[2], v.shape[2]]
    zigzag = Zigzag(part, axis)
    if documents is None:
        calls = calls_of_rows(rows, part, axis, q.device)
    else:
        key = ("ring", part, axis.rank, axis.size)
        calls = documents.kept(
            key, lambda host: calls_of(starts_of(host), zigzag, part).to(q.device)
        )
    dealt = zigzag.deal(torch.cat([q, k, v], dim=2)).flatten(0, 1)
    y: Tensor = _FlashRing.apply(*dealt.split(heads, dim=1), calls, axis, scale)
    return zigzag.collect(y.unflatten(0, (rows, part)))


@dataclass(frozen=True)
class Call:
    """A call of flash attention: the n-th range of queries sees the n-th range of keys."""

    queries: Sequence[Range]
    """Ranges of the tokens of all rows of this rank."""
    keys: Sequence[Range]
    """Ranges of the tokens of all rows of the owner of the keys."""
    causal: bool
    ends: Tensor
    """int32 [2, ranges + 1]: 0 and the ends of the ranges, put together; of queries, of keys."""

    @classmethod
    def build(cls, queries: Sequence[Range], keys: Sequence[Range], *, causal: bool) -> Call:
        ends = [[0, *accumulate(b - a for a, b in ranges)] for ranges in (queries, keys)]
        return cls(queries, keys, causal, torch.tensor(ends, dtype=torch.int32))

    @property
    def longest(self) -> tuple[int, int]:
        """Tokens of the longest range of queries, and of keys."""
        lengths = [max(b - a for a, b in ranges) for ranges in (self.queries, self.keys)]
        return lengths[0], lengths[1]


@dataclass(frozen=True)
class Calls:
    """The calls of a rank."""

    within: Call
    """Each document within each of the rank's chunks."""
    between: Sequence[Call | None]
    """By the owner of the keys: the rank's queries and the keys of earlier chunks."""

    def of(self, owner: int, rank: int) -> list[Call]:
        first = [self.within] if owner == rank else []
        return [*first, *(call for call in [self.between[owner]] if call is not None)]

    def to(self, device: torch.device) -> Calls:
        def there(call: Call) -> Call:
            return Call(call.queries, call.keys, call.causal, moved(call.ends, device))

        between = [None if call is None else there(call) for call in self.between]
        return Calls(there(self.within), between)


@lru_cache(maxsize=16)
def calls_of_rows(rows: int, part: int, axis: Axis, device: torch.device) -> Calls:
    """Return the calls for rows of one document each."""
    return calls_of([[0]] * rows, Zigzag(part, axis), part).to(device)


def starts_of(documents: Documents) -> list[list[int]]:
    """Return the columns at which the documents of each row start."""
    return [row.nonzero().flatten().tolist() for row in documents.segment_starts()]


def calls_of(starts: Sequence[Sequence[int]], zigzag: Zigzag, part: int) -> Calls:
    axis = zigzag.axis
    mine = zigzag.chunks(axis.rank)
    within: list[Range] = []
    for row, begins in enumerate(starts):
        for chunk in mine:
            inside = [begin for begin in begins if chunk.first < begin < chunk.last]
            shift = row * part + chunk.here - chunk.first
            cuts = [chunk.first, *inside, chunk.last]
            within += [(a + shift, b + shift) for a, b in pairwise(cuts) if a < b]
    between: list[Call | None] = []
    for owner in range(axis.size):
        pairs = [meeting(row, mine, zigzag.chunks(owner), owner < axis.rank) for row in starts]
        shifted = [
            [(a + row * part, b + row * part) for a, b in pair]
            for row, pair in enumerate(pairs)
            if pair is not None
        ]
        queries, keys = ([pair[side] for pair in shifted] for side in (0, 1))
        between.append(Call.build(queries, keys, causal=False) if shifted else None)
    return Calls(Call.build(within, within, causal=True), between)


def meeting(
    starts: Sequence[int], mine: Sequence[Chunk], owners: Sequence[Chunk], both: bool
) -> tuple[Range, Range] | None:
    """Return the queries of a row that see keys of earlier chunks of an owner, and these keys, as
    ranges of the ranks' tensors; None if there are none. `both`: the owner has keys before both of
    this rank's chunks; otherwise before the late one alone."""
    chunks = [chunk for chunk in (mine if both else mine[1:]) if chunk.first < chunk.last]
    if not chunks:
        return None
    document = bisect_right(starts, chunks[0].first)
    begin = starts[document - 1]
    end = starts[document] if document < len(starts) else chunks[-1].last
    keys = [
        (max(begin, chunk.first) + chunk.here - chunk.first, chunk.last + chunk.here - chunk.first)
        for chunk in owners
        if begin < chunk.last <= chunks[0].first
    ]
    keys = [(a, b) for a, b in keys if a < b]
    queries = [
        (chunk.here, min(end, chunk.last) + chunk.here - chunk.first)
        for chunk in chunks
        if chunk.first < end
    ]
    return ((queries[0][0], queries[-1][1]), (keys[0][0], keys[-1][1])) if keys else None


class _FlashRing(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, calls: Calls, axis: Axis, scale: float
    ) -> Tensor:
        output, total = as_one("attention", partial(_FlashRing.attend, q, k, v, calls, axis, scale))
        ctx.save_for_backward(q, k, v, output, total)
        ctx.calls, ctx.axis, ctx.scale = calls, axis, scale
        return output

    @staticmethod
    def attend(
        q: Tensor, k: Tensor, v: Tensor, calls: Calls, axis: Axis, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return the output and the log-sum-exp of the scores, fp32 [heads, tokens]."""
        merged = torch.zeros_like(widen(q))
        total = merged.new_full((q.shape[1], q.shape[0]), float("-inf"))
        for owner, here in circulate(torch.stack([k, v]), axis):
            for call in calls.of(owner, axis.rank):
                keys, values = (joined(x, call.keys) for x in here)
                y, sums = flash(joined(q, call.queries), keys, values, call, scale)
                merge(merged, total, y, sums, call.queries)
        return merged.to(q.dtype), total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, output, total = ctx.saved_tensors
        axis: Axis = ctx.axis
        dq = torch.zeros_like(widen(q))

        def add(owner: int, here: Tensor, gradients: Tensor) -> None:
            for call in ctx.calls.of(owner, axis.rank):
                dy, queries, y = (joined(x, call.queries) for x in (gradient, q, output))
                keys, values = (joined(x, call.keys) for x in here)
                sums = joined(total.T, call.queries).T.contiguous()
                to = (dq, call.queries), (gradients[0], call.keys), (gradients[1], call.keys)
                parts = flash_backward(dy, queries, keys, values, y, sums, call, ctx.scale)
                for (whole, ranges), part in zip(to, parts, strict=True):
                    for at, piece in apart(whole, part, ranges):
                        at += piece

        dk, dv = circulate_with_gradients(torch.stack([k, v]), axis, add).to(k.dtype)
        return dq.to(q.dtype), dk, dv, None, None, None


def flash(q: Tensor, k: Tensor, v: Tensor, call: Call, scale: float) -> tuple[Tensor, Tensor]:
    """Return the output [tokens, heads, dim] and the log-sum-exp, fp32 [heads, tokens]."""
    output, total, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, *call.ends, *call.longest, 0.0, call.causal, False, scale=scale
    )
    return output, total


def flash_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, total: Tensor, call: Call, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device), q.new_empty(0)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        dy, q, k, v, y, total, *call.ends, *call.longest, 0.0, call.causal, *no_dropout, scale=scale
    )
    return dq, dk, dv


def merge(
    merged: Tensor, total: Tensor, output: Tensor, added: Tensor, ranges: Sequence[Range]
) -> None:
    """Add the output and the log-sum-exp of some keys to those of the keys before, in place."""
    for (whole, part), (sums, new) in zip(
        apart(merged, output, ranges), apart(total.T, added.T, ranges), strict=True
    ):
        both = torch.logaddexp(sums, new)
        whole *= torch.exp(sums - both).unsqueeze(-1)
        whole += torch.exp(new - both).unsqueeze(-1) * part
        sums.copy_(both)


def joined(x: Tensor, ranges: Sequence[Range]) -> Tensor:
    """Return these ranges of the tokens of x, without a copy if there is one or if they adjoin."""
    if all(a[1] == b[0] for a, b in pairwise(ranges)):
        return x[ranges[0][0] : ranges[-1][1]]
    return torch.cat([x[a:b] for a, b in ranges])


def apart(whole: Tensor, part: Tensor, ranges: Sequence[Range]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the ranges of `whole`, each with its piece of `part`, which holds them joined."""
    if all(a[1] == b[0] for a, b in pairwise(ranges)):
        ranges = [(ranges[0][0], ranges[-1][1])]
    begin = 0
    for a, b in ranges:
        yield whole[a:b], part[begin : begin + b - a]
        begin += b - a
