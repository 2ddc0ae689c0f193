"""Biases that balance the experts: each step moves them by the signs of the loads' errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from headrace.models.config.options.recompute import Recompute
from headrace.models.model.model import Model
from headrace.models.operators.moe import MoE

DEEPSEEK = {
    "kind": "moe",
    "experts": 4,
    "hidden": 6,
    "router": "sigmoid",
    "router_bias": False,
    "bias_update_rate": 0.5,
}
FIXED = {**DEEPSEEK, "bias_update_rate": 0.0}
TOKENS = torch.arange(48).view(4, 12) * 7 % 23


def routers(model: Model) -> list[MoE]:
    return [module for module in model.modules() if isinstance(module, MoE)]


@pytest.mark.parametrize("recompute", ["none", "block", "operator"])
def test_biases_follow_the_loads(tiny_of: Callable[..., Model], recompute: Recompute) -> None:
    operators: dict[str, Any] = {"a": DEEPSEEK, "b": {**FIXED, "experts": 3}}
    model = tiny_of("[mha/a, b/a, mha/none]", operators).train()
    model.set_recompute(recompute)
    first, fixed, last = routers(model)
    before = [router.correction_bias.clone() for router in (first, fixed, last)]
    loads = []

    def count(router: MoE, inputs: Any, *_: Any) -> None:
        expert_ids = router.route(router.router(inputs[0]), inputs[1])[0]
        loads.append(torch.bincount(expert_ids.flatten(), minlength=4))

    with torch.no_grad():
        hooks = [router.register_forward_hook(count) for router in (first, last)]
        model.hidden(TOKENS)
        for hook in hooks:
            hook.remove()
    assert model.balance is not None and model.balance.counts is None, "no training, no count"
    for half in TOKENS.split(2):  # micro-batches
        hidden, _ = model.hidden(half)
        hidden.sum().backward()
    model.eval().hidden(TOKENS)
    counts = model.balance.take(torch.device("cpu"))
    assert torch.equal(counts[:4], loads[0]) and torch.equal(counts[7:], loads[1])
    model.balance.move(model.blocks, counts, torch.tensor(False))
    assert torch.equal(first.correction_bias, before[0]), "the step changes nothing"
    model.balance.move(model.blocks, counts, torch.tensor(True))
    for router, old, load in zip((first, last), (before[0], before[2]), loads, strict=True):
        assert load.sum() == 2 * TOKENS.numel() and len(load.unique()) > 1
        expected = old + 0.5 * torch.sign(load.double().mean() - load)
        assert torch.equal(router.correction_bias, expected)
    assert torch.equal(fixed.correction_bias, before[1]), "rate 0"
    assert int(model.balance.take(torch.device("cpu")).sum()) == 0


def test_without_such_routers_nothing_is_counted(tiny_of: Callable[..., Model]) -> None:
    assert tiny_of("[mha/a]", {"a": FIXED}).balance is None
