from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.kernels.operator_checks import (
    context,
    convolved,
    documents_matter,
    is_its_definition,
    is_seen,
    make,
    normal,
    rounds_to,
)
from support.models.peers import in_fp64, without_fla
from torch import Tensor, nn
from torch.nn import functional as F

DIMS = {"heads": 2, "key_head_dim": 3, "value_head_dim": 4}
GDN = {**DIMS, "value_heads": 4}
KDA = {**DIMS, "decay": "channel", "decay_rank": 5, "gate": "sigmoid", "gate_rank": 3}


def definition(delta: Any, u: Tensor) -> Tensor:
    """The recurrence, token by token, for each state separately."""
    options, parts = delta.options, delta.input.parts
    columns = (u @ delta.input.weight.T).split(list(parts.values()), dim=-1)
    projected = dict(zip(parts, columns, strict=True))
    qkv = torch.cat([projected[name] for name in "qkv"], dim=-1)
    q, k, v = F.silu(convolved(qkv, delta.conv.taps)).split([parts[name] for name in "qkv"], -1)
    decay, gate = projected["decay"], projected.get("gate")
    if delta.decay_up is not None:
        decay = decay @ delta.decay_up.weight.T
    if delta.gate_up is not None:
        gate = gate @ delta.gate_up.weight.T
    steps = F.softplus(decay + delta.dt_bias)
    outputs = []
    for head in range(options.state_heads):
        key_head = head * options.heads // options.state_heads
        keys = slice(key_head * options.key_head_dim, (key_head + 1) * options.key_head_dim)
        values = slice(head * options.value_head_dim, (head + 1) * options.value_head_dim)
        width = options.key_head_dim if options.decay == "channel" else 1
        state = u.new_zeros(options.key_head_dim, options.value_head_dim)
        ys = []
        for t in range(len(u)):
            q_t, k_t = q[t, keys], k[t, keys]
            if options.qk_norm:
                q_t, k_t = (x / (x.square().sum() + 1e-6).sqrt() for x in (q_t, k_t))
            rate = delta.A_log[head].exp() * steps[t, head * width : (head + 1) * width]
            state = torch.exp(-rate)[:, None] * state
            beta = options.max_beta * torch.sigmoid(projected["beta"][t, head])
            state = state + beta * torch.outer(k_t, v[t, values] - state.T @ k_t)
            y = state.T @ q_t * options.key_head_dim**-0.5
            y = y / (y.square().mean() + options.norm_eps).sqrt() * delta.norm.weight
            if gate is not None:
                y = y * {"silu": F.silu, "sigmoid": torch.sigmoid}[options.gate](gate[t, values])
            ys.append(y)
        outputs.append(torch.stack(ys))
    return torch.cat(outputs, dim=-1) @ delta.output.weight.T


@pytest.mark.parametrize(
    "options",
    [
        {**GDN, "chunk": 8, "max_beta": 2},
        {**GDN, "chunk": 1, "gate": None, "conv": 2},
        {**GDN, "decay": "channel", "chunk": 16},
        {**KDA, "chunk": 20},
        {"heads": 1, "key_head_dim": 2, "value_head_dim": 2, "qk_norm": False, "chunk": 8},
    ],
)
def test_is_its_definition(options: dict[str, Any]) -> None:
    is_its_definition(make("delta", **options), definition)


@pytest.mark.parametrize("options", [GDN, KDA])
def test_changes_are_seen(options: dict[str, Any]) -> None:
    delta = make("delta", **options, chunk=8)
    parts = delta.input.parts

    def shift_the_filter(changed: Any) -> None:
        changed.conv.taps[:] = changed.conv.taps.roll(1, dims=1)

    def swap_keys(changed: Any) -> None:
        keys = slice(parts["q"], parts["q"] + parts["k"])
        changed.input.weight[keys] = changed.input.weight[keys].flip(0)

    def swap_decays(changed: Any) -> None:
        changed.dt_bias[:] = changed.dt_bias.flip(0) + 1

    for change in (shift_the_filter, swap_keys, swap_decays):
        is_seen(delta, definition, change)
    documents_matter(delta, definition)


@pytest.mark.parametrize("options", [GDN, KDA])
def test_in_bf16(options: dict[str, Any]) -> None:
    """The norm of a head with few channels would magnify their rounding."""
    wide = {**options, "key_head_dim": 16, "value_head_dim": 16}
    rounds_to(make("delta", **wide, chunk=8), 0.03)


# transformers


def olmo_hybrid() -> nn.Module:
    from transformers.models.olmo_hybrid import modeling_olmo_hybrid as olmo
    from transformers.models.olmo_hybrid.configuration_olmo_hybrid import OlmoHybridConfig

    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    dims = {"linear_key_head_dim": 3, "linear_value_head_dim": 4}
    config = OlmoHybridConfig(hidden_size=8, num_attention_heads=2, **heads, **dims)
    return olmo.OlmoHybridGatedDeltaNet(config, layer_idx=0)


