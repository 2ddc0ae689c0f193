"""Check a mixture before any dataset is opened, and report all problems at once.

The dataclasses in `mixture.py` only check types. Values are checked here, so that a negative weight
and an unknown source are reported together.
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
    Weight,
    endpoints,
    exact_fraction,
    explicit_shares,
    find_temperature,
    sized_phases,
)

TOLERANCE = 1e-6
"""Maximum distance between a sum of shares and 1: 3 × 0.333 is refused, 3 × 0.3333333 is not."""

MAX_TOKENS = 1 << 60
"""Limit on a phase's tokens, so that rows and tokens are counted in 64 bits."""


class MixtureFinding(NamedTuple):
    """A problem of a mixture, and the path of its YAML key."""

    path: Path
    message: str


@dataclass(frozen=True)
class Inherited:
    """Names and sizes inherited from the continued run."""

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
) -> Iterator[MixtureFinding]:
    """Yield a mixture's problems.

    `unreadable` lists sources and phases with unreadable YAML. If `names_incomplete`, some names
    are missing from that list too, so no name is reported as unknown.
    """
    yield from _check_sources(mixture, inherited)
    if not mixture.phases:
        yield MixtureFinding(("phases",), "is empty; a mixture needs at least one phase")
    for key, value in (("chunk", mixture.chunk), ("window", mixture.window)):
        if value is not None and value < 1:
            yield MixtureFinding((key,), f"is {value:,}; it must be at least 1")
    if mixture.refill and not mixture.without:
        yield MixtureFinding(("refill",), "refills the rows of documents in `without`: name some")
    replayable = list(inherited.phases) if inherited else []
    for name, phase in mixture.phases.items():
        inherited_sources = inherited.sources if inherited else ()
        known = [*mixture.sources, *inherited_sources, *replayable, *unreadable]
        if inherited and name in inherited.phases:
            yield MixtureFinding(
                ("phases", name),
                "the run that this mixture continues has a phase of this name; choose another "
                "name, and replay that phase in `weights`",
            )
        temperature = find_temperature(phase, known)
        if temperature is None:
            yield from _check_weights(name, phase, mixture, None if names_incomplete else known)
        elif not (math.isfinite(temperature) and temperature > 0):
            message = f"is {temperature:g}; it must be above 0"
            yield MixtureFinding(("phases", name, "weights", TEMPERATURE), message)
        replayable.append(name)
    before = (inherited.seq_len, inherited.batch) if inherited else (None, None)
    for sized in sized_phases(mixture, *before):
        yield from _check_sizes(sized, mixture.chunk, required=not (names_incomplete or unreadable))
        yield from _check_learning_rate(sized.name, sized.spec)
        yield from _check_control(sized.name, sized.spec)


def _check_sources(mixture: Mixture, inherited: Inherited | None) -> Iterator[MixtureFinding]:
    if not mixture.sources and mixture.after is None:
        yield MixtureFinding(("sources",), "is empty; a mixture needs at least one source")
    urls: dict[str, str] = {}
    for name, source in mixture.sources.items():
        path = ("sources", name)
        url = _normalize_url(source.data)
        if url in urls:
            yield MixtureFinding((*path, "data"), f"is also the URL of source {urls[url]}")
        urls.setdefault(url, name)
        if name in mixture.phases or (inherited and name in inherited.phases):
            yield MixtureFinding(path, "a phase has the same name")
        for key, value in (("max_epochs", source.max_epochs), ("generations", source.generations)):
            if value is not None and value < 1:
                yield MixtureFinding((*path, key), f"is {value}; it must be at least 1")


def _check_weights(
    name: str, phase: PhaseSpec, mixture: Mixture, known: list[str] | None
) -> Iterator[MixtureFinding]:
    """Check a phase's weights. `known` lists the allowed keys; None if undetermined."""
    path: Path = ("phases", name, "weights")
    shares = explicit_shares(phase)
    if not shares:
        yield MixtureFinding(path, "is empty; name the sources of the phase and their shares")
        return
    is_temperature = known is not None and TEMPERATURE not in (*known, *mixture.phases)
    summable = not (is_temperature and TEMPERATURE in shares)
    for key, weight in shares.items():
        if key == TEMPERATURE and is_temperature:
            message = "is one number, and cannot change over a phase"
            if len(shares) > 1:
                message = (
                    "gives the shares of all sources, and stands alone; leave it out, or leave out "
                    "the shares beside it"
                )
            yield MixtureFinding((*path, key), message)
            continue
        share_problem = _find_share_problem(weight)
        summable = summable and share_problem is None
        for problem in (_find_key_problem(key, name, mixture, known), share_problem):
            if problem is not None:
                yield MixtureFinding((*path, key), problem)
    if summable:
        edges = zip(*map(endpoints, shares.values()), strict=True)
        first, last = (sum(map(exact_fraction, edge), Fraction(0)) for edge in edges)
        yield from _check_sums(path, first, last)


