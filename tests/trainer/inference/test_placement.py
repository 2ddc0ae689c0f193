"""Rows and weights that ranks share: scores and states beside one process, and their memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.configs import CONFIGS
from support.ranks.ranks import Ranks
from support.tasks import inferring

from headrace.models.config.config import load_model_config
from headrace.models.config.options.precision import PRECISIONS, Fp8Config, default_precision
from headrace.trainer.inference.memory import count_memory, count_weights
from headrace.trainer.inference.placement import Placement, choose_layout

DRAW = random.Random(4)


@pytest.mark.parametrize(
    ("name", "degrees"),
    [
        ("tiny", {"cp": 2}),
        ("shared", {"cp": 2}),
        ("experts", {"cp": 2}),
        ("tiny", {"tp": 2}),
        ("shared", {"shard": 2}),
        ("experts", {"shard": 2}),
        ("tiny", {"cp": 2, "shard": 2}),
        pytest.param("tiny", {"tp": 2, "cp": 2}, marks=pytest.mark.slow),
        pytest.param("experts", {"tp": 2, "shard": 2}, marks=pytest.mark.slow),
        pytest.param("shared", {"cp": 2, "shard": 4}, marks=pytest.mark.slow),
    ],
)
def test_ranks_give_the_scores_and_states_of_one(
    name: str, degrees: dict[str, int], ranks: Callable[[int], Ranks]
) -> None:
    config = load_model_config(str(CONFIGS / f"{name}.yaml"), ["vocab_size=257"])
    batch = [DRAW.choices(b"ACGT", k=length) for length in (41, 64, 7)]
    layers = ["0", str(len(config.layers) - 1), "norm"]
    one = inferring.compute(config, {}, batch, layers)
    tp, cp, shard = (degrees.get(axis, 1) for axis in ("tp", "cp", "shard"))
    world = max(tp * cp, tp * shard)
    results = ranks(world).run("inferring.compute", config, degrees, batch, layers)
    for rank in results:
        assert rank["scores"] == pytest.approx(one["scores"], rel=1e-6)
        for mean, expected in zip(rank["means"], one["means"], strict=True):
            assert torch.allclose(torch.tensor(mean), torch.tensor(expected), atol=1e-5)
    assert [score for [score] in results[0]["alone"]] == pytest.approx(one["scores"], rel=1e-6)
    # Replicas compute the same rows; in each, consecutive ranks hold slices of them.
    length = 64 // (tp * cp)
    assert [rank["first"] for rank in results] == [
        number % (tp * cp) * length for number in range(world)
    ]
    for layer in layers:
        states = [torch.tensor(rank["states"][layer]) for rank in results[: tp * cp]]
        joined = torch.cat(states, dim=1)
        for number, row in enumerate(batch):
            expected = torch.tensor(one["states"][layer][number, : len(row)])
            assert torch.allclose(joined[number, : len(row)], expected, atol=1e-5)
            mean = torch.tensor(one["means"][number][layers.index(layer)])
            assert torch.allclose(expected.double().mean(0).float(), mean, atol=1e-6)
    placement = Placement.choose(config, default_precision("cpu"), "cpu", **degrees)
    counted = count_weights(config, placement)
    assert max(rank["held"] for rank in results) == counted["weights"]
    gathered = max(rank["gathered"] for rank in results)
    limit = counted.get("gathered weights", 0)
    assert limit / 4 <= gathered <= limit


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [{"shard": 2}, {"tp": 2}])
def test_products_in_fp8_are_those_of_one_rank(
    degrees: dict[str, int], ranks: Callable[[int], Ranks]
) -> None:
    config = load_model_config("tiny-transformer", ["vocab_size=257"])
    batch, layers = [DRAW.choices(b"ACGT", k=length) for length in (16, 9)], ["norm"]
    precision = replace(PRECISIONS["fp32"], fp8=Fp8Config(smallest=16, ends=0))
    one = inferring.compute(config, {}, batch, layers, precision)
    plain = inferring.compute(config, {}, batch, layers)
    assert abs(one["scores"][0] - plain["scores"][0]) > 1e-5
    for rank in ranks(2).run("inferring.compute", config, degrees, batch, layers, precision):
        assert rank["scores"] == pytest.approx(one["scores"], rel=1e-6)


@pytest.mark.slow
def test_a_model_of_40b_fits_eight_gpus_of_80_gb() -> None:
    config, precision = load_model_config("evo2-40b-1m", []), PRECISIONS["bf16"]

    def count(cp: int, shard: int) -> int:
        placement = Placement(choose_layout(config, 1, cp), shard, precision, "cuda")
        return sum(count_memory(config, 1, 1 << 20, placement).values())

    assert count(cp=8, shard=8) < 60e9 < 80e9 < count(cp=8, shard=1)
