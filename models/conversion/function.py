"""What a configuration computes, so that two of them can be compared: every default written out,
and without labels, kernels and what only training uses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from ..config.config import ModelConfig
from ..config.options.attention import AttentionOptions
from ..config.options.base import OperatorOptions
from ..config.options.delta import DeltaOptions
from ..config.options.mamba1 import Mamba1Options
from ..config.options.mamba2 import Mamba2Options
from ..config.options.mla import MLAOptions
from ..config.options.moe import MoEOptions
from ..config.options.rope import Rope
from ..layers.rope import yarn_amplitude

LABELS = {"pattern", "mlp", "operators", "kernel", "init", "isolate_documents"}
"""Fields of a model that its layers say, or that do not change what it computes for a document."""
SPEED_OR_TRAINING = {"kernel", "chunk", "balance_loss", "balance_over", "z_loss", "capacity_factor"}
"""Options of operators that do not change what they compute in evaluation."""


def differences(config: ModelConfig, reference: ModelConfig) -> Iterator[str]:
    """Yield the fields whose values differ from those in `reference`, with both values."""
    pair = [
        replace(model, final_norm=model.final_norm or model.norm) for model in (config, reference)
    ]
    for name in (field.name for field in fields(ModelConfig) if field.name not in LABELS):
        value, expected = (getattr(model, name) for model in pair)
        if not is_equal(value, expected):
            yield f"{name} is {value!r}, not {expected!r}"
    if len(config.layers) != len(reference.layers):
        yield f"it has {len(config.layers)} layers, not {len(reference.layers)}"
    compared = set()
    for layers in zip(config.layers, reference.layers, strict=False):
        for field in fields(layers[0]):
            names = tuple(getattr(layer, field.name) for layer in layers)
            if names in compared:
                continue
            compared.add(names)
            value, expected = names
            if isinstance(value, str) and isinstance(expected, str):
                yield from option_differences(value, config, expected, reference)
            elif value != expected:
                yield f"a layer's {field.name} is {value!r}, not {expected!r}"


def is_equal(value: Any, expected: Any) -> bool:
    """Compare; numbers to the last digits, which a reciprocal may lose."""
    if isinstance(value, float) and isinstance(expected, float):
        return math.isclose(value, expected, rel_tol=1e-12)
    return bool(value == expected)


def option_differences(
    name: str, config: ModelConfig, expected: str, reference: ModelConfig
) -> Iterator[str]:
    """Yield the options in which an operator differs from another's."""
    options = resolve(config.operators[name], config.width)
    expected_options = resolve(reference.operators[expected], reference.width)
    if type(options) is not type(expected_options):
        yield f"operators.{name} is of kind {options.kind}, not {expected_options.kind}"
        return
    for field in fields(options):
        value, expected_value = getattr(options, field.name), getattr(expected_options, field.name)
        if field.name not in SPEED_OR_TRAINING and not is_equal(value, expected_value):
            yield f"operators.{name}.{field.name} is {value!r}, not {expected_value!r}"


def resolve(options: OperatorOptions, width: int) -> OperatorOptions:
    """Return the same options with every default written out."""
    resolver = RESOLVERS.get(type(options))
    return options if resolver is None else resolver(options, width)


def resolve_attention(options: AttentionOptions, width: int) -> AttentionOptions:
    dim = options.dim(width)
    return replace(
        options,
        head_dim=dim,
        softmax_scale=options.softmax_scale or dim**-0.5,
        kv_heads=options.kv_heads or options.heads,
        qk_norm_eps=options.qk_norm_eps if options.qk_norm else 1.0,
        rope=None if options.rope is None else resolve_rope(options.rope, dim),
    )


def resolve_rope(rope: Rope, head_dim: int) -> Rope:
    """Return the rotation alone: without the lengths and bounds that its scaling does not use, and
    with NTK's base in place of its factor."""
    rope = replace(rope, channels=rope.channels or head_dim)
    unused: dict[str, Any] = {}
    if rope.scaling not in ("yarn", "llama3"):
        unused["original_length"] = 1
    if rope.scaling == "yarn":
        unused["attention_factor"] = yarn_amplitude(rope)
    else:
        unused |= {"beta_fast": 2.0, "beta_slow": 1.0}
    if rope.scaling != "llama3":
        unused |= {"low_freq_factor": 1.0, "high_freq_factor": 2.0}
    if rope.scaling == "ntk":
        unused |= {"base": ntk_base(rope, rope.channels or head_dim)}
        unused |= {"scaling": "none", "factor": 1.0}
    return replace(rope, **unused)


def ntk_base(rope: Rope, channels: int) -> float:
    """Return the base by which NTK scaling replaces a factor."""
    return float(rope.base * rope.factor ** (channels / (channels - 2)))


RESOLVERS: dict[type[OperatorOptions], Callable[[Any, int], OperatorOptions]] = {
    AttentionOptions: resolve_attention,
    DeltaOptions: lambda options, width: replace(options, value_heads=options.state_heads),
    MLAOptions: lambda options, width: replace(
        options,
        softmax_scale=options.softmax_scale or options.qk_head_dim**-0.5,
        rope=options.rope and resolve_rope(options.rope, options.qk_rope_head_dim),
    ),
    Mamba1Options: lambda options, width: replace(options, dt_rank=options.rank(width)),
    Mamba2Options: lambda options, width: replace(
        options,
        heads=options.num_heads(width),
        expand=1,
        norm_groups=options.norm_groups or options.groups,
    ),
    MoEOptions: lambda options, width: replace(
        options,
        normalize=options.normalizes,
        router_bias=options.has_router_bias,
        bias_update_rate=None if options.bias_update_rate is None else 0.0,
    ),
}
