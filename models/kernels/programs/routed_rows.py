"""Triton programs for routed_rows.py: ROWS whole tokens at a time, with their K expert rows.

Every row belongs to one token, so a program writes what no other program writes.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def routed_rows_dispatch(
    x, rows, weights, row_ids, out, grad_weights, num_tokens, width,
    K: tl.constexpr, WEIGHTED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[row_ids[t, k]] = x[t] for a token's K choices.

    WEIGHTED: out[row_ids[t, k]] = weights[t, k]·x[t], and
    grad_weights[t, k] = x[t]·rows[row_ids[t, k]].
    """
    column = tl.arange(0, BLOCK)[None, :]
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token_mask = token < num_tokens
    mask = token_mask[:, None] & (column < width)
    value = tl.load(x + token[:, None] * width + column, mask=mask, other=0.0)
    for k in tl.static_range(K):
        choice = token * K + k
        row_offsets = tl.load(row_ids + choice, mask=token_mask, other=0)[:, None] * width + column
        if WEIGHTED:
            x_row = value.to(tl.float32)
            expert_row = tl.load(rows + row_offsets, mask=mask, other=0.0).to(tl.float32)
            tl.store(grad_weights + choice, tl.sum(x_row * expert_row, axis=1), mask=token_mask)
            weight = tl.load(weights + choice, mask=token_mask, other=0.0).to(tl.float32)
            tl.store(
                out + row_offsets, (x_row * weight[:, None]).to(out.dtype.element_ty), mask=mask
            )
        else:
            tl.store(out + row_offsets, value, mask=mask)


@triton.jit
def routed_rows_combine(
    rows, weights, row_ids, out, num_tokens, width,
    K: tl.constexpr, WEIGHTED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[t] = Σ_k weights[t, k]·rows[row_ids[t, k]]; without WEIGHTED all weights are 1."""
    column = tl.arange(0, BLOCK)[None, :]
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token_mask = token < num_tokens
    mask = token_mask[:, None] & (column < width)
    total = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for k in tl.static_range(K):
        choice = token * K + k
        row_offsets = tl.load(row_ids + choice, mask=token_mask, other=0)[:, None] * width + column
        value = tl.load(rows + row_offsets, mask=mask, other=0.0).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(weights + choice, mask=token_mask, other=0.0).to(tl.float32)[:, None]
        total += value
    tl.store(out + token[:, None] * width + column, total.to(out.dtype.element_ty), mask=mask)
