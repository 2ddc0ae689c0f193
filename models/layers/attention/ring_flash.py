"""Ring attention by flash attention, on CUDA in half precision, as parallel/ring/ arranges it.

Each hop is a call to torch's flash attention (two where a rank has its own keys); outputs are
merged by log-sum-exp:

    z = log(exp z₁ + exp z₂),   y = exp(z₁ − z)·y₁ + exp(z₂ − z)·y₂

The backward pass calls flash attention's, with the merged output and log-sum-exp: the probabilities
exp(score − z) are then the whole row's, and the hops' gradients are added, in fp32.

Packed documents need no mask. In an earlier chunk, queries see only the document that continues
into their own chunk: a single key range, seen by a single query range. Within a chunk, documents
are segments in a causal call.
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
from ...documents import Documents, copy_async
from ...parallel.axes import Axis
from ...parallel.ring.circulation import (
    Expand,
    KeysAndValues,
    Latents,
    circulate_keys,
    circulate_with_gradients,
)
from ...parallel.ring.zigzag import RowChunk, Zigzag
from ...parallel.whole_results import run_composite

Range = tuple[int, int]
"""Token range [start, end)."""


def ring_flash_attention(
    q: Tensor,
    keys: KeysAndValues | Latents,
    documents: Documents | None,
    axis: Axis,
    *,
    scale: float,
) -> Tensor:
    """Return attention over whole rows, like q [rows, local_length, heads, head_dim], as wide as
    the values. `documents` describe full rows; None: each row is a single document."""
    rows, local_length = q.shape[:2]
    zigzag = Zigzag(local_length, axis)
    if documents is None:
        calls = plan_row_calls(rows, local_length, axis, q.device)
    else:
        key = ("ring", local_length, axis.rank, axis.size)
        calls = documents.get_or_build(
            key, lambda host: plan_calls(document_columns(host), zigzag, local_length).to(q.device)
        )
    q, (first, second), expand = keys.deal(q, zigzag)
    first = first.flatten(0, 1)
    second = second if expand is not None else second.flatten(0, 1)
    y: Tensor = _FlashRing.apply(q.flatten(0, 1), first, second, expand, calls, axis, scale)
    return zigzag.collect(y[..., : keys.value_dim].unflatten(0, (rows, local_length)))


@dataclass(frozen=True)
class FlashCall:
    """One flash-attention call: the n-th query range sees the n-th key range."""

    queries: Sequence[Range]
    """Ranges among this rank's tokens, all rows concatenated."""
    keys: Sequence[Range]
    """Ranges among the key owner's tokens, all rows concatenated."""
    causal: bool
    ends: Tensor
    """int32 [2, ranges + 1]: cumulative lengths from 0, for queries and for keys."""

    @classmethod
    def build(cls, queries: Sequence[Range], keys: Sequence[Range], *, causal: bool) -> FlashCall:
        ends = [[0, *accumulate(b - a for a, b in ranges)] for ranges in (queries, keys)]
        return cls(queries, keys, causal, torch.tensor(ends, dtype=torch.int32))

    @property
    def longest(self) -> tuple[int, int]:
        """Tokens in the longest query range, and in the longest key range."""
        lengths = [max(b - a for a, b in ranges) for ranges in (self.queries, self.keys)]
        return lengths[0], lengths[1]


@dataclass(frozen=True)
class FlashCalls:
    """The flash-attention calls that a rank makes."""

    within: FlashCall
    """Documents within the rank's own chunks."""
    between: Sequence[FlashCall | None]
    """By key owner: the rank's queries with keys from earlier chunks."""

    def select(self, owner: int, rank: int) -> list[FlashCall]:
        within = [self.within] if owner == rank else []
        return [*within, *(call for call in [self.between[owner]] if call is not None)]

    def to(self, device: torch.device) -> FlashCalls:
        def move_call(call: FlashCall) -> FlashCall:
            return FlashCall(call.queries, call.keys, call.causal, copy_async(call.ends, device))

        between = [None if call is None else move_call(call) for call in self.between]
        return FlashCalls(move_call(self.within), between)


