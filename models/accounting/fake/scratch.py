"""Bytes that operations hold beside their results while they run.

No tensor stands for them: an operation allocates them for itself and frees them before it returns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...kernels.choice import requests_kernel
from ...kernels.linear_cross_entropy import workspace_bytes

SMALLEST_PRODUCT = 16**3
"""Multiplications of the largest product in bf16 that a CPU computes without oneDNN."""
ROWS, COLUMNS, INNER = 256, 64, 512
"""Most rows, columns and inner elements of a block of a product in bf16 on a CPU (oneDNN's
brgemm_matmul for AVX-512)."""
SUMMED_COLUMNS = 1024
"""Most columns whose sums such a product keeps from one block of inner elements to the next."""


def _loss_scratch(hidden: Tensor, weight: Tensor, *_: Any) -> int:
    """Return the bytes of a chunk of logits, and of sums in fp32."""
    size = hidden.element_size()
    held = workspace_bytes(len(hidden), hidden.shape[1], len(weight), size)
    return held - hidden.nbytes - weight.nbytes


def _product_scratch(x: Tensor, weights: Tensor, _: Tensor) -> int:
    return _pieces_of_groups(x, len(x) * weights.shape[1])


def _outer_scratch(y: Tensor, x: Tensor, ends: Tensor) -> int:
    return _pieces_of_groups(x, len(ends) * y.shape[1] * x.shape[1])


def _pieces_of_groups(x: Tensor, numbers: int) -> int:
    """Return the bytes of the groups' results, which a loop over the groups (layers/grouped.py)
    joins: as many as those of the whole result."""
    one_launch = requests_kernel("auto", x.device) and x.dtype == torch.bfloat16
    return 0 if one_launch else numbers * x.element_size()


def _attention_scratch(q: Tensor, k: Tensor, *_: Any) -> int:
    """Return the bytes that a CPU's threads hold in attention: the scores of a block, their sums,
    and the block's result in fp32. Scores in bf16 are a copy."""
    if requests_kernel("auto", q.device):  # as on a GPU
        return 0
    queries, keys = _block(q, k)
    scores = queries * keys * (4 if q.dtype == torch.float32 else 6)
    return torch.get_num_threads() * (scores + 4 * queries * (2 + q.shape[-1]))


def _attention_backward_scratch(_: Tensor, q: Tensor, k: Tensor, *__: Any) -> int:
    """Return the bytes of the scores of a block and their gradients, and of a copy like q."""
    if requests_kernel("auto", q.device):
        return 0
    queries, keys = _block(q, k)
    scores = queries * keys * (4 if q.dtype == torch.float32 else 6)
    return torch.get_num_threads() * (2 * scores + 4 * queries) + q.nbytes


def _block(q: Tensor, k: Tensor) -> tuple[int, int]:
    """Return the queries and keys of a block of attention on a CPU (FlashAttentionKernel.cpp)."""
    length = q.shape[-2]
    return min(length, 256 if length >= 768 else 64 if length >= 192 else 32), min(512, k.shape[-2])


def _bf16_product_scratch(left: Tensor, right: Tensor) -> int:
    """Return the bytes of a CPU's threads in a product in bf16: a block of sums in fp32, a packed
    block of the right matrix, and a copy of the left one's rows if they are columns in memory, as
    in the gradient of a weight."""
    if left.dtype != torch.bfloat16 or requests_kernel("auto", left.device):
        return 0
    (height, inner), width = left.shape, right.shape[1]
    if height * inner * width <= SMALLEST_PRODUCT:
        return 0
    threads, copies = torch.get_num_threads(), left.stride(0) < left.stride(1)
    # Threads share blocks evenly; those that copy rows have rows of their own.
    share = threads if copies else threads // math.gcd(threads, -(-width // COLUMNS))
    rows = -(-height // (share * -(-height // (share * ROWS))))
    part, columns = min(inner, INNER), COLUMNS
    packed = part * COLUMNS
    if copies:
        packed += part * rows
        if inner > part:
            columns = max(COLUMNS, min(width, SUMMED_COLUMNS))
    return threads * (2 * packed + 4 * rows * columns)


def _added_product_scratch(_: Tensor, left: Tensor, right: Tensor) -> int:
    return _bf16_product_scratch(left, right)


SCRATCH: dict[str, Callable[..., int]] = {
    "aten::mm": _bf16_product_scratch,
    "aten::addmm": _added_product_scratch,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention_scratch,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward_scratch,
    "headrace::linear_cross_entropy": _loss_scratch,
    "headrace::grouped_product": _product_scratch,
    "headrace::grouped_outer": _outer_scratch,
}
"""A function of an operation's arguments that returns the bytes, by the operation's name."""
