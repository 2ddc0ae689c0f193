"""What can be wrong with a mixture before any dataset is opened: everything, at once."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping

from ..console.errors import Problem
from .shares import exact
from .spec import Mixture, PhaseSpec, ends

TOLERANCE = 1e-6
"""How far from 1 a phase's shares may be: 0.333 three times is refused, 0.3333333 is not."""


def problems(mixture: Mixture, earlier: Mapping[str, object]) -> Iterator[Problem]:
    """`earlier` holds the phases of the run that the mixture continues."""
    urls: dict[str, str] = {}
    for name, source in mixture.sources.items():
        url = source.data.rstrip("/")
        if url in urls:
            yield Problem(f"sources.{name}.data", f"is the URL of source {urls[url]} too")
        urls[url] = name
        if name in mixture.phases or name in earlier:
            yield Problem(f"sources.{name}", "a phase has this name too")
    replayable = list(earlier)
    for name, phase in mixture.phases.items():
        if name in earlier:
            yield Problem(f"phases.{name}", "the run that this continues has a phase of this name")
        yield from _weight_problems(name, phase, mixture, replayable)
        replayable.append(name)
    yield from _length_problems(mixture)


def _weight_problems(
    name: str, phase: PhaseSpec, mixture: Mixture, replayable: list[str]
) -> Iterator[Problem]:
    place = f"phases.{name}.weights"
    known = [*mixture.sources, *replayable]
    sums = [exact(0.0), exact(0.0)]
    for key, weight in phase.weights.items():
        if key == name:
            yield Problem(f"{place}.{key}", "a phase cannot replay itself")
        elif key not in known and key in mixture.phases:
            yield Problem(f"{place}.{key}", "is a later phase; only earlier ones can be replayed")
        elif key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean `{near[0]}`?" if near else f". Known: {', '.join(known)}"
            yield Problem(f"{place}.{key}", f"there is no such source or earlier phase{hint}")
        if isinstance(weight, dict) and set(weight) != {"from", "to"}:
            yield Problem(f"{place}.{key}", "a changing share has both `from` and `to`")
            return
        for edge, value in enumerate(ends(weight)):
            if not math.isfinite(value) or value < 0:
                yield Problem(f"{place}.{key}", f"is {value}; a share is 0 or more")
                return
            sums[edge] += exact(value)
    edges = {"": sums[0]}
    if sums[0] != sums[1]:
        edges = {" at its beginning": sums[0], " at its end": sums[1]}
    for when, total in edges.items():
        if total == 0:
            yield Problem(place, f"all shares are 0{when}")
        elif abs(total - 1) > TOLERANCE:
            yield Problem(place, f"the shares sum to {float(total):.6g}{when}; they must sum to 1")


def _length_problems(mixture: Mixture) -> Iterator[Problem]:
    seq_len, batch = None, None
    for name, phase in mixture.phases.items():
        seq_len, batch = phase.seq_len or seq_len, phase.batch or batch
        inherits = mixture.after is not None
        if seq_len is None and not inherits:
            yield Problem(f"phases.{name}.seq_len", "is required in the first phase")
        if batch is None and not inherits:
            yield Problem(f"phases.{name}.batch", "is required in the first phase")
        if seq_len and batch and batch < seq_len:
            yield Problem(
                f"phases.{name}.batch",
                f"an update of {batch:,} tokens holds no row of {seq_len:,} tokens",
            )
        if phase.lr.warmup + (phase.lr.decay or 0) > phase.tokens:
            yield Problem(
                f"phases.{name}.lr",
                f"warm-up and decay are longer than the phase ({phase.tokens:,})",
            )
        if mixture.chunk and seq_len and mixture.chunk % seq_len:
            yield Problem(
                "chunk", f"{mixture.chunk:,} is not a multiple of phase {name}'s {seq_len:,} tokens"
            )
