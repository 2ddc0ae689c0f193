"""Workspace: bytes that an operation allocates and frees before it returns.

No tensor represents them, so a trace cannot see them.
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
"""Multiplications in the largest bf16 product that a CPU computes without oneDNN."""
ROWS, COLUMNS, INNER = 256, 64, 512
"""Maximal block size in a CPU's bf16 product (oneDNN's brgemm_matmul for AVX-512)."""
SUMMED_COLUMNS = 1024
"""Maximal columns whose sums such a product carries between inner blocks."""


def _loss_scratch(hidden: Tensor, weight: Tensor, *_: Any) -> int:
    """Count a logits chunk and sums wider than the result."""
    num_tokens, width = hidden.shape
    total = workspace_bytes(num_tokens, width, len(weight), hidden.dtype)
    return total - hidden.nbytes - weight.nbytes


def _product_scratch(x: Tensor, weights: Tensor, _: Tensor) -> int:
    return _group_result_bytes(x, len(x) * weights.shape[1])


def _outer_scratch(y: Tensor, x: Tensor, ends: Tensor) -> int:
    return _group_result_bytes(x, len(ends) * y.shape[1] * x.shape[1])


def _group_result_bytes(x: Tensor, num_elements: int) -> int:
    """Count the results per group, which a loop over the groups (layers/grouped.py) concatenates:
    as large as the result itself."""
    one_launch = requests_kernel("auto", x.device) and x.dtype == torch.bfloat16
    return 0 if one_launch else num_elements * x.element_size()


def _attention_scratch(q: Tensor, k: Tensor, *_: Any) -> int:
    """Count the attention blocks on a CPU's threads: scores, their sums, and the result in fp32.
    bf16 scores are an additional copy."""
    if requests_kernel("auto", q.device):  # as on a GPU
        return 0
    queries, keys = _attention_block(q, k)
    scores = queries * keys * (4 if q.dtype == torch.float32 else 6)
    return torch.get_num_threads() * (scores + 4 * queries * (2 + q.shape[-1]))


def _attention_backward_scratch(_: Tensor, q: Tensor, k: Tensor, *__: Any) -> int:
    """Count the blocks with scores and their gradients, and a copy like q."""
    if requests_kernel("auto", q.device):
        return 0
    queries, keys = _attention_block(q, k)
    scores = queries * keys * (4 if q.dtype == torch.float32 else 6)
    return torch.get_num_threads() * (2 * scores + 4 * queries) + q.nbytes


def _attention_block(q: Tensor, k: Tensor) -> tuple[int, int]:
    """Return queries and keys per attention block on a CPU (FlashAttentionKernel.cpp)."""
    length = q.shape[-2]
    return min(length, 256 if length >= 768 else 64 if length >= 192 else 32), min(512, k.shape[-2])


def _bf16_product_scratch(a: Tensor, b: Tensor) -> int:
    """Count the CPU threads' blocks in a bf16 product a [m, k] × b [k, n]: fp32 sums, a packed b
    block, and a copied row block if a is column-major, as for weight gradients."""
    if a.dtype != torch.bfloat16 or requests_kernel("auto", a.device):
        return 0
    (height, inner), width = a.shape, b.shape[1]
    if height * inner * width <= SMALLEST_PRODUCT:
        return 0
    num_threads, copies_rows = torch.get_num_threads(), a.stride(0) < a.stride(1)
    # Threads share the blocks evenly; threads that copy rows do not share rows.
    row_threads = (
        num_threads if copies_rows else num_threads // math.gcd(num_threads, -(-width // COLUMNS))
    )
    rows = -(-height // (row_threads * -(-height // (row_threads * ROWS))))
    inner_block, columns = min(inner, INNER), COLUMNS
    packed = inner_block * COLUMNS
    if copies_rows:
        packed += inner_block * rows
        if inner > inner_block:
            columns = max(COLUMNS, min(width, SUMMED_COLUMNS))
    return num_threads * (2 * packed + 4 * rows * columns)


def _added_product_scratch(_: Tensor, a: Tensor, b: Tensor) -> int:
    return _bf16_product_scratch(a, b)


SCRATCH: dict[str, Callable[..., int]] = {
    "aten::mm": _bf16_product_scratch,
    "aten::addmm": _added_product_scratch,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention_scratch,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward_scratch,
    "headrace::linear_cross_entropy": _loss_scratch,
    "headrace::grouped_product": _product_scratch,
    "headrace::grouped_outer": _outer_scratch,
}
"""Functions from an operation's arguments to its workspace in bytes, by operation name."""
