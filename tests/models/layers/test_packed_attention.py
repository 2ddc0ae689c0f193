"""Packed attention by one call, with an emulation of torch's `varlen_attn`, which needs a GPU."""

from __future__ import annotations

from functools import wraps
from typing import Any

import pytest
import torch
from support.kernels.operator_checks import make, normal
from support.kernels.varlen import emulated, of_torch_2_11
from torch import Tensor
from torch.nn.attention import varlen

from headrace.models.documents import Documents
from headrace.models.operators import BatchContext
from headrace.models.operators import attention as operator

SHAPE = (2, 12)
ENDS = [0, 3, 4, 12, 19, 24]


def outputs(attention: Any, x: Tensor) -> list[Tensor]:
    """Return the output of packed rows, and the gradients of input and weights."""
    documents = Documents.build(torch.tensor(ENDS, dtype=torch.int32), SHAPE)
    leaf = x.clone().requires_grad_()
    y = attention(leaf, BatchContext(documents.positions, documents))
    weights = list(attention.parameters())
    return [y, *torch.autograd.grad(y.square().sum(), [leaf, *weights])]


@pytest.mark.parametrize("version", [emulated, of_torch_2_11])
@pytest.mark.parametrize(
    "options",
    [{}, {"kv_heads": 2}, {"window": 3}, {"window": 1, "kv_heads": 1}, {"rope": None}],
)
def test_one_call_equals_documents_alone(
    options: dict[str, Any], version: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = make("attention", heads=4, **options)
    x = normal(*SHAPE, attention.width)
    expected = outputs(attention, x)
    calls = []

    @wraps(version)  # with its signature
    def call(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(args)
        return version(*args, **kwargs)

    monkeypatch.setattr(varlen, "varlen_attn", call)
    monkeypatch.setattr(operator, "supports_packed_attention", lambda kernel, q: True)
    result = outputs(attention, x)
    assert len(calls) == 1
    for expected_output, output in zip(expected, result, strict=True):
        assert torch.allclose(expected_output, output, atol=1e-10, rtol=1e-10)


def test_documents_that_are_not_kept_apart_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: one end is left out."""
    attention = make("attention", heads=4)
    x = normal(*SHAPE, attention.width)
    expected = outputs(attention, x)

    def joined(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, *_: Any, **options: Any) -> Tensor:
        fewer = ends[ends != ENDS[2]]
        return emulated(q, k, v, fewer, fewer, 99, 99, **options)

    monkeypatch.setattr(varlen, "varlen_attn", joined)
    monkeypatch.setattr(operator, "supports_packed_attention", lambda kernel, q: True)
    assert not torch.allclose(outputs(attention, x)[0], expected[0], atol=1e-3)
