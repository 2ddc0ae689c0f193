"""The order of a run that decided shares while it ran, beside a walk over all rows."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.dataplane.order.plan import Decision, Phase, Plan, PlanSource, Stretch
from headrace.dataplane.order.source_order import SourceOrder
from headrace.dataplane.order.steered import SteeredOrder, decided_phases
from headrace.dataplane.order.stream import Stream

LENGTHS = (8, 16, 32)


def draw_weights(draw: st.DrawFn, count: int) -> tuple[int, ...]:
    weights = [draw(st.sampled_from((0, 1, 1, 3, 50, 997))) for _ in range(count)]
    return tuple(weights) if any(weights) else (1, *weights[1:])


def planned(phases: list[Phase], num_sources: int) -> Plan:
    sources = tuple(
        PlanSource(
            name=f"s{number}",
            url="",
            dataset=str(number),
            generations=1,
            max_epochs=9999,
            order=SourceOrder(seed=1, name=f"s{number}", tokens=2500, chunk=64, window=3),
        )
        for number in range(num_sources)
    )
    return Plan(seed=1, sources=sources, phases=tuple(phases), tokenizer="test", vocab_size=9)


@st.composite
def steered_plans(draw: st.DrawFn) -> Plan:
    """Draw a plan of several phases, and decisions at steps of it."""
    num_sources = draw(st.integers(1, 5))
    phases: list[Phase] = []
    row = step = token = 0
    for number in range(draw(st.integers(1, 3))):
        batch, steps, length = draw(st.integers(1, 4)), draw(st.integers(1, 60)), LENGTHS[number]
        if draw(st.booleans()):
            length = draw(st.sampled_from(LENGTHS))
        start = draw_weights(draw, num_sources)
        stretch = Stretch(rows=batch * steps, weights=start)
        if draw(st.integers(0, 3)) == 0:
            stretch = replace(stretch, to=start[::-1])
        phases.append(
            Phase(
                name=f"p{number}", first_row=row, first_step=step, first_token=token,
                rows=batch * steps, seq_len=length, batch_rows=batch, stretches=(stretch,),
            )
        )  # fmt: skip
        row, step, token = row + batch * steps, step + steps, token + batch * steps * length
    plan = planned(phases, num_sources)
    steps_with_decisions = draw(st.sets(st.integers(0, step - 1), max_size=8))
    decisions = tuple(
        Decision(
            row=plan.step(number).first_row,
            weights=draw_weights(draw, num_sources),
            digest=f"{number:032x}",
        )
        for number in sorted(steps_with_decisions)
    )
    return replace(plan, decisions=decisions)


def walk_shares(plan: Plan) -> list[list[Fraction]]:
    """Return the share of each source by row, from the phases and the decisions."""
    shares: list[list[Fraction]] = []
    for phase in plan.phases:
        [stretch] = phase.stretches
        for row in range(phase.first_row, phase.end_row):
            result = [d for d in plan.decisions if phase.first_row <= d.row <= row]
            if result:
                weights = [Fraction(weight) for weight in result[-1].weights]
            else:
                middle = Fraction(2 * (row - phase.first_row) + 1, 2 * phase.rows)
                ends = zip(stretch.weights, stretch.to or stretch.weights, strict=True)
                weights = [start + (end - start) * middle for start, end in ends]
            shares.append([weight / sum(weights) for weight in weights])
    return shares


@settings(deadline=None, max_examples=40)
@given(steered_plans())
def test_random_decisions_keep_each_source_within_two_rows(plan: Plan) -> None:
    """At every row; draws are counted without a gap, and all inverses agree."""
    stream, rows = Stream(plan), np.arange(plan.rows)
    sources, draws = stream.assignment.locate(rows)
    lengths = [phase.seq_len for phase in plan.phases for _ in range(phase.rows)]
    longest = list(accumulate(lengths, max))
    owed = [Fraction(0)] * len(plan.sources)
    taken = [0] * len(plan.sources)
    if plan.decisions:
        assert isinstance(stream.assignment, SteeredOrder)
        order = stream.assignment
        written_off = {
            decision.row: order.written_off(number)
            for number, decision in enumerate(plan.decisions, 1)
        }
    else:
        written_off = {}
    for row, shares in enumerate(walk_shares(plan)):
        assert stream.debts(row) == owed
        assert stream.counts(row).tolist() == taken
        assert np.abs(stream.approximate_counts(row) - taken).max() <= 1
        if row in written_off:
            owed = [debt - lost for debt, lost in zip(owed, written_off[row], strict=True)]
            assert all(not lost or abs(debt) == longest[row]
                       for debt, lost in zip(owed, written_off[row], strict=True))  # fmt: skip
        source = int(sources[row])
        assert draws[row] == taken[source]
        taken[source] += 1
        owed = [debt + share * lengths[row] for debt, share in zip(owed, shares, strict=True)]
        owed[source] -= lengths[row]
        assert max(map(abs, owed)) < 2 * longest[row]
    # Decisions that say how many rows came before give the same order, without earlier legs.
    counted = [tuple(stream.counts(decision.row).tolist()) for decision in plan.decisions]
    pairs = zip(plan.decisions, counted, strict=True)
    decisions = tuple(replace(decision, before=before) for decision, before in pairs)
    again = Stream(replace(plan, decisions=decisions))
    assert again.debts(plan.end_row) == owed
    if decisions:
        assert isinstance(again.assignment, SteeredOrder)
        lengths_in_legs = [phase.seq_len for phase in plan.phases]
        assert len(set(lengths_in_legs)) > 1 or len(again.assignment._legs) <= 2
    for known, located in zip(again.assignment.locate(rows), (sources, draws), strict=True):
        assert np.array_equal(known, located)
    for source, count in enumerate(taken):
        its_rows = rows[sources == source]
        numbers = np.arange(count + 2)
        expected = [*its_rows.tolist(), plan.rows, plan.rows]
        assert stream.assignment.locate_draws(source, numbers).tolist() == expected


@settings(deadline=None, max_examples=40)
@given(steered_plans(), st.randoms())
def test_a_decision_changes_no_row_before_it(plan: Plan, random: object) -> None:
    def located(decisions: tuple[Decision, ...]) -> list[tuple[int, int, int]]:
        stream = Stream(replace(plan, decisions=decisions))
        result = []
        for phase in plan.phases:
            part = stream.locate(np.arange(phase.first_row, phase.end_row))
            result += zip(
                *(x.tolist() for x in (part.sources, part.epochs, part.tokens)), strict=True
            )
        return result

    whole = located(plan.decisions)
    for number, decision in enumerate(plan.decisions):
        before = located(plan.decisions[:number])
        assert before[: decision.row] == whole[: decision.row]


def test_tokens_are_served_once_by_epoch_through_decisions(changing: Plan) -> None:
    """In a plan whose rows change their length, and are found by their tokens."""
    step = changing.phases[1].first_step + 1
    weights = ((1, 2), (5, 0))
    decisions = tuple(
        Decision(row=changing.step(at).first_row, weights=shares, digest="00" * 16)
        for at, shares in zip((3, step), weights, strict=True)
    )
    plan = replace(changing, decisions=decisions)
    assert plan.hash == changing.hash
    stream, seen = Stream(plan), set[tuple[int, int, int]]()
    for phase in plan.phases:
        located = stream.locate(np.arange(phase.first_row, phase.end_row))
        for index, row in enumerate(located.rows.tolist()):
            source, epoch = int(located.sources[index]), int(located.epochs[index])
            for first, end in located.spans(index):
                places = {(source, epoch, token) for token in range(first, end)}
                assert not places & seen
                seen |= places
                if row % 50 == 0:
                    _, rows = stream.find_rows(source, np.array([first]), np.array([end]))
                    assert row in rows
    assert plan.decision_digest(decisions[1].row) == bytes(16)
    assert plan.decision_digest(decisions[1].row + 1) == b""


def test_decided_phases_have_a_stretch_for_each_decision(two_phases: Plan) -> None:
    row = two_phases.step(2).first_row
    decision = Decision(row=row, weights=(1, 1, 2), digest="00" * 16)
    first, second = decided_phases(replace(two_phases, decisions=(decision,)))
    assert [stretch.rows for stretch in first.stretches] == [row, two_phases.phases[0].rows - row]
    assert first.stretches[1].weights == (1, 1, 2)
    assert second == two_phases.phases[1]
    assert first.rows == two_phases.phases[0].rows


def test_what_a_decision_cannot_carry_is_written_off() -> None:
    """Decisions at each row that leave out the source just served: the others' debts add up."""
    names = 14
    phase = Phase(
        name="p", first_row=0, first_step=0, first_token=0, rows=names, seq_len=8, batch_rows=1,
        stretches=(Stretch(rows=names, weights=(1,) * names),),
    )  # fmt: skip
    plan, served = planned([phase], names), set[int]()
    for row in range(1, names):
        served.add(int(Stream(plan).assignment.locate(np.array([row - 1]))[0][0]))
        weights = tuple(int(source not in served) for source in range(names))
        if not any(weights):
            break
        decision = Decision(row=row, weights=weights, digest=f"{row:032x}")
        plan = replace(plan, decisions=(*plan.decisions, decision))
    stream = Stream(plan)
    assert isinstance(stream.assignment, SteeredOrder)
    lost = [max(map(abs, stream.assignment.written_off(n + 1))) for n in range(names - 2)]
    assert max(lost) > 0
    assert max(abs(debt) for row in range(names) for debt in stream.debts(row)) < 16


@pytest.mark.parametrize("row", [0, 40])
def test_the_first_rows_may_be_decided(two_phases: Plan, row: int) -> None:
    decision = Decision(row=row, weights=(0, 0, 1), digest="00" * 16)
    stream = Stream(replace(two_phases, decisions=(decision,)))
    first = two_phases.phases[0]
    counts = stream.counts(first.end_row) - stream.counts(row)
    assert counts[2] >= first.rows - row - 2
