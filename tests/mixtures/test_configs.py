"""The shipped example mixtures, planned for datasets of a thousandth of their size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import headrace.configs
from headrace.dataplane.order.plan import Plan
from headrace.dataplane.order.stream import Stream
from headrace.mixtures.learning_rate import lr_factor
from headrace.mixtures.mixture_file.tolerant_read import read
from headrace.mixtures.planning.resolve_mixture import resolve_file
from headrace.mixtures.view.summary import summarize

FOLDER = Path(headrace.configs.__file__).parent / "mixtures"
EXAMPLES = ("single-source", "zyphra-anneal", "evo2-two-stages", "llama-eleven-sources")
SCALE = 1_000


@pytest.fixture
def planned(head: Callable[..., str]) -> Callable[[str], Plan]:
    """Return a function that plans a thousandth of an example's tokens, on large sources."""

    def plan(name: str) -> Plan:
        file = FOLDER / f"{name}.yaml"
        mixture = read(file).mixture
        total = sum(phase.tokens for phase in mixture.phases.values()) // SCALE
        words = [f"sources.{source}.data={head(source, 2 * total)}" for source in mixture.sources]
        for name, phase in mixture.phases.items():
            words.append(f"phases.{name}.tokens={phase.tokens // SCALE}")
            for key in ("warmup", "decay"):
                if value := getattr(phase.lr, key):
                    words.append(f"phases.{name}.lr.{key}={value // SCALE}")
        return resolve_file(file, words)

    return plan


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_gives_each_source_its_share(
    name: str, planned: Callable[[str], Plan]
) -> None:
    plan = planned(name)
    for phase in summarize(Stream(plan)).phases:
        assert abs(phase.tokens - phase.tokens_asked) <= phase.batch_tokens / 2
        for use in phase.sources:
            # Debts of the phase before are settled in this one.
            assert abs(use.rows - use.share_asked * phase.rows) < 2 * max(1, 2**20 / phase.seq_len)


def test_the_anneal_replays_warms_up_and_decays_to_zero(
    planned: Callable[[str], Plan],
) -> None:
    plan = planned("zyphra-anneal")
    stable, anneal = summarize(Stream(plan)).phases
    shares = {use.source: use.share_asked for use in anneal.sources}
    assert shares == pytest.approx(
        {"web": 0.48, "code": 0.09, "papers": 0.03, "math": 0.25, "instructions": 0.15}
    )
    assert anneal.tokens == pytest.approx(0.1 * plan.tokens, rel=0.01)
    rates = [lr_factor(plan, step) for step in range(anneal.first_step, plan.end_step)]
    assert max(rates) == pytest.approx(0.75, abs=0.05)
    assert rates[-1] < 0.05
    assert stable.sources[0].epochs < 1


def test_the_sequence_length_grows_to_a_million_tokens(planned: Callable[[str], Plan]) -> None:
    plan = planned("evo2-two-stages")
    lengths = [phase.seq_len for phase in plan.phases]
    assert lengths == [8_192, 32_768, 131_072, 524_288, 1_048_576]
    assert all(source.order.chunk % 1_048_576 == 0 for source in plan.sources)
    assert plan.phases[-1].batch_rows == 8
    assert len({tuple(phase.stretches[0].weights) for phase in plan.phases[1:]}) == 1


def test_the_llama_example_has_eleven_sources(planned: Callable[[str], Plan]) -> None:
    assert len(planned("llama-eleven-sources").sources) == 11
