"""Plans of random and of large mixtures: shares, epochs, hashes, chunking."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.data import random_mixtures
from support.data.plan_data import served, write_head

from headrace.console.errors import ConfigError
from headrace.dataplane.order.plan import Plan
from headrace.dataplane.order.stream import Stream
from headrace.mixtures.lr_shapes import Constant
from headrace.mixtures.mixture_file.mixture import (
    Mixture,
    PhaseSpec,
    SourceSpec,
    endpoints,
    exact_fraction,
)
from headrace.mixtures.planning.resolve_mixture import CHUNK_TOKENS, WINDOW_CHUNKS, resolve


@st.composite
def mixtures(draw, lengths=random_mixtures.LENGTHS):
    """Draw sizes of sources, and a mixture whose sources have no datasets yet."""
    names = ("a", "b", "c", "d")[: draw(st.integers(1, 4))]
    sizes = {name: draw(st.integers(40, 3_000)) for name in names}
    phases = random_mixtures.phases(draw, "p", names, lengths=lengths)
    mixture = Mixture(
        seed=draw(st.integers(0, 9)),
        sources={name: SourceSpec(data=name, max_epochs=200) for name in names},
        phases=phases,
        chunk=draw(st.sampled_from((32, 64, 96, None))),
        window=draw(st.sampled_from((1, 2, 5, None))),
    )
    return sizes, mixture


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """Return a function that plans a case; dataset heads are written once for all cases."""
    folder = tmp_path_factory.mktemp("heads")

    @cache
    def url(name: str, tokens: int) -> str:
        return write_head(str(folder / f"{name}-{tokens}"), tokens)

    def plan(case) -> Plan:
        sizes, mixture = case
        sources = {
            name: replace(spec, data=url(name, sizes[name]))
            for name, spec in mixture.sources.items()
        }
        return resolve(replace(mixture, sources=sources))

    return plan


def asked_shares(mixture: Mixture) -> dict[str, tuple[dict, dict]]:
    """Return, by phase, the shares of the sources at its start and end, from the YAML's decimals.

    Replayed phases are replaced by their sources without the code under test.
    """
    by_phase: dict[str, tuple[dict, dict]] = {}
    for name, phase in mixture.phases.items():
        both: tuple[Counter, Counter] = (Counter(), Counter())
        for key, weight in phase.weights.items():
            for side, value in zip(both, endpoints(weight), strict=True):
                if key in by_phase:
                    for source in mixture.sources:
                        mean = (by_phase[key][0][source] + by_phase[key][1][source]) / 2
                        side[source] += exact_fraction(value) * mean
                else:
                    side[key] += exact_fraction(value)
        by_phase[name] = both
    return by_phase


@given(case=mixtures())
@settings(max_examples=120, deadline=None)
def test_shares_hold_within_a_row_at_every_row(planned, case):
    """Compare with a reference that counts tokens row by row, from the shares of the YAML."""
    _, mixture = case
    plan = planned(case)
    asked = asked_shares(mixture)
    stream = Stream(plan)
    owed = Counter(dict.fromkeys(mixture.sources, Fraction(0)))
    taken: Counter = Counter()
    longest, shrunk, before = 0, False, 0
    for phase in plan.phases:
        length = phase.seq_len
        shrunk, before = shrunk or length < before, length
        longest = max(longest, length)
        first, last = asked[phase.name]
        constant = first == last
        sources = stream.locate(np.arange(phase.first_row, phase.end_row)).sources.tolist()
        for row, source in enumerate(sources):
            taken[plan.sources[source].name] += length
            for name in mixture.sources:
                # A changing share grows linearly from row to row.
                middle = Fraction(2 * row + 1, 2 * phase.rows)
                owed[name] += length * (first[name] + (last[name] - first[name]) * middle)
                # Shorter rows may start with a debt of a longer row; the stretches of a ramp step
                # around its line.
                bound = longest * (1 + shrunk) if constant else 2 * longest * (1 + shrunk)
                assert abs(owed[name] - taken[name]) < bound, (phase.name, row, name)
        if not constant:
            for name in mixture.sources:
                assert abs(owed[name] - taken[name]) < longest * (2 + shrunk)


@given(case=mixtures())
@settings(max_examples=80, deadline=None)
def test_each_token_is_served_once_per_epoch(planned, case):
    sizes, _ = case
    counted = served(planned(case))
    assert max(counted.values()) == 1
    assert all(token < sizes[name] - 1 for name, _, token in counted)


@given(case=mixtures())
@settings(max_examples=60, deadline=None)
def test_a_finished_epoch_lacks_less_than_a_row(planned, case):
    """Whatever the lengths of the phases."""
    sizes, mixture = case
    longest = max(phase.seq_len for phase in mixture.phases.values())
    by_epoch = Counter((name, epoch) for name, epoch, _ in served(planned(case)))
    for (name, epoch), tokens in by_epoch.items():
        if (name, epoch + 1) in by_epoch:
            assert 0 <= sizes[name] - 1 - tokens < longest


@given(case=mixtures())
@settings(max_examples=60, deadline=None)
def test_phases_are_adjacent_and_of_whole_steps(planned, case):
    _, mixture = case
    plan = planned(case)
    for phase, spec in zip(plan.phases, mixture.phases.values(), strict=True):
        assert phase.rows % phase.batch_rows == 0
        step_tokens = phase.batch_rows * phase.seq_len
        difference = abs(phase.tokens - spec.tokens)
        assert phase.tokens == step_tokens or difference <= step_tokens / 2
        assert sum(stretch.rows for stretch in phase.stretches) == phase.rows
    for previous, current in pairwise(plan.phases):
        assert current.first_row == previous.end_row
        assert current.first_step == previous.first_step + previous.steps
        assert current.first_token == previous.first_token + previous.tokens


@given(case=mixtures(), data=st.data())
@settings(max_examples=80, deadline=None)
def test_a_plan_is_refused_exactly_when_it_exceeds_max_epochs(planned, case, data):
    sizes, mixture = case
    caps = {name: data.draw(st.integers(1, 3)) for name in sizes}
    plan = planned(case)
    drawn: dict[str, list[int]] = {name: [] for name in sizes}  # the rows past each cap
    stream = Stream(plan)
    for phase in plan.phases:
        rows = np.arange(phase.first_row, phase.end_row)
        located = stream.locate(rows)
        for row, source, epoch in zip(
            rows.tolist(), located.sources.tolist(), located.epochs.tolist(), strict=True
        ):
            name = plan.sources[source].name
            if epoch >= caps[name]:
                drawn[name].append(row)
    capped = replace(
        mixture,
        sources={
            name: replace(spec, max_epochs=caps[name]) for name, spec in mixture.sources.items()
        },
    )
    if not any(drawn.values()):
        assert planned((sizes, capped)).hash == plan.hash
        return
    with pytest.raises(ConfigError) as caught:
        planned((sizes, capped))
    for name, rows in drawn.items():
        assert (
            (f"{name}: runs dry at row {rows[0]:,}:" in caught.value.message)
            if rows
            else (f"{name}: runs dry" not in caught.value.message)
        )


@given(case=mixtures())
@settings(max_examples=40, deadline=None)
def test_a_saved_plan_is_loaded_back(planned, case, tmp_path_factory):
    plan = planned(case)
    file = tmp_path_factory.mktemp("plan") / "plan.json"
    plan.save(file)
    assert Plan.load(file) == plan
    assert Plan.load(file).hash == plan.hash


@pytest.fixture
def mixture(head):
    return Mixture(
        seed=5,
        sources={
            "web": SourceSpec(data=head("web", 90_000, 10_000)),
            "code": SourceSpec(data=head("code", 50_000)),
        },
        phases={
            "stable": PhaseSpec(
                tokens=32_768, seq_len=64, batch=1_024, weights={"web": 0.75, "code": 0.25}
            ),
            "anneal": PhaseSpec(tokens=8_192, weights={"stable": 1.0}),
        },
    )


def with_phase(mixture: Mixture, **changed) -> Mixture:
    stable = replace(mixture.phases["stable"], **changed)
    return replace(mixture, phases={**mixture.phases, "stable": stable})


def test_settings_outside_the_order_leave_the_hash(mixture, tmp_path):
    plan = resolve(mixture)
    (tmp_path / "web").rename(tmp_path / "mirror")
    moved = replace(
        mixture,
        sources={
            "web": SourceSpec(data=str(tmp_path / "mirror"), max_epochs=9),
            "code": mixture.sources["code"],
        },
    )
    stable, anneal = mixture.phases.values()
    renamed = replace(moved, phases={"one": stable, "two": replace(anneal, weights={"one": 1.0})})
    for variant in (
        moved,
        renamed,
        with_phase(moved, batch=2_048),
        with_phase(moved, lr=Constant(warmup=1_000, peak=0.5)),
        with_phase(moved, weights={"code": 0.25, "web": 0.75}),
        with_phase(moved, tokens=32_800),  # the same number of steps
    ):
        assert resolve(variant).hash == plan.hash


def test_every_change_of_the_order_changes_the_hash(mixture):
    web = mixture.sources["web"]
    variants = [
        replace(mixture, seed=6),
        replace(mixture, isolate_documents=False),
        replace(mixture, window=3),
        replace(mixture, chunk=128),
        replace(mixture, sources={**mixture.sources, "web": replace(web, generations=1)}),
        replace(
            mixture,
            sources={"web": mixture.sources["code"], "code": web},
        ),
        with_phase(mixture, weights={"web": 0.75 + 1e-4, "code": 0.25 - 1e-4}),
        with_phase(
            mixture, weights={"web": {"from": 0.7, "to": 0.8}, "code": {"from": 0.3, "to": 0.2}}
        ),
        with_phase(mixture, seq_len=128),
        with_phase(mixture, tokens=65_536),
    ]
    hashes = {resolve(item).hash for item in variants}
    assert len(hashes) == len(variants)
    assert resolve(mixture).hash not in hashes


def test_a_plan_pins_the_generations_of_its_datasets(mixture, head):
    plan = resolve(mixture)
    head("web", 7_000)
    grown = resolve(mixture)
    assert (plan.sources[0].generations, grown.sources[0].generations) == (2, 3)
    web = replace(mixture.sources["web"], generations=2)
    assert resolve(replace(mixture, sources={**mixture.sources, "web": web})).hash == plan.hash


@pytest.mark.parametrize("tokens", [10_000, 1_000_000, 50_000_000, 10**9, 10**13])
def test_a_window_is_a_small_fraction_of_its_source(head, tokens):
    """A change of sequence length skips at most one window, so never most of a small source."""
    mixture = Mixture(
        sources={"a": SourceSpec(data=head("a", tokens))},
        phases={"p": PhaseSpec(tokens=1_024, seq_len=64, batch=64, weights={"a": 1})},
    )
    order = resolve(mixture).sources[0].order
    assert order.chunk * order.window <= max(tokens / 8, 64)
    assert order.chunk <= CHUNK_TOKENS and order.window <= WINDOW_CHUNKS
    if tokens == 10**13:
        assert (order.chunk, order.window) == (CHUNK_TOKENS, WINDOW_CHUNKS)


def test_a_phase_does_not_shorten_sources_that_it_does_not_draw(head):
    long = PhaseSpec(tokens=640, weights={"web": 1}, seq_len=64, batch=64)
    short = PhaseSpec(tokens=96, weights={"web": 0.5, "tiny": 0.5}, seq_len=8, batch=8)
    sources = {
        name: SourceSpec(data=head(name, size)) for name, size in (("web", 5_000), ("tiny", 50))
    }
    plan = resolve(Mixture(sources=sources, phases={"long": long, "short": short}))
    assert sum(1 for source, *_ in served(plan) if source == "tiny") == 48


def test_ten_trillion_tokens_are_planned_and_located_at_any_row(head):
    """Spot checks, because a walk over all rows would take too long."""
    names = [f"s{number}" for number in range(20)]
    mixture = Mixture(
        sources={name: SourceSpec(data=head(name, 10**12), max_epochs=2) for name in names},
        phases={
            "stable": PhaseSpec(
                tokens=8 * 10**12,
                seq_len=8_192,
                batch=2**24,
                weights=dict.fromkeys(names, 0.05),
            ),
            "anneal": PhaseSpec(tokens=2 * 10**12, weights={"stable": 1}),
        },
    )
    plan = resolve(mixture)
    stream = Stream(plan)
    rows = np.array([0, 1, plan.phases[0].end_row - 1])
    assert stream.locate(rows).epochs.tolist() == [0, 0, 0]
    for row in (0, plan.rows // 3, plan.phases[1].first_row, plan.end_row):
        counts = stream.counts(row)
        assert counts.sum() == row
        assert max(abs(count - row / 20) for count in counts) < 1


SEVEN = {"a": 0.3141593, "b": 0.6858404, "c": 0.0000003}


@pytest.fixture
def seven_decimals(head) -> Mixture:
    """Shares of seven decimals, constant and changing, and rows of two lengths."""
    return Mixture(
        chunk=64,
        window=2,
        sources={name: SourceSpec(data=head(name, 3_000), max_epochs=20) for name in SEVEN},
        phases={
            "one": PhaseSpec(tokens=24_000, seq_len=16, batch=160, weights=dict(SEVEN)),
            "two": PhaseSpec(
                tokens=16_000,
                weights={
                    **SEVEN,
                    "a": 0.4141593,
                    "b": {"from": 0.5858404, "to": 0},
                    "c": {"from": 0.0000003, "to": 0.5858407},
                },
            ),
            "three": PhaseSpec(tokens=16_000, seq_len=32, weights={"two": 1}),
        },
    )


def test_seven_decimals_are_planned_and_kept_at_every_row(seven_decimals, tmp_path):
    plan = resolve(seven_decimals)
    assert plan.fair and not any(plan.debts)
    owed = {name: Fraction(0) for name in SEVEN}
    counts: Counter[str] = Counter()
    asked, stream = asked_shares(seven_decimals), Stream(plan)
    for phase in plan.phases:
        located = stream.locate(np.arange(phase.first_row, phase.end_row))
        first, last = asked[phase.name]
        for row, source in enumerate(located.sources.tolist()):
            counts[plan.sources[source].name] += phase.seq_len
            for name in SEVEN:
                change = (last[name] - first[name]) * Fraction(2 * row + 1, 2 * phase.rows)
                owed[name] += (first[name] + change) * phase.seq_len
                longest_rows = 2 if phase.name == "three" else 1
                assert abs(counts[name] - owed[name]) < longest_rows * phase.seq_len
    assert max(served(plan).values()) == 1, "each token once per epoch"
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan and again.hash == plan.hash
    rows = np.arange(1_500, 1_600)
    assert Stream(again).locate(rows).tokens.tolist() == stream.locate(rows).tokens.tolist()


def test_plans_of_small_tables_keep_their_hash(head):
    mixture = Mixture(
        sources={name: SourceSpec(data=head(name, 3_000)) for name in ("a", "b")},
        phases={
            "p": PhaseSpec(
                tokens=2_048,
                seq_len=16,
                batch=64,
                weights={"a": {"from": 0.75, "to": 0.2}, "b": {"from": 0.25, "to": 0.8}},
            )
        },
    )
    plan = resolve(mixture)
    assert not plan.fair and plan.hash == "3b4662a398dfc04210ec4e7b568036b1"
