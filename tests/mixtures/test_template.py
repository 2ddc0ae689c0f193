"""`mixtures new`: the mixture that it writes for some datasets."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.data.plan_data import write_head

from headrace.console import yaml_text
from headrace.console.errors import ConfigError
from headrace.mixtures.planning.resolve_mixture import resolve_file
from headrace.mixtures.template import _format_count, render_template


@given(sizes=st.lists(st.integers(900, 10**7), min_size=1, max_size=6))
@settings(max_examples=20, deadline=None)
@example(sizes=[900, 10**11])
@example(sizes=[10**13, 10**9, 3_000])
def test_the_mixture_has_no_problems_and_fits_the_datasets(sizes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("new")
    urls = [write_head(str(folder / f"Set {number}"), size) for number, size in enumerate(sizes)]
    file = folder / "mixture.yaml"
    file.write_text(render_template(urls))
    plan = resolve_file(file)
    assert [phase.name for phase in plan.phases] == ["stable", "anneal"]
    assert plan.tokens <= 1.1 * sum(sizes) + 2 * plan.phases[0].batch_rows * plan.phases[0].seq_len
    weights = plan.phases[0].stretches[0].weights
    assert sum(weights) <= 100_000, "a table that is built in less than a second"
    for weight, size in zip(weights, sizes, strict=True):
        assert weight > 0
        assert weight / sum(weights) == pytest.approx(size / sum(sizes), abs=0.001)


@pytest.mark.parametrize("tokens", [100, 9_000, 20_000, 100_000])
@pytest.mark.parametrize("batch", [64, 1_024, 4_096])
def test_each_phase_has_a_step_however_few_tokens_are_asked_for(head, tokens, batch, tmp_path):
    file = tmp_path / "mixture.yaml"
    file.write_text(render_template([head("web", 20_000)], tokens=tokens, batch=batch, seq_len=64))
    plan = resolve_file(file)
    assert [phase.name for phase in plan.phases] == ["stable", "anneal"]
    assert abs(plan.tokens - tokens) <= 0.05 * tokens + 2 * batch


def test_source_names_come_from_urls_and_are_unique(head):
    names = (
        "a/web",
        "b/web",
        "c/Stable",
        "d/2024 (new)",
        "e/Wiki/train",
        "train",
        "f/日本_a",
        "null",
    )
    urls = [head(name, 5_000 + place) for place, name in enumerate(names)]
    data, _ = yaml_text.parse(render_template(urls), source="it")
    above = Path(urls[5]).parent.name.replace("_", "-")
    assert list(data["sources"]) == [
        *("web", "web-2", "stable-2", "source-2024-new"),
        *("wiki", above, "日本-a", "source-null"),
    ]
    assert [source["data"] for source in data["sources"].values()] == urls


def test_without_datasets_it_has_example_sources():
    data, _ = yaml_text.parse(render_template([]), source="it")
    assert set(data) == {"seed", "sources", "phases"}
    assert sum(data["phases"]["stable"]["weights"].values()) == 1


def test_datasets_that_do_not_fit_together_are_reported(head, tmp_path):
    good, alien = head("good", 5_000), head("alien", 5_000, fingerprint="other")
    more, missing = head("more", 5_000), str(tmp_path / "missing")
    with pytest.raises(ConfigError) as caught:
        render_template([good, alien, missing, more])
    assert {problem.path for problem in caught.value.problems} == {alien, missing}


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (981_000_000_000, "981B"),
        (1 << 22, "4Mi"),
        (1 << 20, "1Mi"),
        (76_300_000_000, "76.3B"),
        (4_096, "4096"),
        (12_345, "12_345"),
        (65_536, "64Ki"),
        (10**13, "10T"),
    ],
)
def test_counts_are_written_with_suffixes(number, text):
    assert _format_count(number) == text
    assert yaml_text.value(text) == number


def test_sizes_that_are_given_replace_those_of_the_datasets(tmp_path):
    url = write_head(str(tmp_path / "web"), 100_000)
    file = tmp_path / "mixture.yaml"
    file.write_text(render_template([url], tokens=400_000, seq_len=64, batch=1_000))
    plan = resolve_file(file)
    assert {phase.seq_len for phase in plan.phases} == {64}
    assert {phase.batch_rows for phase in plan.phases} == {1_000 // 64}
    assert 400_000 <= plan.tokens < 400_000 + 2 * 1_000, "two phases, each rounded to whole steps"
