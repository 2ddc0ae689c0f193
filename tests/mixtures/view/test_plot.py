"""Curves of a plan, and the pictures of them."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from headrace.console.errors import ConfigError
from headrace.console.html.page import colour
from headrace.dataplane.order.stream import Stream
from headrace.mixtures.learning_rate import learning_rate_at
from headrace.mixtures.lr_shapes import Constant, Cosine
from headrace.mixtures.mixture_file.mixture import Mixture, PhaseSpec, SourceSpec
from headrace.mixtures.planning.resolve_mixture import resolve
from headrace.mixtures.view.curves import MAX_SOURCES, compute_curves
from headrace.mixtures.view.plot import draw


@pytest.fixture
def plan(head):
    return resolve(
        Mixture(
            sources={
                "web": SourceSpec(data=head("web", 90_000)),
                "code": SourceSpec(data=head("code", 9_000), max_epochs=3),
            },
            phases={
                "stable <1>": PhaseSpec(
                    tokens=32_768,
                    seq_len=64,
                    batch=1_024,
                    weights={"web": 0.75, "code": 0.25},
                    lr=Constant(warmup=4_096),
                ),
                "ramp": PhaseSpec(
                    tokens=16_384,
                    weights={"web": {"from": 0.75, "to": 0.5}, "code": {"from": 0.25, "to": 0.5}},
                ),
                "end": PhaseSpec(
                    tokens=8_192,
                    seq_len=128,
                    weights={"ramp": 1},
                    lr=Cosine(peak=0.75),
                ),
            },
        )
    )


def test_curves_equal_the_counts_of_the_plan(plan):
    plan_curves = compute_curves(Stream(plan))
    stream = Stream(plan)
    assert plan_curves.sources == ["web", "code"]
    for phase in plan.phases:
        last = plan_curves.tokens.index(phase.first_token + phase.tokens)
        before = plan_curves.tokens.index(phase.first_token)
        drawn = stream.counts(phase.end_row) - stream.counts(phase.first_row)
        for source in range(2):
            assert plan_curves.taken[source][last] - plan_curves.taken[source][before] == (
                drawn[source] * phase.seq_len
            )
    assert sum(line[-1] for line in plan_curves.taken) == plan.tokens
    assert plan_curves.epochs[1][-1] == pytest.approx(plan_curves.taken[1][-1] / 9_000, abs=1e-3)
    assert np.allclose(np.sum(plan_curves.shares, axis=0), 1)
    assert plan_curves.share_edges[-1] == plan.tokens == plan_curves.lr_tokens[-1]
    assert plan_curves.lr[-1] == pytest.approx(0, abs=1e-9) and max(plan_curves.lr) == 1
    place = plan_curves.lr_tokens.index(4_096)  # the corner of the warm-up is a point of the curve
    assert plan_curves.lr[place] == learning_rate_at(plan.phases[0], 4_096) == 1


def test_the_smallest_of_many_sources_are_merged(head):
    names = [f"s{number}" for number in range(MAX_SOURCES + 3)]
    weights = dict.fromkeys(names, 0.05) | {"s0": 0.3}
    plan = resolve(
        Mixture(
            sources={name: SourceSpec(data=head(name, 50_000)) for name in names},
            phases={"p": PhaseSpec(tokens=64_000, seq_len=64, batch=640, weights=weights)},
        )
    )
    plan_curves = compute_curves(Stream(plan))
    assert len(plan_curves.sources) == MAX_SOURCES
    assert (plan_curves.sources[0], plan_curves.sources[-1]) == ("s0", "4 others")
    assert sum(line[-1] for line in plan_curves.taken) == plan.tokens
    assert plan_curves.shares[-1] == [pytest.approx(0.2)]


def test_pictures_are_complete_and_self_contained(plan, tmp_path):
    plan_curves = compute_curves(Stream(plan))
    for kind in ("svg", "html"):
        draw(plan_curves, str(tmp_path / f"mixture.{kind}"))
    svg = ElementTree.fromstring((tmp_path / "mixture.svg").read_text())
    text = " ".join("".join(node.itertext()) for node in svg.iter())
    for word in ("web", "code", "stable <1>", "ramp", "learning rate", "epochs", "max_epochs 3"):
        assert word in text, word
    assert all(f"rows of {phase.seq_len:,}" in text for phase in plan_curves.phases)
    lines = [node for node in svg.iter() if node.tag.endswith("polyline")]
    assert len(lines) == 1 + 2 * len(plan_curves.sources)  # the rate; tokens and epochs
    page = (tmp_path / "mixture.html").read_text()
    assert page.count('<svg class="wide"') == 4
    assert f'<i style="background:{colour(0)}"></i></span>web</td>' in page
    for file in ("mixture.svg", "mixture.html"):
        text = (tmp_path / file).read_text()
        assert "src=" not in text and "<link" not in text
        assert text.count("://") == text.count("http://www.w3.org/2000/svg")


def test_the_shares_of_a_picture_are_those_of_the_plan(plan, tmp_path):
    """The stacked areas are rectangles; their heights sum to the panel's at every token."""
    plan_curves = compute_curves(Stream(plan))
    draw(plan_curves, str(tmp_path / "mixture.svg"))
    svg = ElementTree.fromstring((tmp_path / "mixture.svg").read_text())
    rects = [node for node in svg.iter() if node.get("class") == "share"]
    heights: dict[str, float] = {}
    for rect in rects:
        heights[rect.get("x", "")] = heights.get(rect.get("x", ""), 0) + float(rect.get("height"))
    assert len({round(height) for height in heights.values()}) == 1
    shares = [share for source in plan_curves.shares for share in source if share > 0]
    assert len(rects) == len(shares)


def test_drawing_is_deterministic(plan, tmp_path):
    plan_curves = compute_curves(Stream(plan))
    for name in ("a.svg", "b.svg"):
        draw(plan_curves, str(tmp_path / name))
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_other_file_endings_are_refused(plan, tmp_path):
    with pytest.raises(ConfigError, match=r"does not end in \.svg or \.html"):
        draw(compute_curves(Stream(plan)), str(tmp_path / "mixture.jpeg"))
