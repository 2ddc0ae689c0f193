"""A long ring's passes, from a short traced ring.

With equal chunk lengths, a larger ring runs more hops, and all hops but the first and the last few
are equal. A trace that is cut at each message shows them as a run of equal segments, once per loop
over the ranks. A larger ring's passes repeat that hop more often.
"""

from __future__ import annotations

from collections.abc import Sequence

from .pieces import Pass, Passes, PassSegment

RING = 8
"""Ranks in the traced ring."""
MIN_EQUAL_HOPS = RING - 4
"""Consecutive equal hops in each loop over the ranks, at least."""
LONG = 12
"""Larger rings are extrapolated from the short one."""


def lengthen_ring(passes: Passes, num_ranks: int) -> Passes | None:
    """Return the passes for a ring with `num_ranks` more ranks; None if no hops are equal."""
    forward = _repeat_hops(passes.forward, num_ranks)
    backward = _repeat_hops(passes.backward, num_ranks)
    return None if forward is None or backward is None else Passes(forward, backward)


def _repeat_hops(segments: Pass, num_hops: int) -> Pass | None:
    lengthened: list[PassSegment] = []
    start = num_loops = 0
    while start < len(segments):
        width, hops = _count_equal_hops(segments, start)
        lengthened += segments[start : start + width * hops]
        if hops > 1:
            lengthened += segments[start : start + width] * num_hops
            num_loops += 1
        start += width * hops
    return join_segments(lengthened) if num_loops else None


def _count_equal_hops(segments: Pass, start: int) -> tuple[int, int]:
    """Return the segments per hop from `start` on, and how many consecutive hops are equal."""
    for width in (1, 2):  # a message of keys and values; in a backward pass, of gradients too
        hop, hops = segments[start : start + width], 1
        while segments[start + width * hops : start + width * (hops + 1)] == hop:
            hops += 1
        if hops >= MIN_EQUAL_HOPS:
            return width, hops
    return 1, 1


def join_segments(segments: Sequence[PassSegment]) -> Pass:
    """Merge the segments between two complete gradients."""
    merged: list[PassSegment] = []
    level = high = 0
    for number, segment in enumerate(segments):
        high = max(high, level + segment.high)
        level += segment.change
        if segment.gradient or number == len(segments) - 1:
            merged.append(PassSegment(high, level, segment.gradient, segment.size))
            level = high = 0
    return tuple(merged)
