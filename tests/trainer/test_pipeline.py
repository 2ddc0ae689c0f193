"""A pipeline computes what one process computes: to the bit where one chunk uses a parameter."""

from __future__ import annotations

from typing import Any

import pytest

SCHEDULES = ["pp2", "pp2gpipe", "pp2x2"]
MODELS = ["every", "untied", "shared"]


def hold(found: dict[str, tuple[list[str], float, bool]]) -> None:
    for case, (differing, worst, losses) in found.items():
        assert not differing and worst < 1e-12 and losses, (case, differing, worst, losses)


def test_gradients_are_those_of_one_process(in_processes: Any) -> None:
    """Tied embeddings, a shared block on both stages, routers in a stage without the loss."""
    cases = [("untied", "pp2", 3), ("shared", "pp2x2", 3), ("shared", "pp2gpipe", 2)]
    hold(in_processes(2, "exact", cases=cases))


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["copies", "handed", "routers", "rows"])
def test_faults_show(in_processes: Any, fault: str) -> None:
    """Negative controls."""
    case = ("every" if fault == "routers" else "shared", "pp2", 2)
    [(differing, worst, _)] = in_processes(2, "exact", cases=[case], fault=fault).values()
    assert worst > 1e-3 and (differing or fault == "copies"), (differing, worst)


@pytest.mark.long
@pytest.mark.parametrize("recompute", ["none", "operator", "block"])
@pytest.mark.parametrize("packed", [True, False])
def test_every_schedule_is_exact(in_processes: Any, recompute: str, packed: bool) -> None:
    """Micro-batches that the stages divide, and one more."""
    cases = [(model, words, m) for model in MODELS for words in SCHEDULES for m in (4, 5)]
    hold(in_processes(2, "exact", cases=cases, recompute=recompute, packed=packed))


TINY = ["tiny-hybrid", "tiny-zamba", "tiny-moe"]


@pytest.mark.long
def test_shipped_models_are_exact(in_processes: Any) -> None:
    cases = [(model, words, 4) for model in TINY for words in ("pp2", "pp2x2")]
    hold(in_processes(2, "exact", cases=cases))
    hold(in_processes(4, "exact", cases=[(model, "pp4", 5) for model in (*TINY, "every")]))
    hold(in_processes(4, "exact", cases=[("untied", "pp4uneven", 3), ("every", "pp4uneven", 3)]))
