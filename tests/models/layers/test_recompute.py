"""Rules of recompute: one for each layer, the results that a rule keeps, and what they cost."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.console.errors import ConfigError
from headrace.models.accounting.count import (
    build_meta,
    flops_by_layer,
    matrix_flops,
    recomputed_flops,
)
from headrace.models.accounting.passes import model_passes
from headrace.models.accounting.shape import Shape
from headrace.models.config.config import ModelConfig, load_model_config
from headrace.models.config.options.precision import PRECISIONS
from headrace.models.config.options.recompute import Recompute, Rule, Selective, expand_rules
from headrace.models.kernels import constants
from headrace.models.layers.recompute import Recomputable
from headrace.models.model.model import Model
from headrace.models.operators import base

MATMUL = Selective(save=("matmul",))
BOTH = Selective(save=("matmul", "attention"))
LENGTH = 40


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return load_model_config("tiny-hybrid")


@pytest.fixture(scope="module")
def model(config: ModelConfig) -> Model:
    model = Model(config).double()
    model.init_weights(1)
    return model


@given(st.integers(1, 200), st.floats(0.001, 1.0))
def test_a_fraction_is_spread_evenly(layers: int, fraction: float) -> None:
    rules = expand_rules(fraction, layers)
    for first in range(layers):
        for end in range(first + 1, layers + 1):
            assert abs(rules[first:end].count("block") - fraction * (end - first)) < 1 + 1e-9


def test_rules_for_each_layer() -> None:
    assert expand_rules("operator", 3) == ("operator",) * 3
    assert expand_rules(Selective(every=2), 5) == ("none", "block", "none", "block", "none")
    assert expand_rules(Selective(every=2, save=("scan",)), 2) == (
        "none",
        Selective(save=("scan",)),
    )
    assert expand_rules(("none", MATMUL), 2) == ("none", MATMUL)
    with pytest.raises(ConfigError, match="has 2 rules, and the model 3 layers"):
        expand_rules(("none", "block"), 3)
    with pytest.raises(ConfigError, match="a rule of one layer has no `every`"):
        expand_rules((Selective(every=2),), 1)


@pytest.mark.parametrize(
    "recompute", [0.5, Selective(every=3), MATMUL, BOTH, Selective(every=2, save=("matmul",))]
)
def test_rules_change_no_bit(model: Model, recompute: Recompute) -> None:
    expected, _ = gradients(model, "none")
    result, _ = gradients(model, recompute)
    assert all(
        torch.equal(actual, reference) for actual, reference in zip(result, expected, strict=True)
    )


def test_saved_results_are_not_computed_again(model: Model) -> None:
    """Negative control: blocks compute their products again."""
    product, attention = "aten::mm", "aten::_scaled_dot_product_flash_attention_for_cpu"
    (_, never), (_, again), (_, saved), (_, saved_both) = (
        gradients(model, recompute) for recompute in ("none", "block", MATMUL, BOTH)
    )
    assert saved[product] == never[product] < again[product]
    assert saved_both[attention] == never[attention] < saved[attention] == again[attention]


def test_saved_products_of_experts_are_not_computed_again() -> None:
    model = Model(load_model_config("tiny-moe")).double()
    model.init_weights(1)
    product = "headrace::grouped_product"
    (expected, never), (_, again), (result, saved) = (
        gradients(model, recompute) for recompute in ("none", "block", MATMUL)
    )
    assert saved[product] == never[product] < again[product]
    assert all(
        torch.equal(actual, reference) for actual, reference in zip(result, expected, strict=True)
    )


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, inputs: Any = (), options: Any = None) -> Any:
        self.count[op.name().partition(".")[0]] += 1
        return op(*inputs, **(options or {}))


def gradients(model: Model, recompute: Recompute) -> tuple[tuple[torch.Tensor, ...], Counter[str]]:
    model.set_recompute(recompute)
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH) % model.config.vocab_size
    with Calls() as calls:
        loss = model(tokens).square().mean()
        result = torch.autograd.grad(loss, list(model.parameters()))
    model.set_recompute("none")
    return result, calls.count


@pytest.mark.parametrize("rule", [MATMUL, BOTH])
def test_the_accounting_lists_the_results_that_are_kept(config: ModelConfig, rule: Rule) -> None:
    """The oracle is the garbage collector: the tensors that live after the forward pass."""
    model = Model(config)
    model.init_weights(1)
    shape = Shape(rows=2, seq_len=LENGTH, precision=PRECISIONS["fp32"], device="cpu")
    less, more = (
        sum(
            layer.activations
            for layer in model_passes(config, shape, [item] * len(config.layers)).layers
        )
        for item in ("block", rule)
    )
    # Each layer by itself, as the accounting sees it: no tables of positions or decays for all.
    with (
        mock.patch.object(base, "is_watched", lambda: True),
        mock.patch.object(constants, "is_watched", lambda: True),
    ):
        live = live_bytes(model, rule) - live_bytes(model, "block")
    assert abs(live - (more - less)) < 100, "a few small numbers"


def live_bytes(model: Model, rule: Rule) -> int:
    model.set_recompute(rule)
    before = living()
    outcome = model.hidden(torch.zeros(2, LENGTH, dtype=torch.int64))
    kept = sum(size for key, size in living().items() if key not in before)
    del outcome
    return kept


def living() -> dict[int, int]:
    gc.collect()
    tensors = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
    return {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors
    }


def test_saved_results_are_not_counted_as_recomputed(config: ModelConfig) -> None:
    model, layers = build_meta(config), len(config.layers)
    *whole, _ = flops_by_layer(model, LENGTH)
    products = [matrix_flops(block) for block in model.typed_blocks()]

    def count(recompute: Recompute) -> float:
        return recomputed_flops(model, LENGTH, expand_rules(recompute, layers))

    assert count("none") == 0
    assert count("block") == count("operator") == pytest.approx(sum(whole))
    assert count(("block", *["none"] * (layers - 1))) == pytest.approx(whole[0])
    assert count(MATMUL) == pytest.approx(sum(whole) - sum(products))


def test_a_result_that_is_written_to_is_computed_again() -> None:
    class Layer(Recomputable):
        def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            y = x @ weight
            y += 1.0
            return y.square()

    layer = Layer()
    x, weight = torch.randn(3, 4), torch.randn(4, 5, requires_grad=True)
    [expected] = torch.autograd.grad(layer(x, weight).sum(), weight)
    layer.recompute, layer.saved = True, MATMUL
    [result] = torch.autograd.grad(layer(x, weight).sum(), weight)
    assert torch.equal(result, expected)
