"""Property tests: runs that continue each other, with any weights, left at any step."""

from __future__ import annotations

import tempfile
from collections import Counter
from fractions import Fraction
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from support.data import random_mixtures
from support.data.plan_data import served, write_head, write_run

from headrace.dataplane.order.plan import Plan
from headrace.mixtures.mixture_file.mixture import After, Mixture, SourceSpec
from headrace.mixtures.planning.resolve_mixture import resolve


@st.composite
def families(draw):
    """Draw the sizes of sources, and runs that continue each other.

    A run has phases, a chunking, the fraction at which it is left (None: at its end), and the
    tokens by which each dataset has grown by then.
    """
    names = ("a", "b", "c")
    growth = draw(st.sampled_from(((0,), (0, 0, 7, 400))))
    sizes = {name: draw(st.integers(300, 3_000)) for name in names}
    runs = []
    replays: tuple[str, ...] = ()
    for number in range(draw(st.integers(2, 4))):
        known = names[: 3 if number else 2]
        phases = random_mixtures.phases(draw, "pqrs"[number], known, replays)
        if draw(st.booleans()):  # a run that does not draw from some sources
            phases = random_mixtures.phases(draw, "pqrs"[number], known[:1])
        runs.append(
            (
                phases,
                {
                    "chunk": draw(st.sampled_from((32, 64, 96, None))),
                    "window": draw(st.integers(1, 3)),
                },
                draw(st.one_of(st.none(), st.floats(0, 1))),
                {name: draw(st.sampled_from(growth)) for name in names},
            )
        )
        replays = tuple(phases)
    return sizes, runs


@settings(max_examples=40, deadline=None)
@given(families())
def test_continued_runs_serve_each_token_once_in_an_epoch(family):
    """None twice; and all tokens of an epoch that has ended, up to less than a row, if no dataset
    grows meanwhile: its new tokens may join an epoch that has just ended."""
    sizes, runs = family
    with tempfile.TemporaryDirectory() as folder:
        urls = {name: write_head(f"{folder}/{name}", tokens) for name, tokens in sizes.items()}
        # Enough epochs for every run: the test is about repeated tokens, not about supply.
        specs = {name: SourceSpec(data=url, max_epochs=99) for name, url in urls.items()}
        after, row = None, 0
        total: Counter = Counter()
        for number, (phases, chunking, where, grown) in enumerate(runs):
            named = specs if number else {name: specs[name] for name in ("a", "b")}
            plan = resolve(Mixture(after=after, sources=named, phases=phases, **chunking))
            assert plan.first_row == row
            assert sum(plan.debts, Fraction(0)) == 0
            assert Plan.from_json(plan.to_json()) == plan
            steps = plan.end_step - plan.first_step
            step = plan.end_step if where is None else plan.first_step + round(where * steps)
            row = plan.end_row if step == plan.end_step else plan.step(step).first_row
            total += served(plan, last=row)
            for source in plan.sources:
                highest = max((t for name, _, t in total if name == source.name), default=0)
                assert highest < sizes[source.name] - 1
            write_run(Path(folder) / str(number), plan)
            after = After(run=f"{folder}/{number}", step=step)
            for name, more in grown.items():
                if more:
                    write_head(urls[name], more)
                    sizes[name] += more
        assert max(total.values(), default=1) == 1
        if not any(more for *_, grown in runs for more in grown.values()):
            epochs = Counter((name, epoch) for name, epoch, _ in total)
            for (name, epoch), tokens in epochs.items():
                if (name, epoch + 1) in epochs:
                    assert sizes[name] - 1 - tokens < max(random_mixtures.LENGTHS)