@lru_cache(maxsize=16)
def plan_row_calls(rows: int, local_length: int, axis: Axis, device: torch.device) -> FlashCalls:
    """Plan the calls for rows that hold one document."""
    return plan_calls([[0]] * rows, Zigzag(local_length, axis), local_length).to(device)


def document_columns(documents: Documents) -> list[list[int]]:
    """Return, by row, the columns at which documents begin."""
    return [row.nonzero().flatten().tolist() for row in documents.segment_starts()]


def plan_calls(starts: Sequence[Sequence[int]], zigzag: Zigzag, local_length: int) -> FlashCalls:
    """Plan the calls for rows whose documents begin at `starts`; a rank holds `local_length`
    tokens."""
    axis = zigzag.axis
    local_chunks = zigzag.chunks(axis.rank)
    within: list[Range] = []
    for row, columns in enumerate(starts):
        for chunk in local_chunks:
            inner_starts = [start for start in columns if chunk.start < start < chunk.end]
            shift = row * local_length + chunk.offset - chunk.start
            cuts = [chunk.start, *inner_starts, chunk.end]
            within += [(a + shift, b + shift) for a, b in pairwise(cuts) if a < b]
    between: list[FlashCall | None] = []
    for owner in range(axis.size):
        range_pairs = [
            visible_ranges(row, local_chunks, zigzag.chunks(owner), owner < axis.rank)
            for row in starts
        ]
        shifted = [
            [(a + row * local_length, b + row * local_length) for a, b in ranges]
            for row, ranges in enumerate(range_pairs)
            if ranges is not None
        ]
        queries, keys = ([ranges[side] for ranges in shifted] for side in (0, 1))
        between.append(FlashCall.build(queries, keys, causal=False) if shifted else None)
    return FlashCalls(FlashCall.build(within, within, causal=True), between)


def visible_ranges(
    starts: Sequence[int],
    local_chunks: Sequence[RowChunk],
    owner_chunks: Sequence[RowChunk],
    sees_all: bool,
) -> tuple[Range, Range] | None:
    """Return the query range in a row that sees an owner's earlier chunks, and the visible key
    range, as offsets into the ranks' tensors; None without visible keys. `sees_all`: the owner has
    keys before both of this rank's chunks; otherwise before the late one only."""
    chunks = [
        chunk
        for chunk in (local_chunks if sees_all else local_chunks[1:])
        if chunk.start < chunk.end
    ]
    if not chunks:
        return None
    next_document = bisect_right(starts, chunks[0].start)
    begin = starts[next_document - 1]
    end = starts[next_document] if next_document < len(starts) else chunks[-1].end
    keys = [
        (
            max(begin, chunk.start) + chunk.offset - chunk.start,
            chunk.end + chunk.offset - chunk.start,
        )
        for chunk in owner_chunks
        if begin < chunk.end <= chunks[0].start
    ]
    keys = [(a, b) for a, b in keys if a < b]
    queries = [
        (chunk.offset, min(end, chunk.end) + chunk.offset - chunk.start)
        for chunk in chunks
        if chunk.start < end
    ]
    return ((queries[0][0], queries[-1][1]), (keys[0][0], keys[-1][1])) if keys else None


