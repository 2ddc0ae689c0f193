from __future__ import annotations

from contextlib import closing
from itertools import chain

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.dataplane.loader.rank_rows import TOKEN_ARRAY_BYTES, RankReader, RankRows
from headrace.dataplane.order.plan import Plan


def rows_of(
    plan: Plan, *, rank: int = 0, world: int = 1, start: int = 0, room: int = 0
) -> RankRows:
    return RankRows(
        plan=plan, rank=rank, world=world, start_step=start, digests=True, group_bytes=room
    )


@given(
    world=st.integers(1, 64), part=st.floats(0, 1, exclude_max=True), room=st.integers(0, 40_000)
)
@settings(max_examples=30)
def test_ranks_cover_every_step_in_groups_that_fit(
    two_phases: Plan, world: int, part: float, room: int
) -> None:
    plan, start = two_phases, int(part * two_phases.end_step)
    ranks = [rows_of(plan, rank=r, world=world, start=start, room=room) for r in range(world)]
    for rank_rows in ranks:
        groups = list(rank_rows.groups())
        assert [*chain.from_iterable(g.steps for g in groups)] == [*range(start, plan.end_step)]
        for group in groups:
            assert all(plan.step(number).phase is group.phase for number in group.steps)
            assert len(group.rows()) == len(group)
            size = len(group) * (group.phase.seq_len + 1) * TOKEN_ARRAY_BYTES
            assert size <= room or len(group.steps) == 1
    alone = [rows_of(plan, rank=r, world=world, start=start).groups() for r in range(world)]
    for number, *groups in zip(range(start, plan.end_step), *alone, strict=True):
        step, rows = plan.step(number), [group.rows() for group in groups]
        assert np.array_equal(
            np.concatenate(rows), np.arange(step.first_row, step.first_row + step.rows)
        )
        assert max(map(len, rows)) - min(map(len, rows)) <= 1


def test_a_group_holds_the_rows_of_its_steps_in_order(two_phases: Plan) -> None:
    """Equal to steps read alone."""
    alone = rows_of(two_phases, rank=1, world=3)
    together = rows_of(two_phases, rank=1, world=3, room=20_000)
    groups = list(together.groups())
    assert max(len(group.steps) for group in groups) > 3
    with closing(RankReader(alone)) as reader:
        singles = {read.step_group.steps[0]: read for read in reader.groups()}
    with closing(RankReader(together)) as reader:
        for group, read in zip(groups, reader.groups(), strict=True):
            steps = [singles[number] for number in group.steps]
            assert read.step_group == group
            length = read.arrays.weights.shape[1]
            for name in ("tokens", "weights"):
                parts = [getattr(step.arrays, name) for step in steps]
                assert np.array_equal(getattr(read.arrays, name), np.concatenate(parts))
            digests = [digest for step in steps for digest in step.labels.digests]
            assert read.labels.digests == digests
            rows, bounds = 0, {0}
            for step in steps:
                bounds |= {rows * length + place for place in step.labels.boundaries.tolist()}
                rows += len(step.labels.rows)
            assert read.labels.boundaries.tolist() == sorted(bounds)
