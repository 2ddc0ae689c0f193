"""Resolve an anneal's candidate mixtures: mixture files × grid shares × seeds.

a.yaml b.yaml × --grid math=0.1,0.2 × --seeds 2   ─►   8 runs of 4 candidates

A candidate continues the run at the step. Seed 0 is the exact continuation. Further seeds serve the
remainder of every source's epoch in other orders, so that their scores show the noise.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...console.errors import ConfigError, ConfigProblem, MisuseError, SeveralErrors, UserError
from ...console.explain import find_line
from ...dataplane.order.plan import Plan
from ...mixtures.mixture_file.mixture import After, Mixture, PhaseSpec
from ...mixtures.mixture_file.tolerant_read import Draft, read
from ...mixtures.planning.branch_point import check_checkpoint, open_branch_point
from ...mixtures.planning.resolve_mixture import resolve_draft

UNITS = 100_000
"""Grid shares are multiples of 1/UNITS: five decimals, as people write them."""


@dataclass(frozen=True)
class MixtureCandidate:
    """A mixture with a seed, and its plan."""

    name: str
    """The file's name, and the grid's shares."""
    seed: int
    """Seed number, from 0; added to the mixture's seed."""
    mixture: Mixture
    plan: Plan


def resolve_candidates(
    files: Sequence[str],
    after: After,
    grid: Mapping[str, Sequence[float]],
    num_seeds: int,
    overrides: Sequence[str],
) -> list[MixtureCandidate]:
    """Return the planned candidates, or raise all files' problems together."""
    branch = open_branch_point(after)
    after = replace(after, step=branch.step)
    check_checkpoint(after)
    names = _candidate_names(files)
    points = [dict(zip(grid, shares, strict=True)) for shares in itertools.product(*grid.values())]
    candidates: list[MixtureCandidate] = []
    errors: list[UserError] = []
    for file, name in zip(files, names, strict=True):
        try:
            draft = read(file, overrides)
            if draft.mixture.after is not None:
                errors.append(_after_error(draft, after))
            _check_grid(grid, draft.source, {*branch.inherited.sources, *draft.mixture.sources})
            continuation = [*overrides, *_after_overrides(after)]
            for point in points:
                candidates += _candidates_at(point, file, name, draft, num_seeds, continuation)
        except UserError as error:
            errors.append(error)
    if errors:
        raise SeveralErrors(errors) if len(errors) > 1 else errors[0]
    _check_distinct(candidates)
    return candidates


def _check_distinct(candidates: Iterable[MixtureCandidate]) -> None:
    by_plan: dict[str, MixtureCandidate] = {}
    for candidate in candidates:
        first = by_plan.setdefault(candidate.plan.learnt_hash, candidate)
        if first is not candidate:
            raise MisuseError(
                f"{first.name} and {candidate.name} have the same plan, and train the same model",
                hint="leave one of them out",
            )


def parse_grid(words: Sequence[str]) -> dict[str, tuple[float, ...]]:
    """Return the shares to try by source, from words such as `math=0.1,0.2`."""
    grid: dict[str, tuple[float, ...]] = {}
    for word in words:
        source, equals, values = word.partition("=")
        try:
            shares = tuple(float(value) for value in values.split(","))
        except ValueError:
            shares = ()
        if not (source and equals and shares) or not all(0 <= share <= 1 for share in shares):
            raise MisuseError(
                f"--grid {word}: not SOURCE=SHARE,SHARE…",
                hint="give shares from 0 to 1, such as --grid math=0.1,0.2,0.4",
            )
        if source in grid:
            raise MisuseError(f"--grid names {source} twice", hint=f"--grid {source}=0.1,0.2,0.4")
        if len(set(shares)) < len(shares):
            raise MisuseError(f"--grid {word} has a share twice", hint="name each share once")
        grid[source] = shares
    return grid


def _candidate_names(files: Sequence[str]) -> list[str]:
    """Return the files' stems, or the files' paths if two stems are equal."""
    stems = [Path(file).stem for file in files]
    if len(set(files)) < len(files):
        raise MisuseError("one mixture is named twice", where=", ".join(files))
    return stems if len(set(stems)) == len(stems) else list(files)


def _after_overrides(after: After) -> list[str]:
    return [f"after.run={after.run}", f"after.step={after.step}"]


def _after_error(draft: Draft, after: After) -> ConfigError:
    message = f"a candidate has none; this one would continue {after.run} at step {after.step}"
    return ConfigError(
        draft.source,
        [ConfigProblem("after", message, find_line(draft.lines, ("after",)))],
        hint="leave `after` out: the command fills it in",
    )


def _check_grid(grid: Iterable[str], file: str, sources: Collection[str]) -> None:
    if unknown := [source for source in grid if source not in sources]:
        raise MisuseError(
            f"--grid names {', '.join(unknown)}, which neither {file} nor the run has",
            hint=f"the sources are {', '.join(sorted(sources))}",
        )


def _candidates_at(
    point: Mapping[str, float],
    file: str,
    name: str,
    draft: Draft,
    num_seeds: int,
    overrides: Sequence[str],
) -> Iterator[MixtureCandidate]:
    """Yield the candidate at a grid point, with each seed."""
    full_name = " ".join([name, *(f"{source}={share:g}" for source, share in point.items())])
    weights = [
        f"phases.{phase}.weights.{source}={share}"
        for phase, spec in (draft.mixture.phases if point else {}).items()
        for source, share in apply_shares(point, phase, spec, file=draft.source).items()
    ]
    for seed in range(num_seeds):
        order = [f"seed={draft.mixture.seed + seed}", "after.reshuffle=true"] if seed else []
        candidate = read(file, [*overrides, *order, *weights])
        yield MixtureCandidate(full_name, seed, candidate.mixture, resolve_draft(candidate).plan)


def apply_shares(
    point: Mapping[str, float], phase: str, spec: PhaseSpec, *, file: str
) -> dict[str, float]:
    """Return the phase's weights with a grid point's shares; they sum to 1.

    The sources outside the grid divide the remainder in proportion to their weights.
    """
    weights = _constant_weights(phase, spec, file)
    remaining_weights = {
        name: weight for name, weight in weights.items() if weight and name not in point
    }
    remainder = UNITS - sum(round(share * UNITS) for share in point.values())
    if remainder < 0 or (remainder > 0 and not remaining_weights):
        message = f"the shares of the grid sum to {1 - remainder / UNITS:g}, and " + (
            "no other source takes the rest" if remainder > 0 else "must sum to 1 at most"
        )
        raise ConfigError(file, [ConfigProblem(f"phases.{phase}.weights", message)])
    total = sum(remaining_weights.values())
    units = {name: round(remainder * weight / total) for name, weight in remaining_weights.items()}
    if units:  # the largest share absorbs the rounding
        largest = max(units, key=lambda name: units[name])
        units[largest] += remainder - sum(units.values())
    units |= {name: round(share * UNITS) for name, share in point.items()}
    return {name: count / UNITS for name, count in units.items()}


def _constant_weights(phase: str, spec: PhaseSpec, file: str) -> dict[str, float]:
    weights = spec.weights
    if isinstance(weights, dict):
        numbers = {name: float(w) for name, w in weights.items() if isinstance(w, float | int)}
        if len(numbers) == len(weights):
            return numbers
    message = "--grid needs weights that are numbers, and do not change over the phase"
    raise ConfigError(file, [ConfigProblem(f"phases.{phase}.weights", message)])