class _FlashRing(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        first: Tensor,
        second: Tensor,
        expand: Expand | None,
        calls: FlashCalls,
        axis: Axis,
        scale: float,
    ) -> Tensor:
        sources = first, second
        output, log_z = run_composite(
            "attention", partial(_FlashRing.attend, q, sources, expand, calls, axis, scale)
        )
        ctx.save_for_backward(q, *sources, output, log_z)
        ctx.expand, ctx.calls, ctx.axis, ctx.scale = expand, calls, axis, scale
        return output

    @staticmethod
    def attend(
        q: Tensor,
        sources: tuple[Tensor, Tensor],
        expand: Expand | None,
        calls: FlashCalls,
        axis: Axis,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Return the output and the scores' log-sum-exp, fp32 [heads, tokens]."""
        merged = torch.zeros_like(widen(q))
        log_z = merged.new_full((q.shape[1], q.shape[0]), float("-inf"))
        for owner, owner_kv in circulate_keys(sources, expand, axis):
            for call in calls.select(owner, axis.rank):
                keys, values = (join_ranges(x, call.keys) for x in owner_kv)
                y, call_log_z = flash(join_ranges(q, call.queries), keys, values, call, scale)
                merge_outputs(merged, log_z, y, call_log_z, call.queries)
        return merged.to(q.dtype), log_z

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, first, second, output, log_z = ctx.saved_tensors
        axis: Axis = ctx.axis
        dq = torch.zeros_like(widen(q))

        def add(owner: int, owner_kv: Tensor, grad_kv: Tensor) -> None:
            for call in ctx.calls.select(owner, axis.rank):
                call_dy, call_q, call_y = (join_ranges(x, call.queries) for x in (dy, q, output))
                keys, values = (join_ranges(x, call.keys) for x in owner_kv)
                call_log_z = join_ranges(log_z.T, call.queries).T.contiguous()
                targets = (dq, call.queries), (grad_kv[0], call.keys), (grad_kv[1], call.keys)
                call_grads = flash_backward(
                    call_dy, call_q, keys, values, call_y, call_log_z, call, ctx.scale
                )
                for (target, ranges), call_grad in zip(targets, call_grads, strict=True):
                    for target_range, grad_range in split_ranges(target, call_grad, ranges):
                        target_range += grad_range

        source_grads = circulate_with_gradients((first, second), ctx.expand, axis, add)
        return dq.to(q.dtype), *source_grads, None, None, None, None


def flash(q: Tensor, k: Tensor, v: Tensor, call: FlashCall, scale: float) -> tuple[Tensor, Tensor]:
    """Return the output [tokens, heads, head_dim] and the log-sum-exp, fp32 [heads, tokens]."""
    output, log_z, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, *call.ends, *call.longest, 0.0, call.causal, False, scale=scale
    )
    return output, log_z


def flash_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    log_z: Tensor,
    call: FlashCall,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv [tokens, heads or kv_heads, head_dim]."""
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device), q.new_empty(0)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        dy, q, k, v, y, log_z, *call.ends, *call.longest, 0.0, call.causal, *no_dropout, scale=scale
    )
    return dq, dk, dv


def merge_outputs(
    merged: Tensor, log_z: Tensor, call_output: Tensor, call_log_z: Tensor, ranges: Sequence[Range]
) -> None:
    """Merge a call's output and log-sum-exp into the running ones, in place."""
    for (merged_range, output_range), (merged_log_z, new_log_z) in zip(
        split_ranges(merged, call_output, ranges),
        split_ranges(log_z.T, call_log_z.T, ranges),
        strict=True,
    ):
        total_log_z = torch.logaddexp(merged_log_z, new_log_z)
        merged_range *= torch.exp(merged_log_z - total_log_z).unsqueeze(-1)
        merged_range += torch.exp(new_log_z - total_log_z).unsqueeze(-1) * output_range
        merged_log_z.copy_(total_log_z)


def join_ranges(x: Tensor, ranges: Sequence[Range]) -> Tensor:
    """Concatenate token ranges in x; no copy if they are adjacent."""
    if all(a[1] == b[0] for a, b in pairwise(ranges)):
        return x[ranges[0][0] : ranges[-1][1]]
    return torch.cat([x[a:b] for a, b in ranges])


def split_ranges(
    target: Tensor, joined: Tensor, ranges: Sequence[Range]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each range of `target` with its slice of `joined`, the concatenated ranges."""
    if all(a[1] == b[0] for a, b in pairwise(ranges)):
        ranges = [(ranges[0][0], ranges[-1][1])]
    start = 0
    for a, b in ranges:
        yield target[a:b], joined[start : start + b - a]
        start += b - a
