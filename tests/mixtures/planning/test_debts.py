"""Debts of sources over changes of the row length and over branches, in exact fractions.

The oracle reads the mixtures: it resolves replays and shares itself, and walks over all rows of all
runs from row 0 on.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.data.plan_data import write_head, write_run

from headrace.dataplane.order.fair.eras import Eras
from headrace.dataplane.order.plan import Plan
from headrace.dataplane.order.stream import Stream
from headrace.mixtures.mixture_file.mixture import After, Mixture, PhaseSpec, SourceSpec
from headrace.mixtures.planning.branch_point import open_branch_point
from headrace.mixtures.planning.resolve_mixture import resolve
from headrace.mixtures.view.debts import find_worst_debt
from headrace.mixtures.view.summary import summarize
from headrace.mixtures.view.table import format_table

NAMES = tuple("abcdefgh")
LENGTHS = ([512, 1024], [512, 1024, 2048], [8, 1024], [700, 1000, 1500], [64])
Shares = dict[str, Fraction]


@dataclass
class Run:
    """A mixture, its plan, and the row at which the next run continues it."""

    mixture: Mixture
    plan: Plan
    end_row: int


def draw_shares(rng: random.Random, names: list[str], decimals: int) -> dict[str, str]:
    """Draw shares that sum to 1 as decimals, some of them 0, some tiny."""
    sizes = [rng.choice((0, 1, rng.random(), rng.random() ** 6)) for _ in names]
    sizes[rng.randrange(len(sizes))] = 1
    whole = 10**decimals
    units = [int(size / sum(sizes) * whole) for size in sizes]
    units[units.index(max(units))] += whole - sum(units)
    return {name: f"{unit / whole:.{decimals}f}" for name, unit in zip(names, units, strict=True)}


def draw_weights(rng: random.Random, names: list[str], decimals: int) -> dict[str, Any]:
    first = draw_shares(rng, names, decimals)
    if rng.random() < 0.7:
        return {name: float(share) for name, share in first.items()}
    last = draw_shares(rng, names, decimals)
    return {name: {"from": float(first[name]), "to": float(last[name])} for name in names}


def draw_runs(seed: int, folder: Path) -> list[Run]:
    """Draw a run, and runs that continue each other at any step: 2 to 40 phases together."""
    rng = random.Random(seed)
    names = list(NAMES[: rng.choice((1, 2, 3, 4, 6, 8))])
    sources = {
        name: SourceSpec(data=write_head(str(folder / name), 10**8), max_epochs=99)
        for name in names
    }
    lengths, decimals = rng.choice(LENGTHS), rng.choice((5, 9))
    longest_phase = rng.choice((3, 40, 150))
    num_runs = rng.choice((1, 1, 2, 4))
    runs: list[Run] = []
    replayed: list[str] = []
    step = 0
    for number in range(num_runs):
        phases = {}
        for phase in range(rng.randint(2, 40 // num_runs)):
            length = rng.choice(lengths)
            rows = rng.randint(1, longest_phase)
            known = rng.sample(names, rng.randint(1, len(names)))
            if replayed and rng.random() < 0.3:
                known.append(rng.choice(replayed))
            phases[f"p{number}-{phase}"] = PhaseSpec(
                tokens=length * rows,
                weights=draw_weights(rng, known, decimals),
                seq_len=length,
                batch=length * min(rows, rng.choice((1, 1, 2, 7))),
            )
            replayed.append(f"p{number}-{phase}")
        after = After(run=str(folder / f"run{number - 1}"), step=step) if number else None
        mixture = Mixture(sources=sources, phases=phases, after=after)
        plan = resolve(mixture)
        write_run(folder / f"run{number}", plan)
        step = rng.randint(plan.first_step, plan.end_step)
        last = number == num_runs - 1 or step == plan.end_step
        runs.append(Run(mixture, plan, plan.end_row if last else plan.step(step).first_row))
    return runs


def written_shares(phase: PhaseSpec, averages: dict[str, Shares]) -> list[Shares]:
    """Return the shares at the start and at the end of a phase, from its text."""
    sides = []
    for side in ("from", "to"):
        shares = dict.fromkeys(NAMES, Fraction(0))
        assert isinstance(phase.weights, dict)
        for name, weight in phase.weights.items():
            share = Fraction(repr(weight[side] if isinstance(weight, dict) else weight))
            for source, part in averages.get(name, {name: Fraction(1)}).items():
                shares[source] += share * part
        total = sum(shares.values())
        sides.append({name: share / total for name, share in shares.items()})
    return sides


def walk(runs: list[Run]) -> Iterator[tuple[int, Fraction, bool, dict[str, Fraction]]]:
    """Yield, after each row, its number, how far the furthest source is off in longest rows, and
    whether a change of length or a branch came before; and how far each source is behind, at the
    end of the phase before."""
    off, longest, changed = dict.fromkeys(NAMES, Fraction(0)), 0, False
    averages: dict[str, Shares] = {}
    for run in runs:
        stream, names = Stream(run.plan), [source.name for source in run.plan.sources]
        changed |= run is not runs[0]
        for phase in run.plan.phases:
            first, last = written_shares(run.mixture.phases[phase.name], averages)
            averages[phase.name] = {name: (first[name] + last[name]) / 2 for name in NAMES}
            rows = np.arange(phase.first_row, min(phase.end_row, run.end_row))
            if not len(rows):
                continue
            changed |= longest not in (0, phase.seq_len)
            longest = max(longest, phase.seq_len)
            changes = [(last[name] - first[name]) / (2 * phase.rows) for name in names]
            starts = [first[name] for name in names]
            # In integers, as multiples of 1 / unit.
            unit = lcm(*(value.denominator for value in (*starts, *changes, *off.values())))
            tokens = phase.seq_len * unit
            behind = [int(off[name] * unit) for name in names]
            gains = [int(start * tokens) for start in starts]
            more = [int(change * tokens) for change in changes]
            sources, _ = stream.assignment.locate(rows - run.plan.first_row)
            for place, source in enumerate(sources.tolist()):
                for index in range(len(names)):
                    behind[index] += gains[index] + more[index] * (2 * place + 1)
                behind[source] -= tokens
                furthest = max(map(abs, behind))
                yield phase.first_row + place + 1, Fraction(furthest, longest * unit), changed, off
            for name, value in zip(names, behind, strict=True):
                off[name] = Fraction(value, unit)


def check(runs: list[Run]) -> None:
    """Check that each source is off by less than a longest row before the first change of length
    and branch, and by less than two after it."""
    for row, off, changed, _ in walk(runs):
        assert off < (2 if changed else 1), f"row {row} of {runs[-1].plan.hash}: {float(off)} rows"


@pytest.mark.parametrize("seed", range(25))
def test_no_change_and_no_branch_adds_to_a_debt(seed: int, tmp_path: Path) -> None:
    check(draw_runs(seed, tmp_path))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(25, 200))
def test_no_change_and_no_branch_adds_to_a_debt_in_many_plans(seed: int, tmp_path: Path) -> None:
    check(draw_runs(seed, tmp_path))


def alternating(folder: Path, num_phases: int) -> Run:
    """Plan four sources of seven decimals, with rows of 1,024 and 512 tokens in turn."""
    weights = {"a": 0.6123412, "b": 0.2111117, "c": 0.1234567, "d": 0.0530904}
    rng = random.Random(1)
    mixture = Mixture(
        sources={
            name: SourceSpec(data=write_head(str(folder / name), 10**8), max_epochs=9)
            for name in weights
        },
        phases={
            f"p{number}": PhaseSpec(
                tokens=rng.randrange(40, 90) * 1024,
                seq_len=(1024, 512)[number % 2],
                batch=1024,
                weights=dict(weights),
            )
            for number in range(num_phases)
        },
    )
    plan = resolve(mixture)
    return Run(mixture, plan, plan.end_row)


def test_debts_that_are_written_off_add_up(tmp_path: Path) -> None:
    """The negative control: eras that pay no debts."""
    run = alternating(tmp_path, 24)
    assert max(off for _, off, *_ in walk([run])) < Fraction(6, 5)
    none = (Fraction(0),) * len(run.plan.sources)
    unpaid = Eras(
        run.plan.lines(), none, pays_debts=False, load=lambda number, owed, compute: compute()
    )
    assert max(map(abs, unpaid.debts(unpaid.rows))) > 2 * 1024


@pytest.mark.parametrize("seed", [2, 7])
def test_debts_of_the_plan_are_those_of_a_walk(seed: int, tmp_path: Path) -> None:
    runs = draw_runs(seed, tmp_path)
    *_, (_, _, _, off) = walk(runs)
    run = runs[-1]
    names = [source.name for source in run.plan.sources]
    assert Stream(run.plan).debts(run.end_row) == [off[name] for name in names]


def debts_by_name(plan: Plan, row: int) -> Shares:
    names = [source.name for source in plan.sources]
    return dict(zip(names, Stream(plan).debts(row), strict=True))


def test_debts_of_sources_that_a_branch_never_draws_from_are_kept(tmp_path: Path) -> None:
    """They are not paid meanwhile, and a later branch that draws from the source pays them."""
    plan = alternating(tmp_path, 3).plan
    step = plan.end_step - 3
    debts = debts_by_name(plan, plan.step(step).first_row)
    write_run(tmp_path / "run", plan)
    after = After(run=str(tmp_path / "run"), step=step)
    phase = PhaseSpec(tokens=90 * 1024, seq_len=1024, batch=1024, weights={"b": 0.6, "c": 0.4})
    branch = resolve(Mixture(after=after, phases={"x": phase}))
    assert debts_by_name(branch, branch.first_row) == debts and all(debts.values())
    ended = debts_by_name(branch, branch.end_row)
    assert (ended["a"], ended["d"]) == (debts["a"], debts["d"])
    opened = open_branch_point(after)
    summary = summarize(Stream(branch), opened)
    assert summary.continues is not None
    unpaid = {source.source: source.unpaid for source in summary.continues.sources}
    assert unpaid == {"a": round(debts["a"]), "b": 0, "c": 0, "d": round(debts["d"])}
    assert "does not draw from: a " in format_table(summary)
    write_run(tmp_path / "branch", branch)
    after = After(run=str(tmp_path / "branch"), step=branch.end_step)
    last = resolve(Mixture(after=after, phases={"y": PhaseSpec(tokens=2**20, weights={"p0": 1})}))
    assert max(map(abs, Stream(last).debts(last.end_row))) < 1024


@pytest.mark.parametrize("seed", [7, 11, 20])
def test_the_worst_debt_is_that_of_a_walk(seed: int, tmp_path: Path) -> None:
    (run,) = draw_runs(seed, tmp_path)
    worst = find_worst_debt(Stream(run.plan))
    off, row = max((off, -row) for row, off, *_ in walk([run]))
    assert (worst.longest_rows, worst.rows_examined) == (pytest.approx(float(off)), run.plan.rows)
    debts = debts_by_name(run.plan, worst.row)
    assert float(debts[worst.source]) == worst.tokens
    assert worst.row == -row
    text = format_table(summarize(Stream(run.plan)))
    direction = "behind" if worst.tokens > 0 else "ahead"
    assert f"worst debt: {worst.source} is {abs(round(worst.tokens)):,} tokens {direction}" in text
