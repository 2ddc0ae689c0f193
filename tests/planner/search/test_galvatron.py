"""Galvatron's search cases: by its own costs, this search is never worse, and equal where the
choices are the same."""

from __future__ import annotations

from typing import Any

import pytest
from support.planner.galvatron import DATA, Galvatron, Layer, Point

CASES = {case["name"]: case for case in DATA["cases"]}
FINE = ("repo_case0_fine_grained_36GB", "derived_24GB_pp2")
COARSE = "repo_case1_coarse_36GB"
FITTED = 1e-8
"""Relative difference of a parabola that scipy and numpy fit."""


def theirs(case: dict[str, Any]) -> tuple[float, int, list[int], list[Layer], int, bool]:
    """Return Galvatron's seconds, tensor degree, cuts, layers, vocabulary's degree, and if it
    shards the embedding."""
    expected = case["expected"]
    config = expected["config"]

    def numbers(name: str) -> list[int]:
        return [int(item) for item in config[name].split(",")]

    division = numbers("pp_division")
    cuts = [sum(division[: n + 1]) for n in range(len(division) - 1)]
    pairs = zip(numbers("dp_types_enc"), numbers("checkpoint"), strict=True)
    layers = [Layer(bool(zero3), bool(recompute)) for zero3, recompute in pairs]
    [tp] = set(numbers("tp_sizes_enc"))
    seconds = case["inputs"]["search_args"]["settle_bsz"] / expected["throughput_samples_per_s"]
    return seconds, tp, cuts, layers, config["vtp"], bool(config["embed_sdp"])


def point_of(case: dict[str, Any]) -> Point:
    _, tp, cuts, _, vocabulary, shard = theirs(case)
    return Point(len(cuts) + 1, tp, min(tp, vocabulary), max(tp, vocabulary), vocabulary, shard)


@pytest.mark.parametrize("name", CASES)
def test_the_adapter_prices_its_plans_as_it_does(name: str) -> None:
    """Its time to the rounding of its fit, and its memory to the MB."""
    case = CASES[name]
    seconds, _, cuts, layers, *_ = theirs(case)
    galvatron, point = Galvatron(case), point_of(case)
    assert galvatron.price(point, cuts, layers) == pytest.approx(seconds, rel=FITTED)
    assert galvatron.fits(point, cuts, layers)
    remaining = case["expected"]["summary"][1].split("remaining = [")[1]
    galvatron.memory -= min(int(item) for item in remaining.split("]")[0].split(","))
    assert galvatron.fits(point, cuts, layers)
    galvatron.memory -= 1
    assert not galvatron.fits(point, cuts, layers)


@pytest.mark.parametrize("name", FINE)
def test_a_fine_grained_search_finds_its_plan(name: str) -> None:
    seconds, _, cuts, layers, *_ = theirs(CASES[name])
    galvatron = Galvatron(CASES[name])
    result, point, own_cuts, best_layers = galvatron.search()
    assert result == pytest.approx(seconds, rel=FITTED)
    assert own_cuts == tuple(cuts)
    assert galvatron.fits(point, own_cuts, best_layers)
    # Negative control: its plan with one layer more that recomputes is dearer.
    changed = list(layers)
    changed[-1] = Layer(changed[-1].zero3, recompute=True)
    assert galvatron.price(point, cuts, changed) > result * (1 + 1e-4)


@pytest.mark.slow
def test_a_coarse_search_of_theirs_is_beaten_by_choices_of_layers() -> None:
    """Galvatron's coarse mode has one choice for all layers: equal with that limit, else worse."""
    seconds, *_ = theirs(CASES[COARSE])
    galvatron = Galvatron(CASES[COARSE])
    result, _, _, layers = galvatron.search()
    assert len(set(layers)) == 2
    assert result < seconds * 0.999
    assert galvatron.search(uniform=True)[0] == pytest.approx(seconds, rel=FITTED)
