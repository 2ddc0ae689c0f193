"""Random small models of our own operators: options that people may combine, on odd sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import torch

from headrace.console.config import build
from headrace.models.config.config import ModelConfig
from headrace.models.config.options import OPTIONS
from headrace.models.config.options.rope import Rope
from headrace.models.model.model import Model

Values = dict[str, Any]
Choices = Mapping[str, Sequence[Any]]
UNSET: Any = ...
"""Stands for a key that is left out."""


def rarely(*values: Any) -> list[Any]:
    return [UNSET] * (2 * len(values)) + list(values)


ROPES: list[Any] = [
    *(UNSET, UNSET, None, {"base": 30.0}, {"channels": 2}, {"channels": 4, "base": 100.0}),
    *({"scaling": kind, "factor": 4.0} for kind in ("linear", "ntk")),
    *({"scaling": kind, "factor": 1.5, "original_length": 8} for kind in ("yarn", "llama3")),
    {"scaling": "yarn", "factor": 4.0, "original_length": 8, "truncate": False},
    {"proportion": 0.5},
]
COMMON: Choices = {
    "input_multiplier": rarely(0.5),
    "output_multiplier": rarely(0.22),
    "norm_placement": rarely("post", "both"),
}
HYENA: Choices = {
    "featurizer": rarely(1, 2, 4),
    "featurizer_bias": rarely(True),
    "qkv_bias": rarely(True),
    "output_bias": rarely(False),
}
MODAL: Choices = {
    **HYENA,
    "groups": rarely(2, 3, 4, 8),
    "slow_heads": rarely(True),
    "state_size": [1, 2, 4],
    "chunk": [1, 4, 8, 32],
    "method": rarely("fft"),
}
MIXERS: Mapping[str, Choices] = {
    "attention": {
        "heads": [2, 4, 8],
        "kv_heads": [UNSET, 1, 2, 4],
        "head_dim": [2, 4, 6],
        "rope": ROPES,
        "window": rarely(1, 2, 5, 16),
        "qk_norm": rarely(True),
        "qk_norm_over": rarely("projection"),
        "qk_norm_kind": rarely("rms-zero-centered"),
        "softmax_scale": rarely(0.7),
        "sinks": rarely(True),
        "output_gate": [UNSET, True],
        "output_gate_per": rarely("head"),
        "qkv_bias": rarely(True),
        "output_bias": rarely(True),
    },
    "mla": {
        "heads": [2, 4],
        "q_lora_rank": [UNSET, 1, 5],
        "kv_lora_rank": [1, 3, 16],
        "qk_nope_head_dim": [1, 3, 8],
        "qk_rope_head_dim": [2, 4],
        "v_head_dim": [1, 3, 9],
        "rope": [rope for rope in ROPES if rope in (UNSET, None) or "channels" not in rope],
    },
    "mamba1": {
        "state_size": [1, 3],
        "heads": [1, 2],
        "expand": [1, 2, 3],
        "conv": [1, 2, 4, 7],
        "dt_rank": [UNSET, 1, 3],
        "chunk": [1, 7, 32],
    },
    "mamba2": {
        "state_size": [1, 3, 6],
        "heads": [2, 4, 6],
        "head_dim": [1, 3, 4],
        "groups": [1, 2, 3],
        "norm_groups": rarely(1, 3, 4),
        "conv": [1, 2, 4, 7],
        "bias": rarely(True),
        "gated_norm": rarely(False),
        "projection_multipliers": rarely([0.5, 2, 3, 0.7, 1.5]),
        "chunk": [1, 7, 64],
    },
    "delta": {
        "heads": [1, 2, 3],
        "value_heads": [UNSET, 2, 4, 6],
        "key_head_dim": [1, 2, 6],
        "value_head_dim": [1, 3, 8],
        "decay": ["head", "channel"],
        "decay_rank": rarely(2),
        "max_beta": [1, 2],
        "conv": [1, 2, 4, 7],
        "qk_norm": rarely(False),
        "gate": rarely(None, "sigmoid"),
        "gate_rank": rarely(2),
        "chunk": [1, 4, 16, 64],
    },
    "hyena-se": {
        **HYENA,
        "groups": [1, 2, 4],
        "taps": [1, 2, 7, 16],
        "pregate": rarely(False),
        "postgate": rarely(False),
    },
    "hyena-mr": {
        **HYENA,
        "groups": [1, 2, 4, 8],
        "slow_heads": rarely(True),
        "taps": [1, 5, 16, 17, 33],
        "filter_horizon": [40, 64],
        "decay": rarely("none", "strong"),
        "method": rarely("direct", "toeplitz", "fft"),
    },
    "hyena-li": {
        **MODAL,
        "poles": rarely("complex"),
        "rates": rarely("plain", "product"),
    },
    "hyena-li-s4d": MODAL,
    "hyena-li-factored": {**MODAL, "filter_horizon": [40], "pole_factors": [1, 3]},
    "hyena-li-freeform": {
        **HYENA,
        "groups": rarely(2, 3, 4),
        "filter_horizon": [2, 9, 64],
        "filter_width": [4],
        "features": [3, 5],
        "learned_decay": rarely(True),
    },
    "hyena-mlp": {"hidden": [12, 24], "groups": [2, 12], "taps": [2, 3, 7], "bias": rarely(True)},
}
MLPS: Mapping[str, Choices] = {
    "glu": {
        "hidden": [6, 10],
        "activation": rarely("gelu", "identity"),
        "bias": rarely(True),
        "gate_multiplier": rarely(0.6),
    },
    "mlp": {"hidden": [6, 10], "activation": rarely("relu2"), "bias": rarely(True)},
    "hyena-mlp": {
        "hidden": [12, 24],
        "groups": [1, 4, 12],
        "featurizer": rarely(3),
        "pregate": rarely(False),
        "output_bias": rarely(True),
    },
    "moe": {
        "experts": [2, 4, 6, 8],
        "hidden": [2, 6],
        "top_k": [1, 2, 3],
        "groups": [1, 1, 2],
        "top_k_groups": [1, 2],
        "activation": rarely("relu2", "quick-gelu"),
        "gated": rarely(False),
        "bias": rarely(True),
        "glu_limit": rarely(0.3),
        "glu_offset": rarely(1.0),
        "shared_hidden": [UNSET, 4],
        "shared_gate": rarely(True),
        "router": ["softmax", "sigmoid"],
        "router_bias": rarely(True, False),
        "normalize": rarely(True, False),
        "routed_scaling_factor": rarely(2.5),
        "bias_update_rate": rarely(0.1),
        "capacity_factor": rarely(0.3, 1.0),
        "sinkhorn": rarely(True),
        "balance_loss": rarely(0.1),
        "z_loss": rarely(0.01),
    },
}
BLOCKS: Choices = {
    "heads": [2, 4],
    "hidden": [6, 10],
    "rope": [UNSET, {"base": 100.0}],
    "lora_rank": [0, 2],
    "attention_lora": rarely(True),
}
MODELS: Choices = {
    "width": [8, 12, 24],
    "norm": ["rms", "rms", "layer", "rms-eps-outside", "rms-zero-centered"],
    "tie_embeddings": [True, False],
    "learned_positions": rarely(128),
    "embedding_multiplier": rarely(3.0),
    "logits_multiplier": rarely(0.3),
}
VOCABULARY = 23


def draw_values(random: Random, choices: Choices) -> Values:
    values = {key: random.choice(list(options)) for key, options in choices.items()}
    return {key: value for key, value in values.items() if value is not UNSET}


def draw_operator(random: Random, width: int, kind: str, choices: Choices) -> Values:
    """Draw options again until they fit each other and the width."""
    while True:
        values = draw_values(random, choices)
        rope = values.get("rope")
        options = OPTIONS[kind](**{**values, **({"rope": Rope(**rope)} if rope else {})})
        if not any(options.problems(width)):
            return {"kind": kind, **values}


def draw_model(seed: int) -> ModelConfig:
    """Return two or three layers of two or three mixers, two of which may stand side by side, with
    two kinds of MLPs or none, perhaps fed by a shared block."""
    random = Random(f"operators {seed}")
    model = draw_values(random, MODELS)
    width, pair = model["width"], random.random() < 0.3
    mixers = random.sample(sorted(MIXERS), k=random.choice([2, 3]))
    mlps = random.sample(sorted(MLPS), k=2)
    operators = {}
    for kind in mixers:
        choices = {**COMMON, **MIXERS[kind], **({"norm_placement": [UNSET]} if pair else {})}
        operators[f"mixer-{kind}"] = draw_operator(random, width, kind, choices)
    for kind in mlps:
        choices = {**COMMON, **MLPS[kind]}
        operators[f"mlp-{kind}"] = draw_operator(random, width, kind, choices)
    names = [f"mixer-{kind}" for kind in mixers]
    layers = ["|".join(names[:2]), *names[2:]] if pair else names
    layers = [f"{layer}{random.choice('//&')}mlp-{random.choice(mlps)}" for layer in layers]
    if random.random() < 0.3:
        operators["block"] = draw_operator(random, width, "zamba-block", BLOCKS)
        layers[-1] = f"block>{layers[-1]}"
    layers += random.choice([[], [f"{names[0]}/none"]]) if not pair else []
    pattern = f"[{', '.join(layers)}]"
    used = {name: values for name, values in operators.items() if name in pattern}
    values = {"vocab_size": VOCABULARY, **model, "pattern": pattern, "operators": used}
    return build(ModelConfig, values, source="drawn")


def build_drawn(config: ModelConfig, seed: int) -> Model:
    """Build a model in fp64 with weights whose biases, rates and norms are random, too."""
    model = Model(config)
    model.init_weights(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.double().named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            rate = name.endswith(("A_log", "dt_bias"))
            matrix = parameter.dim() > 1 and not rate
            parameter.add_(noise * (0.3 / parameter.shape[-1] ** 0.5 if matrix else 0.1))
    return model
