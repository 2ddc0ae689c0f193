"""Weights that follow from the sizes of the sources, within max_epochs."""

from __future__ import annotations

import random
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.data.plan_data import write_head, write_run

from headrace.console.errors import ConfigError, PlanError
from headrace.dataplane.order.plan import Plan
from headrace.dataplane.order.stream import Stream
from headrace.mixtures.mixture_file.mixture import After, Mixture, PhaseSpec, SourceSpec
from headrace.mixtures.mixture_file.tolerant_read import Draft
from headrace.mixtures.planning import supply
from headrace.mixtures.planning.resolve_mixture import resolve, resolve_draft
from headrace.mixtures.planning.size_weights import UNITS, size_weights
from headrace.mixtures.view.summary import Summary, summarize
from headrace.mixtures.view.table import format_table, json_data


def level(shares: dict[str, float], max_rows: dict[str, float], rows: int) -> float:
    """Return x such that the sum of min(x * share, max_rows) is `rows`, by bisection."""
    low, high = 0.0, 1e24
    for _ in range(200):
        middle = (low + high) / 2
        filled = sum(min(middle * shares[name], max_rows[name]) for name in shares)
        low, high = (middle, high) if filled < rows else (low, middle)
    return high


@given(
    st.lists(
        st.tuples(st.integers(100, 10**9), st.integers(1, 2_000_000)), min_size=1, max_size=12
    ),
    st.sampled_from([0.3, 0.7, 1.0, 1.5, 5.0]),
)
@settings(max_examples=60, deadline=None)
def test_shares_are_proportional_up_to_what_each_source_has_left(sources, temperature):
    rows = 1_000_000
    sizes = {f"s{number}": size for number, (size, _) in enumerate(sources)}
    max_rows = {f"s{number}": Fraction(limit) for number, (_, limit) in enumerate(sources)}
    if sum(max_rows.values()) < rows:
        with pytest.raises(PlanError):
            size_weights("p", sizes, temperature, rows, max_rows)
        return
    weights = size_weights("p", sizes, temperature, rows, max_rows)
    assert sum(weights.shares.values()) == 1
    expected = {
        name: (size / max(sizes.values())) ** (1 / temperature) for name, size in sizes.items()
    }
    x = level(expected, max_rows, rows)
    for name, share in weights.shares.items():
        assert 0 < share * rows <= max_rows[name]
        # Sources that are rounded up to one unit are paid for by the others, a unit each.
        fair = min(x * expected[name], float(max_rows[name]))
        assert abs(float(share * rows) - fair) < (len(sizes) + 1) * rows / UNITS
        if name in weights.limited:
            assert share * rows == max_rows[name], "exactly what it has left"
            asked = expected[name] / sum(expected.values()) * rows
            assert weights.left_out[name] == max(0, round(asked - float(max_rows[name])))
    assert weights.limited or all(
        (share * UNITS).denominator == 1 for share in weights.shares.values()
    )


@pytest.fixture
def planned(head):
    """Return a function that plans phases over three sources of 800, 150 and 50 thousand tokens."""
    sizes = {"web": 800_000, "code": 150_000, "math": 50_000}
    urls = {name: head(name, size) for name, size in sizes.items()}

    def plan(*phases, **most_epochs) -> Summary:
        specs = {
            name: SourceSpec(data=url, max_epochs=most_epochs.get(name, 1))
            for name, url in urls.items()
        }
        named = {f"p{number}": phase for number, phase in enumerate(phases)}
        return summarize(resolve_draft(Draft(Mixture(sources=specs, phases=named), "m")))

    return plan


def phase(tokens, weights, **options) -> PhaseSpec:
    return PhaseSpec(tokens=tokens, weights=weights, seq_len=64, batch=1024, **options)


def shares(summary: Summary, number: int = 0) -> list[float]:
    return [round(use.share_asked, 5) for use in summary.phases[number].sources]


def test_proportional_and_temperature(planned):
    assert shares(planned(phase(500_000, "proportional"))) == [0.8, 0.15, 0.05]
    total = 800**0.5 + 150**0.5 + 50**0.5
    summary = planned(phase(100_000, {"temperature": 2.0}))
    assert shares(summary) == pytest.approx(
        [size**0.5 / total for size in (800, 150, 50)], abs=1e-5
    )
    assert (
        "The shares are proportional to the sizes of the sources to the power of 1/2."
        in format_table(summary)
    )
    sharper = shares(planned(phase(100_000, {"temperature": 0.7})))
    assert sharper[0] > 0.8 and sharper[2] < 0.05


def test_a_source_that_would_exceed_its_epochs_is_limited(planned):
    """Equal shares by a high temperature would need 6.7 epochs of math."""
    flat = {"temperature": 1e6}
    with pytest.raises(ConfigError, match="runs dry"):  # the same shares, written down
        planned(phase(600_000, {"web": 0.33334, "code": 0.33333, "math": 0.33333}))
    summary = planned(phase(600_000, flat))
    web, code, math = summary.phases[0].sources
    assert 0.97 < math.stands_at <= 1 and 0.97 < code.stands_at <= 1
    assert web.share_asked == pytest.approx(1 - code.share_asked - math.share_asked)
    assert "max_epochs limits code, math" in format_table(summary)
    more = planned(phase(600_000, flat), math=2).phases[0].sources
    assert 1.97 < more[2].stands_at <= 2


