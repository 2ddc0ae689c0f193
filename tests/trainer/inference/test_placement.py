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

from headrace.console.errors import LayoutError
from headrace.models.config.config import load_model_config
from headrace.models.config.options.precision import PRECISIONS, Fp8Config, default_precision
from headrace.trainer.inference.memory import check_memory, count_memory, count_weights
from headrace.trainer.placement.placement import Placement, choose_layout

DRAW = random.Random(4)
LIMIT = "headrace.trainer.inference.memory.memory_limit"


@pytest.mark.parametrize(
    ("name", "degrees", "world"),
    [
        ("tiny", {"tp": 2}, 2),
        ("experts", {"shard": 2}, 2),
        ("shared", {"cp": 2, "shard": 2}, 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("experts", {"cp": 2}, 2),
                ("tiny", {"tp": 2, "cp": 2}, 4),
                ("experts", {"tp": 2, "shard": 2}, 4),
                ("tiny", {"cp": 2, "shard": 2}, 4),  # two copies of the weights
            )
        ),
    ],
)
def test_ranks_give_the_scores_and_states_of_one(
    name: str, degrees: dict[str, int], world: int, ranks: Callable[[int], Ranks]
) -> None:
    config = load_model_config(str(CONFIGS / f"{name}.yaml"), ["vocab_size=257"])
    batch = [DRAW.choices(b"ACGT", k=length) for length in (41, 64, 7)]
    layers = ["0", str(len(config.layers) - 1), "norm"]
    one_rank = inferring.compute(config, {}, batch, layers)
    row_ranks = degrees.get("tp", 1) * degrees.get("cp", 1)
    results = ranks(world).run("inferring.compute", config, degrees, batch, layers)
    for rank in results:
        assert rank["scores"] == pytest.approx(one_rank["scores"], rel=1e-6)
        for mean, expected in zip(rank["means"], one_rank["means"], strict=True):
            assert torch.allclose(torch.tensor(mean), torch.tensor(expected), atol=1e-5)
    assert [score for [score] in results[0]["alone"]] == pytest.approx(one_rank["scores"], rel=1e-6)
    for result, expected in zip(results[0]["tokens"], one_rank["tokens"], strict=True):
        assert result.log_likelihoods == pytest.approx(expected.log_likelihoods, rel=1e-5)
        assert result.likeliest == expected.likeliest
    assert results[0]["texts"] == (row_ranks == 1 and one_rank["texts"])
    # Replicas compute the same rows; in each, consecutive ranks hold slices of them.
    length = 64 // row_ranks
    assert [rank["first"] for rank in results] == [
        number % row_ranks * length for number in range(world)
    ]
    for layer in layers:
        states = [torch.tensor(rank["states"][layer]) for rank in results[:row_ranks]]
        joined = torch.cat(states, dim=1)
        for number, row in enumerate(batch):
            expected = torch.tensor(one_rank["states"][layer][number, : len(row)])
            assert torch.allclose(joined[number, : len(row)], expected, atol=1e-5)
            mean = torch.tensor(one_rank["means"][number][layers.index(layer)])
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
    one_rank = inferring.compute(config, {}, batch, layers, precision)
    plain = inferring.compute(config, {}, batch, layers)
    assert abs(one_rank["scores"][0] - plain["scores"][0]) > 1e-5
    for rank in ranks(2).run("inferring.compute", config, degrees, batch, layers, precision):
        assert rank["scores"] == pytest.approx(one_rank["scores"], rel=1e-6)


@pytest.mark.slow
def test_a_model_of_40b_fits_eight_gpus_of_80_gb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIMIT, lambda device: 80 * 10**9)
    config = load_model_config("evo2-40b-1m", [])
    alone = Placement(choose_layout(config, 1, 1), 1, PRECISIONS["bf16"], "cuda")
    assert count_weights(config, alone)["weights"] > 80e9
    eight = replace(alone, layout=choose_layout(config, 1, 8), shard=8)
    line = check_memory(config, 1, 1 << 20, eight)
    assert "50.2 GB on a rank, for 1 row of 1,048,576 tokens on 8 ranks" in line


def test_an_error_names_ranks_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_model_config("tiny-transformer", ["vocab_size=257"])
    alone = Placement.choose(config, default_precision("cpu"), "cpu")
    sharded = replace(alone, shard=2)
    sizes = [sum(count_memory(config, 1, 64, where).values()) for where in (alone, sharded)]
    assert sizes[1] < sizes[0]
    for limit, options in zip(sizes, ("--cp 1", "--shard 2"), strict=True):
        monkeypatch.setattr(LIMIT, lambda device, limit=limit: limit)
        with pytest.raises(LayoutError) as caught:
            check_memory(config, 4, 64, alone)
        assert f"{options} fits, a row at a time (--batch-tokens 64)" in str(caught.value.hint)
    monkeypatch.setattr(LIMIT, lambda device: 0)
    monkeypatch.setattr("headrace.trainer.inference.memory.MAX_RANKS", 1)
    with pytest.raises(LayoutError) as caught:
        check_memory(config, 4, 64, alone)
    assert caught.value.hint == "take shorter rows"
