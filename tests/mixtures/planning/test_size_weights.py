"""Weights that follow from the sizes of the sources, within max_epochs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.console.errors import ConfigError, PlanError
from headrace.mixtures.planning.resolve_mixture import resolve_draft
from headrace.mixtures.planning.size_weights import UNITS, size_weights
from headrace.mixtures.spec.mixture import Mixture, PhaseSpec, SourceSpec
from headrace.mixtures.spec.tolerant_read import Draft
from headrace.mixtures.view.summary import Summary, summarize
from headrace.mixtures.view.table import table


def level(wanted: dict[str, float], most: dict[str, float]) -> float:
    """Return x such that the sum of min(x * wanted, most) is 1, by bisection: the oracle."""
    low, high = 0.0, 1e18
    for _ in range(200):
        middle = (low + high) / 2
        filled = sum(min(middle * wanted[name], most[name]) for name in wanted)
        low, high = (middle, high) if filled < 1 else (low, middle)
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
    most_rows = {f"s{number}": most for number, (_, most) in enumerate(sources)}
    most = {name: most_rows[name] * UNITS // rows / UNITS for name in sizes}
    if sum(min(share, 1) for share in most.values()) < 1 - 1e-12:
        with pytest.raises(PlanError):
            size_weights("p", sizes, temperature, rows, most_rows)
        return
    weights, limited = size_weights("p", sizes, temperature, rows, most_rows)
    assert sum(round(share * UNITS) for share in weights.values()) == UNITS
    wanted = {
        name: (size / max(sizes.values())) ** (1 / temperature) for name, size in sizes.items()
    }
    x = level(wanted, most)
    for name, share in weights.items():
        assert round(share * UNITS) * rows <= most_rows[name] * UNITS
        assert share or not most[name], "a share is 0 only if nothing is left"
        # Sources that are rounded up to one unit are paid for by the others, a unit each.
        assert abs(share - min(x * wanted[name], most[name])) < (len(sizes) + 1) / UNITS
        assert (name in limited) == (x * wanted[name] > most[name]) or (
            abs(x * wanted[name] - most[name]) < len(sizes) / UNITS
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


def phase(tokens, weights, **others) -> PhaseSpec:
    return PhaseSpec(tokens=tokens, weights=weights, seq_len=64, batch=1024, **others)


def shares(summary: Summary, number: int = 0) -> list[float]:
    return [round(use.share_asked, 5) for use in summary.phases[number].sources]


def test_proportional_and_temperature(planned):
    assert shares(planned(phase(500_000, "proportional"))) == [0.8, 0.15, 0.05]
    total = 800**0.5 + 150**0.5 + 50**0.5
    summary = planned(phase(100_000, {"temperature": 2.0}))
    assert shares(summary) == pytest.approx(
        [size**0.5 / total for size in (800, 150, 50)], abs=1e-5
    )
    assert "The shares are proportional to the sizes of the sources to the power of 1/2." in table(
        summary
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
    assert "max_epochs limits code, math" in table(summary)
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
