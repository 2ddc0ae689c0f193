"""Attention over packed documents in a single call: torch's `varlen_attn`, on CUDA in half
precision.

It runs on the rows as they are, with the documents' ends: nothing is gathered, padded or masked.
torch chooses cuDNN or flash attention, in the order that the run sets (order.py).
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.torch_version import TorchVersion

from ...config.options.names import Kernel
from ...documents import Spans
from ...kernels.choice import requests_kernel
from .limits import HALF_PRECISION, MAX_HEAD_DIM

SUPPORTED_DTYPES = tuple(getattr(torch, name) for name in HALF_PRECISION)
HAS_CUDNN = TorchVersion(torch.__version__) >= "2.12"
"""True if torch's call may take cuDNN; before, it is FlashAttention alone."""
KEEPS_PLANS = any(
    argument.name == "seqused_k"
    for argument in torch.ops.aten._cudnn_attention_forward.default._schema.arguments
)
"""True if cuDNN's plans for packed rows are kept from call to call. The first versions build a plan
at each call, which takes the host 42 ms (pytorch/pytorch#191576), so cuDNN is left out there."""


def supports_packed_attention(kernel: Kernel, q: Tensor) -> bool:
    """Return True if a single call can compute attention for q [rows, length, heads, head_dim]."""
    fits = q.dtype in SUPPORTED_DTYPES and q.shape[-1] % 8 == 0 and q.shape[-1] <= MAX_HEAD_DIM
    on_gpu = q.device.type == "cuda" or q.is_meta or isinstance(q, FakeTensor)
    return requests_kernel(kernel, q.device) and on_gpu and fits and _has_implementation()


def _has_implementation() -> bool:
    """Return True if the order in force has an implementation of packed rows."""
    return torch.backends.cuda.flash_sdp_enabled() or (
        torch.backends.cuda.cudnn_sdp_enabled() and KEEPS_PLANS
    )


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
    with _leave_out_cudnn():
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


def _leave_out_cudnn() -> AbstractContextManager[object]:
    """Return a context without cuDNN where it would build a plan at each call."""
    if KEEPS_PLANS or not HAS_CUDNN:
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(SDPBackend.FLASH_ATTENTION)
