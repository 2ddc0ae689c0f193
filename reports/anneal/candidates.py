"""Candidate mixtures of an anneal: files, with the shares of a grid, each for one or several seeds.

a.yaml b.yaml × --grid math=0.1,0.2 × --seeds 2   ─►   8 runs of 4 candidates

A candidate continues the run at the step. Its first seed is the exact continuation. The others
serve the rest of every source's epoch in other orders, so that their scores show the noise.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...console.errors import ConfigError, MisuseError, Problem, SeveralErrors, UserError
from ...console.explain import line_of
from ...dataplane.order.plan import Plan
from ...mixtures.mixture_file.mixture import After, Mixture, PhaseSpec, Weight
from ...mixtures.mixture_file.tolerant_read import Draft, read
from ...mixtures.planning.branch_point import check_checkpoint, open_branch_point
from ...mixtures.planning.resolve_mixture import resolve_draft

UNITS = 100_000
"""Shares of a grid are multiples of 1/UNITS: five decimals, as people write them."""


@dataclass(frozen=True)
class Candidate:
    """A mixture with one seed, and its plan."""

    name: str
    """The file's name, and the shares of the grid."""
    seed: int
    """Number of the seed, from 0."""
    mixture: Mixture
    plan: Plan


def candidates(
    files: Sequence[str],
    after: After,
    grid: Mapping[str, Sequence[float]],
    seeds: int,
    overrides: Sequence[str],
) -> list[Candidate]:
    """Return the candidates, or raise all of their problems together."""
    branch = open_branch_point(after)
    after = replace(after, step=branch.step)
    check_checkpoint(after)
    names = _names(files)
    points = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    found: list[Candidate] = []
    errors: list[UserError] = []
    for file, name in zip(files, names, strict=True):
        try:
            draft = read(file, overrides)
            if draft.mixture.after is not None:
                errors.append(_has_after(draft, after))
            _check_grid(grid, draft.source, {*branch.inherited.sources, *draft.mixture.sources})
            for point in points:
                found += _of(file, name, draft, point, seeds, [*overrides, *_words(after)])
        except UserError as error:
            errors.append(error)
    if errors:
        raise SeveralErrors(errors) if len(errors) > 1 else errors[0]
    _check_different(found)
    return found


def _check_different(found: Iterable[Candidate]) -> None:
    first: dict[str, Candidate] = {}
    for each in found:
        if (other := first.setdefault(each.plan.hash, each)) is not each:
            raise MisuseError(
                f"{other.name} and {each.name} have the same plan, and train the same model",
                hint="leave one of them out",
            )


def parse_grid(words: Sequence[str]) -> dict[str, tuple[float, ...]]:
    """Return the shares of each source: `math=0.1,0.2`."""
    grid: dict[str, tuple[float, ...]] = {}
    for word in words:
        name, equals, values = word.partition("=")
        try:
            shares = tuple(float(value) for value in values.split(","))
        except ValueError:
            shares = ()
        if not (name and equals and shares) or not all(0 <= share <= 1 for share in shares):
            raise MisuseError(
                f"--grid {word}: not SOURCE=SHARE,SHARE…",
                hint="give shares from 0 to 1, such as --grid math=0.1,0.2,0.4",
            )
        if name in grid:
            raise MisuseError(f"--grid names {name} twice", hint=f"--grid {name}=0.1,0.2,0.4")
        if len(set(shares)) < len(shares):
            raise MisuseError(f"--grid {word} has a share twice", hint="name each share once")
        grid[name] = shares
    return grid


def _names(files: Sequence[str]) -> list[str]:
    """Return the files' names without folder and ending, or their paths if two names are equal."""
    names = [Path(file).stem for file in files]
    if len(set(files)) < len(files):
        raise MisuseError("one mixture is named twice", where=", ".join(files))
    return names if len(set(names)) == len(names) else list(files)


def _words(after: After) -> list[str]:
    return [f"after.run={after.run}", f"after.step={after.step}"]


def _has_after(draft: Draft, after: After) -> ConfigError:
    what = f"a candidate has none; this one would continue {after.run} at step {after.step}"
    return ConfigError(
        draft.source,
        [Problem("after", what, line_of(draft.lines, ("after",)))],
        hint="leave `after` out: the command fills it in",
    )


def _check_grid(grid: Iterable[str], source: str, known: Collection[str]) -> None:
    if unknown := [name for name in grid if name not in known]:
        raise MisuseError(
            f"--grid names {', '.join(unknown)}, which neither {source} nor the run has",
            hint=f"the sources are {', '.join(sorted(known))}",
        )


def _of(
    file: str,
    name: str,
    draft: Draft,
    point: Mapping[str, float],
    seeds: int,
    overrides: Sequence[str],
) -> Iterator[Candidate]:
    """Yield the candidate of a point of the grid, with each seed."""
    named = " ".join([name, *(f"{source}={share:g}" for source, share in point.items())])
    shares = [
        f"phases.{phase}.weights.{source}={share}"
        for phase, spec in (draft.mixture.phases if point else {}).items()
        for source, share in with_shares(draft.source, phase, spec, point).items()
    ]
    for seed in range(seeds):
        other = [f"seed={draft.mixture.seed + seed}", "after.reshuffle=true"] if seed else []
        made = read(file, [*overrides, *other, *shares])
        yield Candidate(named, seed, made.mixture, resolve_draft(made).plan)


def with_shares(
    source: str, phase: str, spec: PhaseSpec, point: Mapping[str, float]
) -> dict[str, float]:
    """Return the weights of a phase in which the sources of a point have its shares."""
    weights = spec.weights
    path = f"phases.{phase}.weights"
    if not isinstance(weights, dict) or not all(
        isinstance(w, float | int) for w in weights.values()
    ):
        what = "--grid needs weights that are numbers, and do not change over the phase"
        raise ConfigError(source, [Problem(path, what)])
    others = {name: float(w) for name, w in _numbers(weights) if name not in point and w}
    left = UNITS - sum(round(share * UNITS) for share in point.values())
    if left < 0 or (left > 0 and not others):
        total = 1 - left / UNITS
        what = f"the shares of the grid sum to {total:g}, and " + (
            "no other source takes the rest" if left > 0 else "must sum to 1 at most"
        )
        raise ConfigError(source, [Problem(path, what)])
    whole = sum(others.values())
    parts = {name: round(left * share / whole) for name, share in others.items()}
    if parts:  # the largest share takes what rounding leaves
        parts[max(parts, key=lambda name: parts[name])] += left - sum(parts.values())
    fixed = {name: round(share * UNITS) for name, share in point.items()}
    return {name: units / UNITS for name, units in {**parts, **fixed}.items()}


def _numbers(weights: Mapping[str, Weight]) -> Iterator[tuple[str, float]]:
    for name, weight in weights.items():
        assert not isinstance(weight, Mapping)
        yield name, weight