def _find_key_problem(key: str, name: str, mixture: Mixture, known: list[str] | None) -> str | None:
    """Return why a phase cannot draw from a source or phase."""
    if key == name:
        return "a phase cannot replay itself"
    if known is None or key in known:
        return None
    if key in mixture.phases:
        return "is a later phase; only earlier phases can be replayed"
    suggestion = nearest(key, known)
    hint = f"; did you mean `{suggestion}`?" if suggestion else f". Known: {', '.join(known)}"
    return f"there is no such source or earlier phase{hint}"


def _find_share_problem(weight: Weight) -> str | None:
    if isinstance(weight, dict) and set(weight) != {"from", "to"}:
        return "a changing share needs both `from` and `to`"
    refused = [share for share in endpoints(weight) if not math.isfinite(share) or share < 0]
    return f"is {refused[0]:g}; a share must be at least 0" if refused else None


def _check_sums(path: Path, first: Fraction, last: Fraction) -> Iterator[MixtureFinding]:
    """Check the sums of a phase's shares at its start and end."""
    sums = {"": first} if first == last else {" at the start": first, " at the end": last}
    for when, total in sums.items():
        if total == 0:
            yield MixtureFinding(path, f"all shares are 0{when}")
        elif abs(total - 1) > TOLERANCE:
            message = f"the shares sum to {float(total):.6g}{when}; they must sum to 1"
            yield MixtureFinding(path, message)


def _check_sizes(
    phase: SizedPhase, chunk: int | None, *, required: bool
) -> Iterator[MixtureFinding]:
    path: Path = ("phases", phase.name)
    positive = True
    for key in ("seq_len", "batch"):
        value = getattr(phase, key)
        if value is None and required:
            yield MixtureFinding((*path, key), "is required in the first phase")
        if value is not None and value < 1:
            yield MixtureFinding((*path, key), f"is {value:,}; it must be at least 1")
            positive = False
    tokens, seq_len, batch = phase.spec.tokens, phase.seq_len, phase.batch
    if tokens == 0:
        yield MixtureFinding((*path, "tokens"), "is required: the number of tokens of the phase")
    elif not 0 < tokens < MAX_TOKENS:
        message = f"is {tokens:,}; it must be at least 1 and less than {MAX_TOKENS:,}"
        yield MixtureFinding((*path, "tokens"), message)
    if not positive:
        return
    if seq_len and batch and batch < seq_len:
        message = f"a step of {batch:,} tokens is shorter than a row of {seq_len:,} tokens"
        yield MixtureFinding((*path, "batch"), message)
    elif batch and 0 < tokens < batch:
        message = f"{tokens:,} tokens are less than one step ({batch:,})"
        yield MixtureFinding((*path, "tokens"), message)
    if chunk and seq_len and chunk % seq_len:
        message = f"{chunk:,} is not a multiple of seq_len {seq_len:,} of phase {phase.name}"
        yield MixtureFinding(("chunk",), message)


def _check_learning_rate(name: str, phase: PhaseSpec) -> Iterator[MixtureFinding]:
    for key, message in phase.lr.problems(phase.tokens):
        yield MixtureFinding(("phases", name, "lr", *([key] if key else [])), message)


def _check_control(name: str, phase: PhaseSpec) -> Iterator[MixtureFinding]:
    if phase.control is None:
        return
    path: Path = ("phases", name, "control")
    for key, message in phase.control.problems():
        yield MixtureFinding((*path, *([key] if key else [])), message)
    if any(isinstance(weight, dict) for weight in explicit_shares(phase).values()):
        yield MixtureFinding(path, "decides the shares: begin with `weights` that do not change")


def _normalize_url(url: str) -> str:
    """Normalize a URL, so that equal places have equal spellings."""
    if storage.is_local(url):
        return str(FilePath(storage.local_path(url)).absolute())
    return url.rstrip("/")
