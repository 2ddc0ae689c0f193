"""Cards of mixtures, beside the plan's summary."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from headrace.dataplane.datasets import about
from headrace.dataplane.datasets.about import About
from headrace.dataplane.order.stream import Stream
from headrace.mixtures.planning.resolve_mixture import resolve
from headrace.mixtures.spec.mixture import Mixture, PhaseSpec, SourceSpec
from headrace.mixtures.view.card import card
from headrace.mixtures.view.summary import summarize


def test_a_card_of_a_mixture(head: Callable[..., str], tmp_path: Path) -> None:
    web, code = head("web", 9_000), head("code", 1_500)
    about.save(web, About(licenses=("CC-BY-4.0",), sources=("a crawl | of pages",)))
    mixture = Mixture(
        sources={"web": SourceSpec(data=web), "code": SourceSpec(data=code, max_epochs=4)},
        phases={
            "main": PhaseSpec(
                tokens=4_000, seq_len=16, batch=128, weights={"web": 0.75, "code": 0.25}
            )
        },
    )
    stream = Stream(resolve(mixture))
    summary = summarize(stream)
    page = card(stream, steps=7)
    assert f"# Training data of plan {summary.hash[:16]}" in page
    assert f"{summary.tokens:,} tokens in {summary.rows:,} rows" in page
    assert "The weights have seen its first 7 steps." in page
    assert f"| main | {summary.tokens:,} | {summary.steps:,} | 16 | 75.00% | 25.00% |" in page
    use = summary.total[1]
    assert f"| code | {use.tokens:,} | 25.00% | 1,500 | {use.epochs:.3g} |" in page
    assert "| CC-BY-4.0 | a crawl \\| of pages | nothing |" in page
    assert "| not stated | not stated | nothing |" in page
    (tmp_path / "code" / "manifest.json").unlink()
    assert "| the dataset cannot be read |" in card(stream)
