"""Small models: one for each operator and option that mixes positions, and one with everything.

A test that takes `tiny` runs on each of them; with `tiny_operator`, on all but the last.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from headrace.console.config import build
from headrace.models.config.config import ModelConfig
from headrace.models.config.pattern import parse_pattern
from headrace.models.model.model import Model

torch.set_num_threads(1)  # models of this size are slower on more

GLU = {"kind": "glu", "hidden": 24}
MIXERS: dict[str, dict[str, Any]] = {
    "mha": {"kind": "attention", "heads": 4},
    "gqa": {"kind": "attention", "heads": 4, "kv_heads": 2, "qk_norm": True, "qkv_bias": True},
    "gated": {
        "kind": "attention",
        "heads": 4,
        "kv_heads": 2,
        "qk_norm": True,
        "qk_norm_over": "projection",
        "qk_norm_kind": "rms-zero-centered",
        "output_gate": True,
        "sinks": True,
        "softmax_scale": 0.4,
        "norm_placement": "post",
        "rope": {"channels": 2},
    },
    "window": {
        "kind": "attention",
        "heads": 2,
        "window": 5,
        "rope": {"base": 100.0},
        "output_gate": True,
        "output_gate_per": "head",
    },
    "llama3": {
        "kind": "attention",
        "heads": 2,
        "rope": {"scaling": "llama3", "factor": 4.0, "original_length": 16},
    },
    "mla": {
        "kind": "mla",
        "heads": 4,
        "q_lora_rank": 6,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 5,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
    },
    "mla-no-rope": {
        "kind": "mla",
        "heads": 4,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 3,
        "qk_rope_head_dim": 2,
        "v_head_dim": 7,
        "rope": None,
        "softmax_scale": 0.3,
    },
    "mamba1": {"kind": "mamba1", "state_size": 4, "chunk": 8, "dt_rank": 3},
    "mamba1-heads": {"kind": "mamba1", "state_size": 4, "heads": 2, "chunk": 16, "dt_rank": 2},
    "mamba2": {"kind": "mamba2", "state_size": 8, "head_dim": 8, "chunk": 8},
    "mamba2-groups": {
        "kind": "mamba2",
        "state_size": 4,
        "head_dim": 4,
        "groups": 4,
        "chunk": 16,
        "bias": True,
    },
    "mamba2-plain": {
        "kind": "mamba2",
        "state_size": 4,
        "head_dim": 6,
        "heads": 2,
        "chunk": 8,
        "gated_norm": False,
        "projection_multipliers": [0.5, 2, 3, 0.7, 1.5],
        "norm_placement": "both",
        "input_multiplier": 2,
        "output_multiplier": 0.5,
    },
    "gdn": {
        "kind": "delta",
        "heads": 2,
        "value_heads": 4,
        "key_head_dim": 6,
        "value_head_dim": 8,
        "max_beta": 2,
        "chunk": 8,
    },
    "kda": {
        "kind": "delta",
        "heads": 4,
        "key_head_dim": 4,
        "value_head_dim": 4,
        "decay": "channel",
        "decay_rank": 4,
        "gate": "sigmoid",
        "gate_rank": 4,
        "chunk": 32,
    },
    "se": {"kind": "hyena-se", "groups": 4},
    "mr-direct": {
        "kind": "hyena-mr",
        "groups": 4,
        "taps": 11,
        "method": "direct",
        "filter_horizon": 64,
    },
    "mr-toeplitz": {"kind": "hyena-mr", "groups": 8, "taps": 50, "filter_horizon": 64},
    "mr-fft": {
        "kind": "hyena-mr",
        "groups": 2,
        "taps": 37,
        "method": "fft",
        "filter_horizon": 64,
        "decay": "strong",
    },
    "li": {"kind": "hyena-li", "state_size": 4, "chunk": 8},
    "li-fft": {"kind": "hyena-li", "state_size": 4, "method": "fft", "qkv_bias": True},
    "li-complex": {
        "kind": "hyena-li",
        "state_size": 2,
        "poles": "complex",
        "featurizer_bias": True,
        "chunk": 16,
    },
    "li-product": {"kind": "hyena-li", "state_size": 4, "rates": "product", "chunk": 8},
    "li-s4d": {"kind": "hyena-li-s4d", "state_size": 2, "groups": 8, "chunk": 8},
    "li-factored": {
        "kind": "hyena-li-factored",
        "state_size": 3,
        "pole_factors": 2,
        "filter_horizon": 40,
        "chunk": 8,
    },
    "freeform": {"kind": "hyena-li-freeform", "filter_horizon": 40},
    "freeform-learned": {
        "kind": "hyena-li-freeform",
        "filter_horizon": 40,
        "features": 5,
        "inner_layers": 1,
        "learned_decay": True,
        "last_start": "xavier",
    },
    "mr-heads": {
        "kind": "hyena-mr",
        "groups": 4,
        "taps": 20,
        "filter_horizon": 64,
        "slow_heads": True,
    },
    "li-heads": {
        "kind": "hyena-li",
        "state_size": 2,
        "groups": 4,
        "slow_heads": True,
        "method": "fft",
    },
    "freeform-heads": {
        "kind": "hyena-li-freeform",
        "filter_horizon": 40,
        "groups": 8,
        "slow_heads": True,
        "learned_decay": True,
    },
    "hyena-mlp": {"kind": "hyena-mlp", "hidden": 24, "groups": 6, "taps": 5},
    "hyena-mlp-savanna": {
        "kind": "hyena-mlp",
        "hidden": 24,
        "groups": 6,
        "featurizer": 3,
        "postgate": False,
        "output_bias": True,
    },
}


def tiny_model_config(pattern: str, operators: dict[str, Any], **more: Any) -> ModelConfig:
    data = {"vocab_size": 23, "width": 16, "pattern": pattern, "operators": operators, **more}
    return build(ModelConfig, data, source="a test")


def one_operator(name: str, **more: Any) -> ModelConfig:
    return tiny_model_config(f"[{name}] * 2", {name: MIXERS[name], "glu": GLU}, mlp="glu", **more)


def everything(**more: Any) -> ModelConfig:
    shared = {"kind": "zamba-block", "heads": 4, "hidden": 24, "rope": {}, "lora_rank": 3}
    mixers = (
        "gated",
        "mamba1",
        "mamba2",
        "mamba2-plain",
        "gdn",
        "se",
        "mr-toeplitz",
        "hyena-mlp",
        "li",
        "mha",
    )
    operators = {
        **{name: MIXERS[name] for name in mixers},
        "glu": GLU,
        "mlp": {"kind": "mlp", "hidden": 20, "bias": True},
        "moe": {"kind": "moe", "experts": 4, "hidden": 12},
        "sigmoid": {"kind": "moe", "experts": 3, "top_k": 1, "hidden": 12, "router": "sigmoid"},
        "a": {**shared, "attention_lora": True},
        "b": {**shared, "rope": None, "lora_rank": 0},
    }
    pattern = (
        "[gated, mamba2/none, a>mamba1/moe, se&mlp, mha|gdn, mr-toeplitz/hyena-mlp, li/sigmoid]"
        "+ [b>mamba2-plain, a>mha/none]"
    )
    multipliers = {"embedding_multiplier": 3.0, "logits_multiplier": 0.5}
    return tiny_model_config(pattern, operators, mlp="glu", **multipliers, **more)


TINY = {**{name: (lambda n=name: one_operator(n)) for name in MIXERS}, "everything": everything}


def built(config: ModelConfig, seed: int = 0) -> Model:
    """Build a model in fp64, with weights large enough that each of them matters."""
    model = Model(config)
    model.init_weights(seed)
    model.double().eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data += 0.1 * noise
    return model


@cache
def tiny_config(name: str) -> ModelConfig:
    return TINY[name]()


@pytest.fixture(params=TINY)
def tiny(request: pytest.FixtureRequest) -> Model:
    return built(tiny_config(request.param))


@pytest.fixture(name="everything")
def one_of_everything() -> Model:
    return built(tiny_config("everything"))


@pytest.fixture(params=MIXERS)
def tiny_operator(request: pytest.FixtureRequest) -> Model:
    """As `tiny`, without the model with everything."""
    return built(tiny_config(request.param))


@pytest.fixture(scope="session")
def tiny_of() -> Callable[..., Model]:
    """Function that builds a model from a pattern, `tiny_of("[mha, x]", {"x": {…}})`; the names of
    MIXERS are predefined."""

    def make_tiny(pattern: str, operators: dict[str, Any] | None = None, **more: Any) -> Model:
        used = {name for layer in parse_pattern(pattern, mlp=None) for name in layer.names}
        known = {**MIXERS, **(operators or {})}
        return built(tiny_model_config(pattern, {name: known[name] for name in used}, **more))

    return make_tiny
