"""Mixtures of all kinds for hypothesis: shares, replays, ramps, lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from headrace.mixtures.spec.mixture import PhaseSpec, Weight

LENGTHS = (8, 16, 32)


def shares(draw: st.DrawFn, names: Sequence[str]) -> dict[str, float]:
    """Shares as people write them: decimals, and the largest takes what is left."""
    parts = [draw(st.integers(0, 4)) for _ in names]
    parts[0] += not sum(parts)
    found = [part * 1000 // sum(parts) for part in parts]
    found[parts.index(max(parts))] += 1000 - sum(found)
    return {name: share / 1000 for name, share in zip(names, found, strict=True)}


def weights(draw: st.DrawFn, names: Sequence[str]) -> dict[str, Weight]:
    first = shares(draw, names)
    if draw(st.integers(0, 3)):
        return dict(first)
    last = shares(draw, names)
    return {name: {"from": first[name], "to": last[name]} for name in names}


def phases(
    draw: st.DrawFn,
    prefix: str,
    names: Sequence[str],
    replays: Sequence[str] = (),
    lengths: Sequence[int] = LENGTHS,
) -> dict[str, PhaseSpec]:
    found: dict[str, Any] = {}
    for number in range(draw(st.integers(1, 3))):
        length = draw(st.sampled_from(lengths))
        known = [*names, *replays, *found] if draw(st.booleans()) else list(names)
        found[f"{prefix}{number}"] = PhaseSpec(
            tokens=draw(st.integers(64, 700)),
            weights=weights(draw, known),
            seq_len=length,
            batch=length * draw(st.integers(1, 2)),
        )
    return found
