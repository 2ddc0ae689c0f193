"""Latent attention beside the classes of transformers, in fp64; its cache."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headrace.models.config.options.mla import MLAOptions
from headrace.models.config.options.rope import Rope
from headrace.models.conversion.mla import mla_names
from headrace.models.conversion.names import operator_rules
from headrace.models.layers.rope import rotation
from headrace.models.model.model import Model
from headrace.models.operators import BatchContext
from headrace.models.operators.mla import MLA
from headrace.models.parallel.axes import Axes, Axis

WIDTH, LENGTH = 16, 11
SIZES = {
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 5,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
SETTINGS = {"hidden_size": WIDTH, "num_attention_heads": 3, "num_key_value_heads": 3, **SIZES}


def drawn(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def build_ours(**options: Any) -> MLA:
    mla = MLA(MLAOptions(heads=3, **SIZES, **options), WIDTH).double()
    for number, parameter in enumerate(mla.parameters()):
        parameter.data = 0.5 * drawn(*parameter.shape, seed=number)
    return mla


def build_theirs(family: str, class_name: str, **settings: Any) -> nn.Module:
    name = {"deepseek_v3": "DeepseekV3Config", "kimi_linear": "KimiLinearConfig"}[family]
    models = f"transformers.models.{family}"
    configuration = importlib.import_module(f"{models}.configuration_{family}")
    config = getattr(configuration, name)(**SETTINGS, **settings)
    config._attn_implementation = "eager"
    modeling = importlib.import_module(f"{models}.modeling_{family}")
    theirs: nn.Module = getattr(modeling, class_name)(config, layer_idx=0).double()
    return theirs


@pytest.mark.parametrize("q_lora_rank", [None, 6])
@pytest.mark.parametrize("interleaved", [True, False, None], ids=["pairs", "halves", "kimi"])
def test_it_is_that_of_transformers(
    q_lora_rank: int | None, interleaved: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs and all gradients, with weights that our rules of conversion export."""
    pytest.importorskip("transformers")
    rope = None if interleaved is None else Rope(base=100.0)
    mla = build_ours(rope=rope, q_lora_rank=q_lora_rank)
    if interleaved is None:
        theirs = build_theirs("kimi_linear", "KimiLinearAttention", q_lora_rank=q_lora_rank)
    else:
        settings = {"q_lora_rank": q_lora_rank, "rope_interleave": interleaved}
        theirs = build_theirs("deepseek_v3", "DeepseekV3Attention", **settings)
    names = mla_names(interleaved=bool(interleaved))
    rules = operator_rules(names, "ours", "theirs", mla.options, WIDTH)
    weights = {f"ours.{name}": parameter for name, parameter in mla.named_parameters()}
    assert {rule.ours for rule in rules} == set(weights)
    exported = {rule.theirs[0]: rule.export(weights[rule.ours].detach())[0] for rule in rules}
    theirs.load_state_dict({name.removeprefix("theirs."): t for name, t in exported.items()})
    for rule in rules:
        assert torch.equal(rule.restore([exported[rule.theirs[0]]]), weights[rule.ours])
    x, probe = drawn(2, LENGTH, WIDTH, seed=40), drawn(2, LENGTH, WIDTH, seed=41)
    positions = torch.arange(LENGTH)[None]
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    y = mla(leaves[0], BatchContext(positions))
    (y * probe).sum().backward()
    mask = torch.full((LENGTH, LENGTH), float("-inf")).triu(1).double()[None, None]
    arguments: dict[str, Any] = {"attention_mask": mask}
    if rope is not None:
        angles = rotation(rope, positions, SIZES["qk_rope_head_dim"])
        arguments["position_embeddings"] = tuple(
            torch.cat([t, t], dim=-1).squeeze(2).double() for t in angles
        )
    monkeypatch.setattr(torch, "float32", torch.float64)  # their softmax and norms round to fp32
    expected = theirs(leaves[1], **arguments)[0]
    assert torch.allclose(y, expected, rtol=1e-10, atol=1e-12)
    (expected * probe).sum().backward()
    assert leaves[0].grad is not None and leaves[1].grad is not None
    assert torch.allclose(leaves[0].grad, leaves[1].grad, rtol=1e-9, atol=1e-11)
    gradients = {f"theirs.{name}": p.grad for name, p in theirs.named_parameters()}
    for rule in rules:
        their_gradient, got = gradients[rule.theirs[0]], weights[rule.ours].grad
        assert (
            their_gradient is not None and got is not None and float(their_gradient.abs().max()) > 0
        )
        assert torch.allclose(rule.export(got)[0], their_gradient, rtol=1e-9, atol=1e-11), rule.ours


def test_the_cache_holds_latents_alone(tiny_of: Callable[..., Model]) -> None:
    """Three calls equal one; the cache is rank + rope numbers for a token."""
    model = tiny_of("[mla/none]")
    tokens = torch.arange(26).view(2, 13) * 5 % 23
    states = model.new_states(13)
    with torch.no_grad():
        parts = [model(part, states=states) for part in tokens.split([6, 1, 6], dim=1)]
        assert torch.allclose(torch.cat(parts, dim=1), model(tokens), rtol=1e-10, atol=1e-12)
    assert {name: tuple(t.shape) for name, t in states[0][0].tensors.items()} == {
        "latents": (2, 13, 8 + 4)
    }


def test_forms_that_send_latents() -> None:
    """A ring sends latents where an exchange of heads, to all ranks, would send more of them."""
    mla = build_ours()
    two = Axis(None, 0, 2)
    exchange, ring = Axes(tensor=two, context=two), Axes(context=two, attention="ring")
    assert mla.sends_latents(ring) and not mla.sends_latents(Axes(attention="ring"))
    assert not mla.sends_latents(exchange)
    mla.options = replace(mla.options, heads=8)
    assert mla.sends_latents(exchange)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"qk_rope_head_dim": 3}, "rope turns an even number of channels, up to 3: 3"),
        ({"v_head_dim": 0}, "v_head_dim must be at least 1, not 0"),
        ({"q_lora_rank": 0}, "q_lora_rank must be at least 1, not 0"),
        ({"rope": Rope(channels=2)}, "rope turns all 4 channels of qk_rope_head_dim: 2"),
        ({"softmax_scale": 0.0}, "softmax_scale must be above 0, not 0.0"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    assert message in list(MLAOptions(heads=3, **{**SIZES, **options}).problems(WIDTH))
