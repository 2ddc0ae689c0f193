from __future__ import annotations

from typing import Any

import pytest
import torch
from support.kernels.operator_checks import (
    documents_matter,
    is_its_definition,
    is_seen,
    make,
    rounds_to,
)
from torch import Tensor

from headrace.models.operators import BatchContext
from headrace.models.operators import attention as operator
from headrace.models.parallel.axes import Axes, Axis
from headrace.models.parallel.ring.circulation import KeysAndValues


def definition(attention: Any, u: Tensor) -> Tensor:
    """One query at a time; pairs (i, i + d/2) of a head are complex numbers, turned by position."""
    options, dim = attention.options, attention.head_dim
    kv_heads = options.kv_heads or options.heads
    q, k, v = (t.unflatten(-1, (-1, dim)) for t in attention.qkv(u)[:3])

    def turned(x: Tensor) -> Tensor:
        half = dim // 2
        speed = options.rope.base ** (-torch.arange(half, dtype=torch.float32) / half)
        angle = torch.arange(len(x)).float()[:, None] * speed  # in fp32, as everywhere
        turn = torch.complex(angle.cos(), angle.sin()).to(torch.complex128)
        spun = torch.complex(x[..., :half], x[..., half:]) * turn[:, None]
        return torch.cat([spun.real, spun.imag], dim=-1)

    if options.qk_norm:
        q, k = (t / (t.square().mean(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
        q, k = q * attention.q_norm.weight, k * attention.k_norm.weight
    if options.rope is not None:
        q, k = turned(q), turned(k)
    y = torch.zeros_like(q)
    for t in range(len(u)):
        first = 0 if options.window is None else max(0, t - options.window + 1)
        for head in range(options.heads):
            group = head * kv_heads // options.heads
            keys, values = k[first : t + 1, group], v[first : t + 1, group]
            scores = keys @ q[t, head] * (options.softmax_scale or dim**-0.5)
            if options.sinks:  # a score without a value
                scores = torch.cat([scores, attention.sinks[head : head + 1]])
            y[t, head] = scores.softmax(0)[: len(keys)] @ values
    if options.output_gate_per == "head":
        y = y * attention.qkv(u)[3].sigmoid()[:, :, None]
    y = y.flatten(1)
    if options.output_gate and options.output_gate_per == "channel":
        y = y * attention.qkv(u)[3].sigmoid()
    out: Tensor = attention.out(y)
    return out


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_heads": 2, "qkv_bias": True, "output_bias": True, "rope": None},
        {"kv_heads": 1, "qk_norm": True, "head_dim": 6},
        {"window": 5},
        {"window": 1, "rope": None},
        {"kv_heads": 2, "sinks": True, "window": 4},
        {"sinks": True, "softmax_scale": 0.3, "output_gate": True},
        {"kv_heads": 2, "output_gate": True, "output_gate_per": "head", "qkv_bias": True},
    ],
)
def test_is_its_definition(options: dict[str, Any]) -> None:
    is_its_definition(make("attention", heads=4, **options), definition)


def test_changes_are_seen() -> None:
    attention = make("attention", heads=4, kv_heads=2, window=5)

    def swap_keys_and_values(changed: Any) -> None:
        changed.qkv.weight[8:] = changed.qkv.weight[8:].roll(4, dims=0)

    def swap_groups(changed: Any) -> None:
        changed.qkv.weight[8:12] = changed.qkv.weight[8:12].roll(2, dims=0)

    def look_further(changed: Any) -> None:
        changed.options = make("attention", heads=4, kv_heads=2, window=6).options

    for change in (swap_keys_and_values, swap_groups, look_further):
        is_seen(attention, definition, change)
    documents_matter(attention, definition)


def test_in_bf16() -> None:
    rounds_to(make("attention", heads=4), 0.02)


def test_the_ring_takes_flash_attention_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    for name in ("ring_flash_attention", "ring_attention"):
        monkeypatch.setattr(operator, name, lambda *_, name=name, **__: taken.append(name))
    q = torch.zeros(1, 4, 2, 8)
    batch = BatchContext(torch.arange(4)[None], axes=Axes(context=Axis(None, 0, 2)))
    for fits, window in ((True, None), (True, 3), (False, None)):
        monkeypatch.setattr(
            operator, "supports_packed_attention", lambda kernel, q, fits=fits: fits
        )
        make("attention", heads=2, window=window).attend_ring(q, KeysAndValues(q, q), batch)
    assert taken == ["ring_flash_attention", "ring_attention", "ring_attention"]