def qwen3_next() -> nn.Module:
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen
    from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig

    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    dims = {"linear_key_head_dim": 3, "linear_value_head_dim": 4}
    config = Qwen3NextConfig(hidden_size=8, rms_norm_eps=1e-5, **heads, **dims)
    return qwen.Qwen3NextGatedDeltaNet(config, layer_idx=0)


def kimi_linear() -> nn.Module:
    from transformers.models.kimi_linear import modeling_kimi_linear as kimi
    from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig

    config = KimiLinearConfig(hidden_size=8, linear_head_dim=4, linear_num_heads=2)
    return kimi.KimiLinearDeltaAttention(config, layer_idx=0)


def separate_projections(names: dict[str, str]) -> Callable[[nn.Module], dict[str, Tensor]]:
    """Return a function from a layer of transformers to our weights by name; `names` are its
    projections in our order, and other weights."""

    def convert(theirs: nn.Module) -> dict[str, Tensor]:
        weights = {ours: theirs.get_parameter(name) for ours, name in names.items()}
        parts = [weights.pop(part) for part in ("q", "k", "v", "gate", "decay", "beta")]
        weights["conv.taps"] = weights["conv.taps"].flip(-1)  # our first tap is the present token's
        return {"input.weight": torch.cat(parts), **weights}

    return convert


def fused_projections(theirs: nn.Module) -> dict[str, Tensor]:
    """Take apart Qwen3-Next's q, k, v and z, and b and a, of each key head."""
    qkvz = theirs.get_parameter("in_proj_qkvz.weight").unflatten(0, (2, -1))
    ba = theirs.get_parameter("in_proj_ba.weight").unflatten(0, (2, -1))
    parts = [*qkvz.split([3, 3, 2 * 4, 2 * 4], dim=1), *ba.split([2, 2], dim=1)[::-1]]
    names = {"conv.taps": "conv1d.weight", "norm.weight": "norm.weight"}
    names |= {"output.weight": "out_proj.weight", "dt_bias": "dt_bias", "A_log": "A_log"}
    weights = {ours: theirs.get_parameter(name) for ours, name in names.items()}
    weights["conv.taps"] = weights["conv.taps"].flip(-1)
    return {"input.weight": torch.cat([part.flatten(0, 1) for part in parts]), **weights}


COMMON = {"q": "q_proj.weight", "k": "k_proj.weight", "v": "v_proj.weight"} | {
    "beta": "b_proj.weight",
    "conv.taps": "conv1d.weight",
    "norm.weight": "o_norm.weight",
    "output.weight": "o_proj.weight",
}
PUBLISHED: dict[str, Any] = {
    "olmo-hybrid": (
        olmo_hybrid,
        {**GDN, "max_beta": 2},
        separate_projections(
            {**COMMON, "gate": "g_proj.weight", "decay": "a_proj.weight"}
            | {"dt_bias": "dt_bias", "A_log": "A_log"}
        ),
    ),
    "qwen3-next": (qwen3_next, GDN, fused_projections),
    "kimi-linear": (
        kimi_linear,
        {**KDA, "key_head_dim": 4, "decay_rank": 4, "gate_rank": 4},
        separate_projections(
            {**COMMON, "gate": "g_a_proj.weight", "decay": "forget_gate.f_a_proj.weight"}
            | {
                "decay_up.weight": "forget_gate.f_b_proj.weight",
                "gate_up.weight": "g_b_proj.weight",
            }
            | {"dt_bias": "forget_gate.dt_bias", "A_log": "forget_gate.A_log"}
        ),
    ),
}


@pytest.mark.slow  # transformers and fla take long to import
@pytest.mark.parametrize("name", PUBLISHED)
def test_equals_transformers(name: str) -> None:
    """Outputs and every gradient in fp64; a padded last chunk, and several chunks."""
    build, options, convert = PUBLISHED[name]
    with without_fla():
        theirs = build().double()
    for number, parameter in enumerate(theirs.parameters()):
        parameter.data = normal(*parameter.shape, seed=number) * 0.5
    ours = make("delta", **options, chunk=16)
    weights = convert(theirs)
    assert set(weights) == {parameter for parameter, _ in ours.named_parameters()}
    ours.load_state_dict(
        {key: x.detach().reshape(ours.get_parameter(key).shape) for key, x in weights.items()}
    )
    u, probe = normal(2, 150, 8), normal(2, 150, 8, seed=2)
    y = ours(u, context(2, 150))
    expected = in_fp64(theirs, u)
    gradients = torch.autograd.grad((expected * probe).sum(), list(theirs.parameters()))
    assert (y - expected).abs().max() < 1e-12
    (y * probe).sum().backward()
    for parameter, gradient in zip(theirs.parameters(), gradients, strict=True):
        parameter.data = gradient  # convert them as the weights
    for key, gradient in convert(theirs).items():
        got = ours.get_parameter(key).grad
        assert (got - gradient.reshape(got.shape)).abs().max() < 1e-11, key
