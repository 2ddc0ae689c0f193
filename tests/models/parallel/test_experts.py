"""Expert parallelism: experts split over ranks are the whole model, in fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.ranks.ranks import Ranks
from support.trained import trained_parameters

from headrace.models.documents import Documents
from headrace.models.model.model import Model
from headrace.models.parallel.sharding import slice_local_shard

ROWS, LENGTH = 4, 16
CUTS = [0, 5, 6, 16]
BOUND = 1e-12
MOE = {"kind": "moe", "experts": 4, "hidden": 10}
OPERATORS: dict[str, dict[str, Any]] = {
    "mixtral": {**MOE, "top_k": 2, "balance_loss": 0.1, "z_loss": 0.01},
    "black": {**MOE, "top_k": 1, "router": "sigmoid", "sinkhorn": True, "z_loss": 0.01},
    "deepseek": {
        **MOE,
        "experts": 8,
        "top_k": 3,
        "gated": False,
        "activation": "relu2",
        "router": "sigmoid",
        "router_bias": False,
        "router_fp32": True,
        "bias_update_rate": 0.1,
        "balance_loss": 0.1,
        "groups": 4,
        "top_k_groups": 2,
        "normalize": True,
        "routed_scaling_factor": 2.5,
        "shared_hidden": 7,
        "shared_gate": True,
    },
    "oss": {
        **MOE,
        "top_k": 2,
        "activation": "quick-gelu",
        "bias": True,
        "glu_limit": 0.3,
        "glu_offset": 1.0,
        "router_bias": True,
        "capacity_factor": 0.8,
        "shared_hidden": 9,
    },
}
LAYOUTS: dict[int, list[dict[str, int]]] = {
    2: [{"ep": 2}, {"tp": 2, "ep": 2}, {"cp": 2, "ep": 2}],
    4: [
        {"ep": 4},
        {"ep": 2},
        {"cp": 2, "ep": 4},
        {"tp": 2, "ep": 2},
        {"tp": 2, "ep": 4},
        {"tp": 2, "cp": 2, "ep": 2},
        {"tp": 2, "cp": 2, "ep": 4},
    ],
}


@pytest.fixture(scope="module")
def model(tiny_of: Callable[..., Model]) -> Model:
    return tiny_of("[mha/mixtral, mamba2/black, se/deepseek, mha/oss]", OPERATORS).train()


def batch(model: Model) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, model.config.vocab_size, (ROWS, LENGTH + 1), generator=generator)
    weights = (torch.rand(ROWS, LENGTH, generator=generator) > 0.3).double()
    return tokens, weights


def compute_alone(model: Model) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the objective and its gradients, one row after the other."""
    tokens, weights = batch(model)
    total = torch.zeros((), dtype=torch.float64)
    for row in range(ROWS):
        documents = Documents.build(torch.tensor(CUTS), (1, LENGTH))
        ids, w = tokens[row : row + 1], weights[row : row + 1]
        hidden, losses = model.hidden(ids[:, :-1], documents)
        total = total + model.loss(hidden, ids[:, 1:], w, 1e-3)[0] + losses.sum() * w.sum()
    names, parameters = zip(*trained_parameters(model), strict=True)
    gradients = torch.autograd.grad(total, parameters)
    return float(total.detach()), dict(zip(names, gradients, strict=True))


def max_difference(ranks: Ranks, model: Model, layout: dict[str, int], **options: Any) -> float:
    """Return the greatest relative difference of the objective and of the gradients, which are the
    sums of all ranks' shares."""
    tokens, weights = batch(model)
    total, gradients = compute_alone(model)
    state = {name: weight.numpy() for name, weight in model.state_dict().items()}
    arguments = (model.config, state, tokens.numpy(), weights.numpy(), CUTS, layout)
    answers = ranks.run("share_of_objective", *arguments, **options)
    worst = abs(sum(share for share, _ in answers) - total) / abs(total)
    for name, expected in gradients.items():
        whole = torch.zeros(expected.numel(), dtype=torch.float64)
        for _, result in answers:
            part, gradient = result[name]
            index = slice_local_shard(
                part, torch.arange(expected.numel()).view(expected.shape)
            ).flatten()
            whole.index_add_(0, index, torch.from_numpy(gradient).flatten())
        worst = max(worst, float((whole - expected.flatten()).abs().max() / expected.abs().max()))
    return worst


@pytest.mark.parametrize("processes", [2, 4])
def test_split_experts_are_the_whole_model(
    pools: dict[int, Ranks], model: Model, processes: int
) -> None:
    """Losses of routers, Sinkhorn, packed documents; experts on neighbours of all axes."""
    for layout in LAYOUTS[processes]:
        worst = max_difference(pools[processes], model, layout)
        assert worst < BOUND, (layout, worst)


def test_one_rank_may_receive_all_rows(two_ranks: Ranks, model: Model) -> None:
    bias = model.get_parameter("blocks.1.mlp.operator.router.bias")
    before = bias.detach().clone()
    try:
        with torch.no_grad():
            bias[0] += 50.0
        model.eval()  # the router's own choice, without Sinkhorn
        assert max_difference(two_ranks, model, {"ep": 2}, training=False) < BOUND
    finally:
        model.train()
        with torch.no_grad():
            bias.copy_(before)


@pytest.mark.parametrize("recompute", ["block", "operator"])
def test_recompute_repeats_the_exchange(two_ranks: Ranks, model: Model, recompute: str) -> None:
    assert max_difference(two_ranks, model, {"tp": 2, "ep": 2}, recompute=recompute) < BOUND


def test_routers_that_count_their_own_tokens_alone_show(two_ranks: Ranks, model: Model) -> None:
    """Negative control: under tensor parallelism a rank routes a part of each row."""
    assert max_difference(two_ranks, model, {"tp": 2, "ep": 2}, fault="routers") > 1e-4
