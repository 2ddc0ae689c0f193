"""The shared block against its formula; conversion/ compares it with transformers."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.kernels.operator_checks import BOUND, CUTS, LENGTHS, context, make, normal
from torch import Tensor
from torch.nn import functional as F

from headrace.models.operators.zamba import LowRank, ZambaCall

WIDTH = 8


def call_of(block: Any, seed: int) -> ZambaCall:
    call: ZambaCall = block.new_call().double()
    for number, parameter in enumerate(call.parameters()):
        parameter.data = 0.3 * normal(*parameter.shape, seed=seed + number)
    return call


def definition(block: Any, call: Any, h: Tensor, e: Tensor) -> Tensor:
    """MLP(norm(Attn(norm([h; e]))))·L, head by head."""
    heads, eps = block.options.heads, block.options.norm_eps

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()

    x = norm(torch.cat([h, e], dim=-1), block.norm.weight)
    parts = (x @ block.attention.qkv.weight.T).chunk(3, dim=-1)
    if call.qkv is not None:
        lows = zip(parts, call.qkv, strict=True)
        parts = tuple(t + x @ low.down.weight.T @ low.up.weight.T for t, low in lows)
    dim = 2 * WIDTH // heads
    outputs = []
    for q, k, v in zip(*(part.split(dim, dim=-1) for part in parts), strict=True):
        scores = q @ k.T * (dim / 2) ** -0.5
        later = torch.ones(len(q), len(q)).triu(1).bool()
        outputs.append(scores.masked_fill(later, float("-inf")).softmax(-1) @ v)
    x = norm(torch.cat(outputs, -1) @ block.attention.out.weight.T, block.mlp_norm.weight)
    both = x @ block.gate_up.weight.T
    if call.gate_up is not None:
        both = both + x @ call.gate_up.down.weight.T @ call.gate_up.up.weight.T
    gate, up = both.chunk(2, dim=-1)
    y: Tensor = (F.gelu(gate) * up) @ block.down.weight.T @ call.project.weight.T
    return y


@pytest.mark.parametrize(
    "options", [{}, {"lora_rank": 3}, {"lora_rank": 3, "attention_lora": True}]
)
def test_each_call_is_its_definition(options: dict[str, Any]) -> None:
    block = make("zamba-block", WIDTH, heads=4, hidden=6, **options)
    for seed in (10, 50):
        call = call_of(block, seed)
        for length in LENGTHS:
            h, e = normal(1, length, WIDTH), normal(1, length, WIDTH, seed=2)
            where = replace(context(1, length), embeddings=e)
            y = call(block, h, where)[0]
            assert (y - definition(block, call, h[0], e[0])).abs().max() < BOUND
    h, e = normal(1, CUTS[-1], WIDTH), normal(1, CUTS[-1], WIDTH, seed=2)
    where = replace(context(1, CUTS[-1], CUTS), embeddings=e)
    packed = call(block, h, where)[0]
    alone = [definition(block, call, h[0, a:b], e[0, a:b]) for a, b in itertools.pairwise(CUTS)]
    assert (packed - torch.cat(alone)).abs().max() < BOUND


def test_changes_are_seen() -> None:
    block = make("zamba-block", WIDTH, heads=4, hidden=6, lora_rank=3)
    call, h, e = call_of(block, 10), normal(1, 9, WIDTH), normal(1, 9, WIDTH, seed=2)
    where = replace(context(1, 9), embeddings=e)
    expected = definition(block, call, h[0], e[0])

    def swap_the_gate(block: Any) -> None:
        block.gate_up.weight.data = block.gate_up.weight.roll(6, dims=0)

    def swap_hidden_and_embeddings(block: Any) -> None:
        block.norm.weight.data = block.norm.weight.roll(WIDTH)

    def scale_by_the_whole_head(block: Any) -> None:
        block.attention.scale = block.attention.head_dim**-0.5

    for change in (swap_the_gate, swap_hidden_and_embeddings, scale_by_the_whole_head):
        changed = copy.deepcopy(block)
        change(changed)
        assert (call(changed, h, where)[0] - expected).abs().max() > 1e-3
    another = call_of(block, 50)(block, h, where)[0]
    assert (another - expected).abs().max() > 1e-2, "each call has weights of its own"


def test_a_correction_adds_to_its_base_in_place() -> None:
    """`kernel: auto` on a GPU does so; a wrong column is seen."""
    low, x = LowRank(6, 3, 4).double(), normal(2, 5, 6).requires_grad_()
    source, probe = normal(2, 5, 9, seed=1).requires_grad_(), normal(2, 5, 9, seed=2)
    leaves = (source, x, *low.parameters())

    def gradients(y: Tensor) -> tuple[Tensor, ...]:
        return y.detach(), *torch.autograd.grad((y * probe).sum(), leaves)

    def summed(start: int) -> Tensor:
        return 2 * source + F.pad(low(x), (start, 5 - start))

    base = 2 * source
    added = low(x, base, 2)
    assert added.data_ptr() == base.data_ptr()
    for got, expected in zip(gradients(added), gradients(summed(2)), strict=True):
        assert (got - expected).abs().max() < BOUND
    assert (added - summed(3)).abs().max() > 1e-2
