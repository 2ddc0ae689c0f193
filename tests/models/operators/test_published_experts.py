"""Experts beside the classes of transformers, in fp64: outputs, and every weight's gradient."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headrace.models.config.options.moe import MoEOptions
from headrace.models.operators import BatchContext
from headrace.models.operators.moe import MoE

pytest.importorskip("transformers")

WIDTH, HIDDEN, SHARED, EXPERTS, TOP_K = 16, 6, 10, 8, 3
ROUTED = {
    "hidden_size": WIDTH,
    "moe_intermediate_size": HIDDEN,
    "num_experts_per_tok": TOP_K,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
DEEPSEEK = {
    "router": "sigmoid",
    "router_bias": False,
    "router_fp32": True,
    "bias_update_rate": 1e-3,
    "groups": 4,
    "top_k_groups": 2,
    "normalize": True,
    "routed_scaling_factor": 2.5,
}
CORRECTED = {"correction_bias": "gate.e_score_correction_bias", "router.weight": "gate.weight"}
GATED = {"gate_up": "experts.gate_up_proj", "down": "experts.down_proj"}
SHARED_GLU = {
    "shared.gate_up.weight": ("gate_proj.weight", "up_proj.weight"),
    "shared.down.weight": ("down_proj.weight",),
}


def shared_names(prefix: str) -> dict[str, tuple[str, ...]]:
    names = SHARED_GLU.items()
    return {ours: tuple(f"{prefix}.{name}" for name in theirs) for ours, theirs in names}


CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "deepseek_v3": (
        "DeepseekV3Config",
        "DeepseekV3MoE",
        {**ROUTED, "n_routed_experts": EXPERTS, "n_shared_experts": 2},
        {**DEEPSEEK, "shared_hidden": 2 * HIDDEN},
        {**CORRECTED, **GATED, **shared_names("shared_experts")},
    ),
    "kimi_linear": (
        "KimiLinearConfig",
        "KimiLinearMoE",
        {
            **ROUTED,
            "num_local_experts": EXPERTS,
            "n_shared_experts": 1,
            "norm_topk_prob": False,
        },
        {**DEEPSEEK, "normalize": False, "shared_hidden": HIDDEN},
        {**CORRECTED, **GATED, **shared_names("shared_experts")},
    ),
    "nemotron_h": (
        "NemotronHConfig",
        "NemotronHMoE",
        {**ROUTED, "n_routed_experts": EXPERTS, "moe_shared_expert_intermediate_size": SHARED},
        {**DEEPSEEK, "gated": False, "activation": "relu2", "shared_hidden": SHARED},
        {
            **CORRECTED,
            "up": "experts.up_proj",
            "down": "experts.down_proj",
            "shared.up.weight": ("shared_experts.up_proj.weight",),
            "shared.down.weight": ("shared_experts.down_proj.weight",),
        },
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        "Qwen3NextSparseMoeBlock",
        {
            "hidden_size": WIDTH,
            "moe_intermediate_size": HIDDEN,
            "shared_expert_intermediate_size": SHARED,
            "num_experts": EXPERTS,
            "num_experts_per_tok": TOP_K,
            "norm_topk_prob": True,
        },
        {"shared_hidden": SHARED, "shared_gate": True},
        {
            **GATED,
            **shared_names("shared_expert"),
            "router.weight": "gate.weight",
            "shared_gate.weight": "shared_expert_gate.weight",
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssMLP",
        {
            "hidden_size": WIDTH,
            "intermediate_size": HIDDEN,
            "num_local_experts": EXPERTS,
            "num_experts_per_tok": TOP_K,
            "swiglu_limit": 1.5,
        },
        {
            "activation": "quick-gelu",
            "bias": True,
            "router_bias": True,
            "glu_limit": 1.5,
            "glu_offset": 1.0,
        },
        {
            "router.weight": "router.weight",
            "router.bias": "router.bias",
            "gate_up": "experts.gate_up_proj",
            "gate_up_bias": "experts.gate_up_proj_bias",
            "down": "experts.down_proj",
            "down_bias": "experts.down_proj_bias",
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridMoE",
        {
            "hidden_size": WIDTH,
            "intermediate_size": HIDDEN,
            "shared_intermediate_size": SHARED,
            "num_local_experts": EXPERTS,
            "num_experts_per_tok": TOP_K,
            "mamba_n_heads": 2,
        },
        {"shared_hidden": SHARED},
        {
            "router.weight": "experts.router.weight",
            "gate_up": "experts.experts.gate_up_proj",
            "down": "experts.experts.down_proj",
            "shared.gate_up.weight": "shared.input_linear.weight",
            "shared.down.weight": "shared.output_linear.weight",
        },
    ),
}


class GraniteExperts(nn.Module):
    """The sum that GraniteMoeHybridDecoderLayer computes."""

    def __init__(self, experts: nn.Module, shared: nn.Module) -> None:
        super().__init__()
        self.experts, self.shared = experts, shared

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = self.experts(x) + self.shared(x)
        return total


def to_theirs(family: str, name: str, ours: Tensor) -> Tensor:
    """Return a tensor in their layout: gpt-oss alternates gates and ups, and transposes."""
    if family != "gpt_oss" or name.startswith("router") or name == "down_bias":
        return ours
    if name.startswith("gate_up"):
        ours = torch.stack(ours.chunk(2, dim=1), dim=2).flatten(1, 2)
    return ours if name.endswith("bias") else ours.transpose(1, 2)


def build_pair(family: str) -> tuple[MoE, nn.Module, Callable[[str, Tensor], list[Tensor]]]:
    """Build ours and theirs with equal weights, and a function from our tensors to theirs."""
    config_name, class_name, settings, options, names = CASES[family]
    models = f"transformers.models.{family}"
    config = getattr(importlib.import_module(f"{models}.configuration_{family}"), config_name)
    modeling = importlib.import_module(f"{models}.modeling_{family}")
    theirs = getattr(modeling, class_name)(config(**settings)).double()
    if family == "granitemoehybrid":
        shared = modeling.GraniteMoeHybridMLP(config(**settings)).double()
        theirs = GraniteExperts(theirs, shared)
    moe = MoE(MoEOptions(experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, **options), WIDTH).double()
    generator = torch.Generator().manual_seed(3)
    state = dict(theirs.state_dict())

    def split(name: str, tensor: Tensor) -> list[Tensor]:
        parts = names[name] if isinstance(names[name], tuple) else (names[name],)
        return list(to_theirs(family, name, tensor).chunk(len(parts), dim=0))

    assert set(names) == dict(moe.named_parameters()).keys()
    for name, parameter in moe.named_parameters():
        draw = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data = 0.2 * draw if name == "correction_bias" else 0.5 * draw
        parts = names[name] if isinstance(names[name], tuple) else (names[name],)
        for part, tensor in zip(parts, split(name, parameter.data), strict=True):
            state.pop(part).copy_(tensor)
    assert not state, f"tensors without a name of ours: {list(state)}"
    return moe, theirs, split


@pytest.mark.parametrize("family", CASES)
def test_experts_are_those_of_transformers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    moe, theirs, split = build_pair(family)
    x = torch.randn(2, 9, WIDTH, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    probe = torch.randn(x.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    y = moe(leaves[0], BatchContext(torch.zeros(1, 1)))
    monkeypatch.setattr(torch, "float32", torch.float64)  # their routers round to fp32
    monkeypatch.setattr(torch, "float", torch.float64)
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    result = theirs(leaves[1])
    expected = result[0] if isinstance(result, tuple) else result
    assert torch.allclose(y, expected, rtol=1e-10, atol=1e-12)
    ours = [parameter for parameter in moe.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad((y * probe).sum(), [leaves[0], *ours])
    (expected * probe).sum().backward()
    assert leaves[1].grad is not None
    assert torch.allclose(gradients[0], leaves[1].grad, rtol=1e-10, atol=1e-12)
    their_parameters, names = dict(theirs.named_parameters()), CASES[family][-1]
    trained = [name for name, parameter in moe.named_parameters() if parameter.requires_grad]
    for name, gradient in zip(trained, gradients[1:], strict=True):
        parts = names[name] if isinstance(names[name], tuple) else (names[name],)
        for part, tensor in zip(parts, split(name, gradient), strict=True):
            their_gradient = their_parameters[part].grad
            assert their_gradient is not None and float(their_gradient.abs().max()) > 0
            assert torch.allclose(tensor, their_gradient, rtol=1e-9, atol=1e-11), (name, part)


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("deepseek_v3", {"routed_scaling_factor": 2.4}),
        ("deepseek_v3", {"groups": 2}),
        ("kimi_linear", {"normalize": True}),
        ("nemotron_h", {"activation": "relu"}),
        ("gpt_oss", {"glu_limit": 1.6}),
        ("gpt_oss", {"glu_offset": 0.9}),
    ],
)
def test_changed_options_are_seen(
    family: str, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    moe, theirs, _ = build_pair(family)
    moe.options = dataclasses.replace(moe.options, **change)
    x = torch.randn(2, 9, WIDTH, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    with torch.no_grad():
        y = moe(x, BatchContext(torch.zeros(1, 1)))
        monkeypatch.setattr(torch, "float32", torch.float64)
        result = theirs(x)
    expected = result[0] if isinstance(result, tuple) else result
    assert float((y - expected).abs().max()) > 1e-3
