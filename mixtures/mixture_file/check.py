"""Check a mixture before any dataset is opened, and report all problems at once.

The dataclasses of `mixture.py` only check types. The meaning of the values is checked here, so
that a negative weight and an unknown source are reported together.
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
    TEMPERATURE,
    Mixture,
    PhaseSpec,
    SizedPhase,
    endpoints,
    exact_fraction,
    shares_of,
    sized_phases,
    temperature_of,
)

TOLERANCE = 1e-6
"""Maximum distance of a sum of shares from 1: three times 0.333 is refused, 0.3333333 is not."""

MAX_TOKENS = 1 << 60
"""Limit on the tokens of a phase, so that rows and tokens are counted in 64 bits."""


class Finding(NamedTuple):
    """A problem, and its place in the YAML."""

    path: Path
    what: str


@dataclass(frozen=True)
class Inherited:
    """Names and sizes that a mixture inherits from the run that it continues."""

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
    """Yield the problems of a mixture.

    `unreadable` are names of sources and phases whose YAML could not be read. `names_incomplete`
    means that not even all names are known, so no name is reported as unknown.
    """
    yield from _source_findings(mixture, inherited)
    if not mixture.phases:
        yield Finding(("phases",), "is empty; a mixture needs at least one phase")
    for name, value in (("chunk", mixture.chunk), ("window", mixture.window)):
        if value is not None and value < 1:
            yield Finding((name,), f"is {value:,}; it must be at least 1")
    replayable = list(inherited.phases) if inherited else []
    for name, phase in mixture.phases.items():
        inherited_sources = inherited.sources if inherited else ()
        known = [*mixture.sources, *inherited_sources, *replayable, *unreadable]
        if inherited and name in inherited.phases:
            yield Finding(
                ("phases", name),
                "the run that this mixture continues has a phase of this name; choose another "
                "name, and replay that phase in `weights`",
            )
        temperature = temperature_of(phase, known)
        if temperature is None:
            yield from _weight_findings(name, phase, mixture, None if names_incomplete else known)
        elif not (math.isfinite(temperature) and temperature > 0):
            what = f"is {temperature:g}; it must be above 0"
            yield Finding(("phases", name, "weights", TEMPERATURE), what)
        replayable.append(name)
    before = (inherited.seq_len, inherited.batch) if inherited else (None, None)
    for sized in sized_phases(mixture, *before):
        yield from _size_findings(
            sized, mixture.chunk, required=not (names_incomplete or unreadable)
        )
        yield from _lr_findings(sized.name, sized.spec)


def _source_findings(mixture: Mixture, inherited: Inherited | None) -> Iterator[Finding]:
    if not mixture.sources and mixture.after is None:
        yield Finding(("sources",), "is empty; a mixture needs at least one source")
    urls: dict[str, str] = {}
    for name, source in mixture.sources.items():
        place = ("sources", name)
        url = _normal_url(source.data)
        if url in urls:
            yield Finding((*place, "data"), f"is also the URL of source {urls[url]}")
        urls.setdefault(url, name)
        if name in mixture.phases or (inherited and name in inherited.phases):
            yield Finding(place, "a phase has the same name")
        for key, value in (("max_epochs", source.max_epochs), ("generations", source.generations)):
            if value is not None and value < 1:
                yield Finding((*place, key), f"is {value}; it must be at least 1")


def _weight_findings(
    name: str, phase: PhaseSpec, mixture: Mixture, known: list[str] | None
) -> Iterator[Finding]:
    """Check the weights of a phase. `known` are its possible keys; None if they are not known."""
    place: Path = ("phases", name, "weights")
    if not shares_of(phase):
        yield Finding(place, "is empty; name the sources of the phase and their shares")
        return
    sums: list[Fraction] | None = [Fraction(0), Fraction(0)]
    for key, weight in shares_of(phase).items():
        if key == name:
            yield Finding((*place, key), "a phase cannot replay itself")
        elif known is not None and key not in known:
            if key in mixture.phases:
                what = "is a later phase; only earlier phases can be replayed"
            elif key == TEMPERATURE:
                sums = None
                what = "is one number, and cannot change over a phase"
                if len(shares_of(phase)) > 1:
                    what = (
                        "gives the shares of all sources, and stands alone; leave it out, or leave "
                        "out the shares beside it"
                    )
                yield Finding((*place, key), what)
                continue
            else:
                near = nearest(key, known)
                hint = f"; did you mean `{near}`?" if near else f". Known: {', '.join(known)}"
                what = f"there is no such source or earlier phase{hint}"
            yield Finding((*place, key), what)
        if isinstance(weight, dict) and set(weight) != {"from", "to"}:
            yield Finding((*place, key), "a changing share needs both `from` and `to`")
            sums = None
            continue
        for edge, value in enumerate(endpoints(weight)):
            if not math.isfinite(value) or value < 0:
                yield Finding((*place, key), f"is {value:g}; a share must be at least 0")
                sums = None
                break
            if sums is not None:
                sums[edge] += exact_fraction(value)
    if sums is None:
        return
    edges = {"": sums[0]}
    if sums[0] != sums[1]:
        edges = {" at the start": sums[0], " at the end": sums[1]}
    for when, total in edges.items():
        if total == 0:
            yield Finding(place, f"all shares are 0{when}")
        elif abs(total - 1) > TOLERANCE:
            yield Finding(place, f"the shares sum to {float(total):.6g}{when}; they must sum to 1")


def _size_findings(phase: SizedPhase, chunk: int | None, *, required: bool) -> Iterator[Finding]:
    place: Path = ("phases", phase.name)
    sound = True
    for key in ("seq_len", "batch"):
        value = getattr(phase, key)
        if value is None and required:
            yield Finding((*place, key), "is required in the first phase")
        if value is not None and value < 1:
            yield Finding((*place, key), f"is {value:,}; it must be at least 1")
            sound = False
    tokens, seq_len, batch = phase.spec.tokens, phase.seq_len, phase.batch
    if tokens == 0:
        yield Finding((*place, "tokens"), "is required: the number of tokens of the phase")
    elif not 0 < tokens < MAX_TOKENS:
        what = f"is {tokens:,}; it must be at least 1 and less than {MAX_TOKENS:,}"
        yield Finding((*place, "tokens"), what)
    if not sound:
        return
    if seq_len and batch and batch < seq_len:
        what = f"a step of {batch:,} tokens is shorter than a row of {seq_len:,} tokens"
        yield Finding((*place, "batch"), what)
    elif batch and 0 < tokens < batch:
        what = f"{tokens:,} tokens are less than one step ({batch:,})"
        yield Finding((*place, "tokens"), what)
    if chunk and seq_len and chunk % seq_len:
        what = f"{chunk:,} is not a multiple of seq_len {seq_len:,} of phase {phase.name}"
        yield Finding(("chunk",), what)


def _lr_findings(name: str, phase: PhaseSpec) -> Iterator[Finding]:
    for key, what in phase.lr.problems(phase.tokens):
        yield Finding(("phases", name, "lr", *([key] if key else [])), what)


def _normal_url(url: str) -> str:
    """Return one spelling of a URL."""
    if storage.is_local(url):
        return str(FilePath(storage.local_path(url)).absolute())
    return url.rstrip("/")
