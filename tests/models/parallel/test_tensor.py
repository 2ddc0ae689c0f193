"""Tensor parallelism: every operator on local shards equals the whole operator, in fp64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.configs import CONFIGS
from support.ranks.ranks import Ranks
from support.trained import trained_parameters

from headrace.models.config.config import load_model_config
from headrace.models.config.options.precision import Fp8Config
from headrace.models.documents import Documents
from headrace.models.model.model import Model
from headrace.models.parallel.axes import Axis
from headrace.models.parallel.local_shard import LocalShard
from headrace.models.parallel.sharding import slice_local_shard
from headrace.models.parallel.tensor import split_group_runs
from headrace.models.transforms.fp8 import iterate_matrices, quantize

EVERY = CONFIGS / "every.yaml"
ROWS, LENGTH = 2, 24
CUTS = [0, 5, 6, 19, 24, 40, 48]
BOUND = 1e-12


def make(*changes: str) -> Model:
    """Perturb all initial weights: a zero bias would hide how often it is added."""
    model = Model(load_model_config(EVERY, changes)).double()
    model.init_weights(3)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(number)
            parameter += 0.05 * torch.randn(
                parameter.shape, generator=generator, dtype=torch.float64
            )
    return model


def batch(model: Model) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, model.config.vocab_size, (ROWS, LENGTH + 1), generator=generator)
    weights = (torch.rand(ROWS, LENGTH, generator=generator) > 0.3).double()
    return tokens, weights


def compute_alone(model: Model) -> tuple[float, dict[str, torch.Tensor]]:
    tokens, weights = batch(model)
    documents = Documents.build(torch.tensor(CUTS), (ROWS, LENGTH))
    hidden, losses = model.hidden(tokens[:, :-1], documents)
    tokens_loss, _ = model.loss(hidden, tokens[:, 1:], weights, z_loss=1e-3)
    total = tokens_loss + (losses * weights.sum(1)).sum()
    names, parameters = zip(*trained_parameters(model), strict=True)
    gradients = torch.autograd.grad(total, parameters)
    return float(total.detach()), dict(zip(names, gradients, strict=True))


def max_difference(ranks: Ranks, model: Model, *, summed: bool = True, **options: Any) -> float:
    """Greatest relative difference of the loss and of the assembled gradients. `summed` is whether
    gradients of replicated parameters are summed."""
    tokens, weights = batch(model)
    loss, gradients = compute_alone(model)
    state = {name: weight.numpy() for name, weight in model.state_dict().items()}
    answers = ranks.run(
        "share_of_loss", model.config, state, tokens.numpy(), weights.numpy(), CUTS, **options
    )
    worst = abs(sum(share for share, _ in answers) - loss) / abs(loss)
    for name, expected in gradients.items():
        whole = torch.zeros(expected.shape, dtype=torch.float64)
        for number, (_, result) in enumerate(answers):
            part, gradient = result[name]
            if number == 0 or summed or part.copies.size == 1:
                place(whole, part, gradient)
        worst = max(worst, float((whole - expected).abs().max() / expected.abs().max()))
    return worst


def place(whole: torch.Tensor, part: LocalShard, gradient: np.ndarray) -> None:
    index = slice_local_shard(part, torch.arange(whole.numel()).view(whole.shape)).flatten()
    whole.view(-1).index_add_(0, index, torch.from_numpy(gradient).flatten())


@pytest.mark.parametrize("processes", [2, 4])
def test_local_shards_of_every_operator_equal_the_whole(
    pools: dict[int, Ranks], processes: int
) -> None:
    """Covers fewer heads of keys than ranks, groups split over ranks, a vocabulary and hidden
    channels that do not divide evenly, biases after sums, routers with losses."""
    assert max_difference(pools[processes], make()) < BOUND


def test_slow_heads_and_shared_long_filters(pools: dict[int, Ranks]) -> None:
    """Heads and their filters are sharded together; four ranks do not divide six shared filters."""
    changes = [
        "pattern='[mr, li, waves, free, moe]'",
        "operators.mr.groups=4",
        "operators.mr.slow_heads=true",
        "operators.li.groups=4",
        "operators.li.slow_heads=true",
        "operators.waves.groups=6",
        "operators.free.groups=6",
        "operators.free.learned_decay=true",
    ]
    model = make(*changes)
    assert max_difference(pools[2], model) < BOUND
    assert max_difference(pools[4], model) < BOUND
    assert list(model.config.tp_problems(3)) == [
        f"operators.{name}: tp=3 does not divide its 4 heads" for name in ("mr", "li")
    ]


def test_an_untied_head(two_ranks: Ranks) -> None:
    assert max_difference(two_ranks, make("tie_embeddings=false", "norm=rms")) < BOUND


WIDER = [
    "width=48",
    "operators.glu.hidden=48",
    "operators.plain.hidden=64",
    "operators.wide.hidden=48",
    "operators.block.hidden=64",
]
"""Sizes that 16 divides."""


def test_rows_in_fp8_have_the_scales_of_whole_rows(two_ranks: Ranks) -> None:
    """Negative control: each rank takes the scale of its part of a row. Scales are powers of two,
    so only the smallest numbers round differently."""
    config = Fp8Config(smallest=16, ends=0)
    model = quantize(make(*WIDER, "operators.narrow.output_gate=false"), config)
    narrow = {matrix.name for matrix in iterate_matrices(model, config) if matrix.reason is None}
    assert len(narrow) > 20
    assert max_difference(two_ranks, model, fp8=config) < BOUND
    assert max_difference(two_ranks, model, fp8=config, fault="scale") > 1e-7


@pytest.mark.parametrize("recompute", ["block", "operator"])
def test_recompute_repeats_the_gather(two_ranks: Ranks, recompute: str) -> None:
    assert max_difference(two_ranks, make(), recompute=recompute) < BOUND


@pytest.mark.parametrize("fault", ["bias", "norm"])
def test_faults_are_detected(two_ranks: Ranks, fault: str) -> None:
    assert max_difference(two_ranks, make(), fault=fault) > 1e-3


def test_gradients_of_replicated_parameters_must_be_summed(two_ranks: Ranks) -> None:
    assert max_difference(two_ranks, make(), summed=False) > 1e-3


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 5), st.integers(1, 3))
def test_every_member_finds_its_group(
    groups: int, groups_per_rank: int, size: int, more: int
) -> None:
    members = groups * groups_per_rank * size * more
    result = []
    for rank in range(size):
        axis = Axis(None, rank, size)
        runs = split_group_runs(groups, members, axis)
        run = len(axis.part_range(members)) // len(runs)
        result += [group for group in runs for _ in range(run)]
    assert result == [member * groups // members for member in range(members)]
