"""What can be wrong with a mixture before any dataset is opened: everything, at once.

The dataclasses of spec.py only know what a mixture is made of. Whether it makes sense is asked
here, so that a negative weight and a source that does not exist are reported together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path as FilePath
from typing import NamedTuple

from ...console.explain import nearest
from ...console.yaml_text import Path
from ...dataplane.storage import storage
from .mixture import (
    Mixture,
    PhaseSpec,
    SizedPhase,
    endpoints,
    exact_fraction,
    sized_phases,
)

TOLERANCE = 1e-6
"""How far from 1 a phase's shares may be: 0.333 three times is refused, 0.3333333 is not."""

MOST_TOKENS = 1 << 60
"""A phase's, so that rows and tokens are counted in 64 bits."""


class Finding(NamedTuple):
    """Something wrong, and the place in the YAML."""

    path: Path
    what: str


@dataclass(frozen=True)
class Inherited:
    """What the run that a mixture continues has settled."""

    phases: tuple[str, ...]
    sources: tuple[str, ...]
    seq_len: int
    batch: int


def check_mixture(
    mixture: Mixture,
    inherited: Inherited | None,
    *,
    unreadable: Sequence[str] = (),
    names_incomplete: bool = False,
) -> Iterator[Finding]:
    """`lost` are names of sources and phases that cannot be read. With `blind` there are more, of
    which not even the names are known."""
    yield from _source_findings(mixture, inherited)
    if not mixture.phases:
        yield Finding(("phases",), "is empty; a mixture needs at least one phase")
    for name, value in (("chunk", mixture.chunk), ("window", mixture.window)):
        if value is not None and value < 1:
            yield Finding((name,), f"is {value:,}; it must be at least 1")
    replayable = list(inherited.phases) if inherited else []
    for name, phase in mixture.phases.items():
        known = [
            *mixture.sources,
            *(inherited.sources if inherited else ()),
            *replayable,
            *unreadable,
        ]
        if inherited and name in inherited.phases:
            yield Finding(
                ("phases", name),
                "the run that this continues has a phase of this name; replay it under another",
            )
        yield from _weight_findings(name, phase, mixture, None if names_incomplete else known)
        replayable.append(name)
    before = (inherited.seq_len, inherited.batch) if inherited else (None, None)
    for each in sized_phases(mixture, *before):
        yield from _size_findings(each, mixture.chunk, needed=not (names_incomplete or unreadable))
        yield from _lr_findings(each.name, each.spec)


def _source_findings(mixture: Mixture, inherited: Inherited | None) -> Iterator[Finding]:
    if not mixture.sources and mixture.after is None:
        yield Finding(("sources",), "is empty; a mixture needs at least one source")
    urls: dict[str, str] = {}
    for name, source in mixture.sources.items():
        place = ("sources", name)
        url = _one_url(source.data)
        if url in urls:
            yield Finding((*place, "data"), f"is the URL of source {urls[url]} too")
        urls.setdefault(url, name)
        if name in mixture.phases or (inherited and name in inherited.phases):
            yield Finding(place, "a phase has this name too")
        for key, value in (("max_epochs", source.max_epochs), ("generations", source.generations)):
            if value is not None and value < 1:
                yield Finding((*place, key), f"is {value}; it must be at least 1")


def _weight_findings(
    name: str, phase: PhaseSpec, mixture: Mixture, known: list[str] | None
) -> Iterator[Finding]:
    """`known` are the sources and earlier phases that may be weighed, if they are known."""
    place: Path = ("phases", name, "weights")
    if not phase.weights:
        yield Finding(place, "is empty; it names the sources of the phase")
        return
    sums: list[Fraction] | None = [Fraction(0), Fraction(0)]
    for key, weight in phase.weights.items():
        if key == name:
            yield Finding((*place, key), "a phase cannot replay itself")
        elif known is not None and key not in known:
            if key in mixture.phases:
                what = "is a later phase; only earlier ones can be replayed"
            else:
                near = nearest(key, known)
                hint = f"; did you mean `{near}`?" if near else f". Known: {', '.join(known)}"
                what = f"there is no such source or earlier phase{hint}"
            yield Finding((*place, key), what)
        if isinstance(weight, dict) and set(weight) != {"from", "to"}:
            yield Finding((*place, key), "a changing share has both `from` and `to`")
            sums = None
            continue
        for edge, value in enumerate(endpoints(weight)):
            if not math.isfinite(value) or value < 0:
                yield Finding((*place, key), f"is {value:g}; a share is 0 or more")
                sums = None
                break
            if sums is not None:
                sums[edge] += exact_fraction(value)
    if sums is None:
        return
    edges = {"": sums[0]}
    if sums[0] != sums[1]:
        edges = {" at its beginning": sums[0], " at its end": sums[1]}
    for when, total in edges.items():
        if total == 0:
            yield Finding(place, f"all shares are 0{when}")
        elif abs(total - 1) > TOLERANCE:
            yield Finding(place, f"the shares sum to {float(total):.6g}{when}; they must sum to 1")


def _size_findings(phase: SizedPhase, chunk: int | None, *, needed: bool) -> Iterator[Finding]:
    place: Path = ("phases", phase.name)
    sound = True
    for key in ("seq_len", "batch"):
        value = getattr(phase, key)
        if value is None and needed:
            yield Finding((*place, key), "is required in the first phase")
        if value is not None and value < 1:
            yield Finding((*place, key), f"is {value:,}; it must be at least 1")
            sound = False
    tokens, seq_len, batch = phase.spec.tokens, phase.seq_len, phase.batch
    if tokens == 0:
        yield Finding((*place, "tokens"), "is required: how many tokens the phase takes")
    elif not 0 < tokens < MOST_TOKENS:
        what = f"is {tokens:,}; it must be at least 1, and less than {MOST_TOKENS:,}"
        yield Finding((*place, "tokens"), what)
    if not sound:
        return
    if seq_len and batch and batch < seq_len:
        what = f"an update of {batch:,} tokens holds no row of {seq_len:,} tokens"
        yield Finding((*place, "batch"), what)
    elif batch and 0 < tokens < batch:
        what = f"{tokens:,} tokens are less than one update ({batch:,})"
        yield Finding((*place, "tokens"), what)
    if chunk and seq_len and chunk % seq_len:
        what = f"{chunk:,} is not a multiple of phase {phase.name}'s {seq_len:,} tokens"
        yield Finding(("chunk",), what)


def _lr_findings(name: str, phase: PhaseSpec) -> Iterator[Finding]:
    for key, what in phase.lr.problems(phase.tokens):
        yield Finding(("phases", name, "lr", *([key] if key else [])), what)


def _one_url(url: str) -> str:
    """One way to write a URL."""
    if storage.is_local(url):
        return str(FilePath(storage.local_path(url)).absolute())
    return url.rstrip("/")
