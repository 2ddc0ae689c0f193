"""Attention over packed documents in a single call: torch's `varlen_attn`, on CUDA in half
precision.

It runs on the rows as they are, with the documents' ends: nothing is gathered, padded or masked.
torch chooses cuDNN or flash attention (order.py; torch 2.11: always flash).
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ...config.options.names import Kernel
from ...documents import Spans
from ...kernels.choice import requests_kernel

SUPPORTED_DTYPES = (torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256
"""Flash attention's limit."""


def supports_packed_attention(kernel: Kernel, q: Tensor) -> bool:
    """Return True if a single call can compute attention for q [rows, length, heads, head_dim]."""
    fits = q.dtype in SUPPORTED_DTYPES and q.shape[-1] % 8 == 0 and q.shape[-1] <= MAX_HEAD_DIM
    on_gpu = q.device.type == "cuda" or q.is_meta or isinstance(q, FakeTensor)
    return requests_kernel(kernel, q.device) and on_gpu and fits


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, spans: Spans, *, scale: float, window: int | None
) -> Tensor:
    """Return attention within each document, like q [rows, length, heads, head_dim]; k and v [rows,
    length, kv_heads, head_dim]. A query sees `window` tokens with itself, or its whole past."""
    from torch.nn.attention.varlen import varlen_attn

    heads, kv_heads = q.shape[2], k.shape[2]
    options: dict[str, Any] = {}
    if heads != kv_heads:
        if "enable_gqa" in inspect.signature(varlen_attn).parameters:
            options["enable_gqa"] = True
        else:  # torch 2.11
            k, v = (t.repeat_interleave(heads // kv_heads, dim=2) for t in (k, v))
    y: Any = varlen_attn(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        spans.ends,
        spans.ends,
        spans.longest,
        spans.longest,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        **options,
    )
    attended: Tensor = y.unflatten(0, q.shape[:2])
    return attended
