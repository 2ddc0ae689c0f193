"""Steps with rows of one length, against counts row by row."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.dataplane.order.plan import Parent, Phase, Plan, PlanSource, Stretch
from headrace.dataplane.order.source_order import SourceOrder
from headrace.dataplane.order.stream import Stream

ROW = 1024
CHUNK = 4 * ROW


def source(name: str) -> PlanSource:
    order = SourceOrder(seed=1, name=name, tokens=64 * CHUNK + 1, chunk=CHUNK, window=4)
    return PlanSource(name=name, url=name, dataset=name, generations=1, max_epochs=99, order=order)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Plans of up to three phases with rows of two lengths, and shares that may end."""
    count = draw(st.integers(2, 5))
    phases: list[Phase] = []
    row = step = token = 0
    for number in range(draw(st.integers(1, 3))):
        batch, length = draw(st.integers(1, 5)), draw(st.sampled_from((ROW, 2 * ROW)))
        stretches = tuple(
            Stretch(
                rows=batch * draw(st.integers(1, 30)),
                weights=tuple(
                    draw(st.lists(st.integers(0, 9), min_size=count, max_size=count).filter(any))
                ),
            )
            for _ in range(draw(st.integers(1, 3)))
        )
        rows = sum(stretch.rows for stretch in stretches)
        phases.append(
            Phase(
                name=f"p{number}",
                first_row=row,
                first_step=step,
                first_token=token,
                rows=rows,
                seq_len=length,
                batch_rows=batch,
                stretches=stretches,
            )
        )
        row, step, token = row + rows, step + rows // batch, token + rows * length
    lengths = draw(st.lists(st.sampled_from((0, 256, 512)), min_size=count, max_size=count))
    plan = Plan(
        seed=1,
        sources=tuple(source(f"s{number}") for number in range(count)),
        phases=tuple(phases),
        tokenizer="t",
        vocab_size=9,
        lengths=tuple(lengths),
    )
    if draw(st.booleans()):  # a fair order, which pays the debts of another run
        debts = draw(st.lists(st.integers(-ROW, ROW), min_size=count - 1, max_size=count - 1))
        whole = tuple(map(Fraction, (*debts, -sum(debts))))
        plan = replace(plan, debts=whole, parent=Parent(hash="0" * 32, row=0))
    return plan


@settings(max_examples=25, deadline=None)
@given(plans())
def test_a_step_has_one_length_and_every_row_is_counted_once(plan: Plan) -> None:
    assignment = Stream(plan).assignment
    sources, draws = assignment.locate(np.arange(plan.rows))
    taken, owed = [0] * len(plan.sources), list(plan.debts or (Fraction(0),) * len(plan.sources))
    starts = dict[int, tuple[int, ...]]()
    for phase in plan.phases:
        row = phase.first_row
        for stretch in phase.stretches:
            shares = [Fraction(weight, sum(stretch.weights)) for weight in stretch.weights]
            for _ in range(stretch.rows):
                index = int(sources[row])
                assert int(draws[row]) == taken[index]
                starts[row] = tuple(taken)
                assert assignment.counts(row).tolist() == taken
                if row % 7 == 0:
                    assert assignment.debts(row) == owed
                taken[index] += 1
                owed = [
                    debt + phase.seq_len * (share - (number == index))
                    for number, (debt, share) in enumerate(zip(owed, shares, strict=True))
                ]
                row += 1
    assert assignment.counts(plan.rows).tolist() == taken
    for number in range(plan.steps):
        step = plan.step(number)
        drawn = sources[step.first_row : step.end_row]
        assert len({plan.lengths[index] for index in drawn.tolist()}) == 1
    for index, count in enumerate(taken):
        rows = assignment.locate_draws(index, np.arange(count + 3))
        assert rows[:count].tolist() == np.flatnonzero(sources == index).tolist()
        assert (rows[count:] == plan.rows).all()


@settings(max_examples=15, deadline=None)
@given(plans())
def test_a_length_is_off_by_less_than_two_steps(plan: Plan) -> None:
    """In tokens of the largest step; a debt that cannot be paid is left out."""
    if plan.debts:
        return
    assignment = Stream(plan).assignment
    largest = max(phase.batch_rows * phase.seq_len for phase in plan.phases)
    for phase in plan.phases:
        for row in range(phase.first_row, phase.end_row, phase.batch_rows):
            debts = assignment.debts(row)
            for length in set(plan.lengths):
                total = sum(
                    debt
                    for debt, of_source in zip(debts, plan.lengths, strict=True)
                    if of_source == length
                )
                assert abs(total) < 2 * largest


def test_the_hash_covers_the_lengths_and_saved_plans_keep_them() -> None:
    stretch = Stretch(rows=8, weights=(1, 1))
    phase = Phase(
        name="p",
        first_row=0,
        first_step=0,
        first_token=0,
        rows=8,
        seq_len=ROW,
        batch_rows=2,
        stretches=(stretch,),
    )
    plain = Plan(
        seed=1, sources=(source("a"), source("b")), phases=(phase,), tokenizer="t", vocab_size=9
    )
    plan = replace(plain, lengths=(256, 0))
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_json(plain.to_json()) == plain
    assert len({plain.hash, plan.hash, replace(plan, lengths=(512, 0)).hash}) == 3


@pytest.mark.parametrize("lengths", [(), (256, 0)])
def test_only_a_plan_with_lengths_sorts_its_steps(lengths: tuple[int, ...]) -> None:
    """The negative control of the property above."""
    stretch = Stretch(rows=64, weights=(1, 1))
    phase = Phase(
        name="p",
        first_row=0,
        first_step=0,
        first_token=0,
        rows=64,
        seq_len=ROW,
        batch_rows=4,
        stretches=(stretch,),
    )
    plan = Plan(
        seed=1,
        sources=(source("a"), source("b")),
        phases=(phase,),
        tokenizer="t",
        vocab_size=9,
        lengths=lengths,
    )
    steps = Stream(plan).assignment.locate(np.arange(64))[0].reshape(-1, 4)
    assert bool((steps == steps[:, :1]).all()) == bool(lengths)
