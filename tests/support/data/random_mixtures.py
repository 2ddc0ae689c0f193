"""Random mixtures for hypothesis: shares, replays, changing shares, sequence lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from headrace.mixtures.mixture_file.mixture import PhaseSpec, Weight

LENGTHS = (8, 16, 32)


def shares(draw: st.DrawFn, names: Sequence[str]) -> dict[str, float]:
    """Draw shares with three decimals that sum to 1; the largest takes the rest."""
    units = [draw(st.integers(0, 4)) for _ in names]
    units[0] += not sum(units)
    thousandths = [unit * 1000 // sum(units) for unit in units]
    thousandths[units.index(max(units))] += 1000 - sum(thousandths)
    return {name: share / 1000 for name, share in zip(names, thousandths, strict=True)}


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
    drawn: dict[str, Any] = {}
    for number in range(draw(st.integers(1, 3))):
        length = draw(st.sampled_from(lengths))
        known = [*names, *replays, *drawn] if draw(st.booleans()) else list(names)
        drawn[f"{prefix}{number}"] = PhaseSpec(
            tokens=draw(st.integers(64, 700)),
            weights=weights(draw, known),
            seq_len=length,
            batch=length * draw(st.integers(1, 2)),
        )
    return drawn