def test_later_phases_get_what_earlier_ones_have_left(planned):
    summary = planned(
        phase(100_000, {"math": 0.3, "web": 0.7}),
        phase(300_000, {"temperature": 1e6}),
        PhaseSpec(tokens=300_000, seq_len=128, weights="proportional"),
        code=2,
    )
    assert summary.phases[2].weights_rule.endswith("max_epochs limits math")
    assert summary.phases[2].sources[2].share_asked == 0, "all of it is used up"
    assert all(use.stands_at <= 2 for use in summary.total)
    assert summary.total[2].stands_at <= 1
    assert summary.phases[0].weights_rule == ""


def test_too_few_tokens_are_refused(planned):
    with pytest.raises(PlanError, match="they can fill"):
        planned(phase(2_000_000, "proportional"))
    with pytest.raises(ConfigError, match="must be above 0"):
        planned(phase(100_000, {"temperature": 0.0}))


def test_a_source_may_be_called_temperature(head):
    specs = {"temperature": SourceSpec(data=head("temperature", 100_000))}
    mixture = Mixture(sources=specs, phases={"p": phase(50_000, {"temperature": 1.0})})
    summary = summarize(resolve_draft(Draft(mixture, "m")))
    assert summary.phases[0].weights_rule == ""


def draw_rule(rng: random.Random, head, folder, lengths) -> tuple[list[Plan], dict[str, int]]:
    """Draw a run of explicit phases and of rules that use up some sources, maybe over a branch."""
    unit = max(lengths)
    sizes = {name: rng.randint(unit, 40 * unit) + 1 for name in "abcd"}
    sizes |= {"a": rng.randint(2 * unit, 8 * unit), "big": 400 * unit + 1}
    specs = {
        name: SourceSpec(data=head(f"{name}", size), max_epochs=1) for name, size in sizes.items()
    }
    plans, after = [], None
    for number in range(rng.choice((1, 2))):
        phases = {}
        for phase in range(rng.choice((0, 1, 3)) if not number else 1):
            length = rng.choice(lengths)
            tokens = length * rng.randint(1, max(1, unit // length))
            phases[f"x{number}{phase}"] = PhaseSpec(
                tokens=tokens,
                seq_len=length,
                batch=length,
                weights={"big": 1.0} if number else {"a": 0.34567, "big": 0.65433},
            )
        length = rng.choice(lengths)
        phases[f"rule{number}"] = PhaseSpec(
            tokens=rng.randint(60, 100) * unit,
            seq_len=length,
            batch=length,
            weights={"temperature": rng.choice((20.0, 1e6))},
        )
        if rng.random() < 0.5:
            phases[f"y{number}"] = PhaseSpec(tokens=20 * unit, weights={"big": 1.0})
        plans.append(resolve(Mixture(sources=specs, phases=phases, after=after)))
        write_run(folder / str(number), plans[-1])
        after = After(run=str(folder / str(number)), step=plans[-1].end_step)
    return plans, sizes


def write_heads(folder, name, size) -> str:
    return write_head(f"{folder}/{name}", size)


def check_used_up(plans: list[Plan], sizes: dict[str, int]) -> None:
    """Check that served and left over are a limited source's tokens, up to less than a row of the
    first rule that limits it."""
    served = dict.fromkeys(sizes, 0)
    row_tokens: dict[str, int] = {}
    for plan in plans:
        stream, names = Stream(plan), [source.name for source in plan.sources]
        for phase in plan.phases:
            rows = np.arange(phase.first_row, phase.end_row) - plan.first_row
            counts = np.bincount(stream.assignment.locate(rows)[0], minlength=len(names))
            for name, count in zip(names, counts.tolist(), strict=True):
                served[name] += count * phase.seq_len
            for name in phase.left_out:
                row_tokens.setdefault(name, phase.seq_len)
    assert row_tokens, "no source is limited"
    for name, length in row_tokens.items():
        assert 0 <= sizes[name] - 1 - served[name] < length, name


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("lengths", [(64, 256), (1 << 16, 1 << 20)], ids=["short", "long"])
def test_a_rule_gives_all_that_a_limited_source_has_left(seed, lengths, head, tmp_path):
    check_used_up(*draw_rule(random.Random(seed), head, tmp_path, lengths))


def test_a_row_that_is_kept_back_is_noticed(tmp_path, monkeypatch):
    """Negative control."""
    monkeypatch.setattr(supply, "ROUNDING", Fraction(1))
    lengths = (64, 256)
    with pytest.raises(AssertionError):
        for seed in range(8):
            folder = tmp_path / str(seed)
            head = partial(write_heads, folder)
            check_used_up(*draw_rule(random.Random(seed), head, folder, lengths))


def test_what_a_rule_leaves_out_is_printed(head):
    """At a million tokens a row, a source of which less than a row is left gets none."""
    length = 1 << 20
    specs = {
        "web": SourceSpec(data=head("web", 200 * length)),
        "small": SourceSpec(data=head("small", 3 * length + 1)),
        "tiny": SourceSpec(data=head("tiny", length + 2)),
    }
    first = PhaseSpec(tokens=1024, seq_len=1024, batch=1024, weights={"tiny": 1.0})
    rule = PhaseSpec(
        tokens=100 * length, seq_len=length, batch=length, weights={"temperature": 1e6}
    )
    mixture = Mixture(sources=specs, phases={"first": first, "p": rule})
    summary = summarize(resolve_draft(Draft(mixture, "m")))
    web, small, tiny = summary.phases[1].sources
    assert (web.rows, small.rows, tiny.rows) == (97, 3, 0)
    left_out = json_data(summary)["phases"][1]["left_out"]
    assert left_out.keys() == {"small", "tiny"}
    assert left_out["tiny"] == pytest.approx(100 / 3 * length, rel=0.02)
    text = format_table(summary)
    assert "max_epochs limits small, tiny" in text and "tiny 34.6M tokens (it gets none)" in text
