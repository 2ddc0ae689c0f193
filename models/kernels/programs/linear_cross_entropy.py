"""Triton programs for linear_cross_entropy.py: a program processes one token's logit row.

Rows are `row_stride` numbers apart, more than the vocabulary where it is odd. Programs read and
write the numbers between, without using them: masks that end at multiples of 16 let Triton move
vectors.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def linear_cross_entropy_statistics(
    logits,
    targets,
    weights,
    max_logits,
    exp_sums,
    target_logits,
    vocabulary,
    row_stride,
    first_id,
    BLOCK: tl.constexpr,
):
    """m = max_i logit_i,  Σ_i exp(logit_i − m), and the target's logit (0 in other shards)."""
    token = tl.program_id(0).to(tl.int64)
    logits += token * row_stride
    column = tl.arange(0, BLOCK)
    running_max = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    running_sum = tl.zeros([BLOCK], dtype=tl.float32)
    for block in range(tl.cdiv(vocabulary, BLOCK)):
        ids = block * BLOCK + column
        value = tl.load(logits + ids, mask=ids < row_stride, other=0.0).to(tl.float32)
        value = tl.where(ids < vocabulary, value, float("-inf"))
        new_max = tl.maximum(running_max, value)
        # A column without a logit so far has no sum to rescale.
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        running_sum = running_sum * tl.exp(running_max - base) + tl.exp(value - base)
        running_max = new_max
    row_max = tl.max(running_max, axis=0)
    base = tl.where(row_max == float("-inf"), 0.0, row_max)
    tl.store(max_logits + token, row_max)
    tl.store(exp_sums + token, tl.sum(running_sum * tl.exp(running_max - base), axis=0))
    target = tl.load(targets + token) - first_id
    is_local = (target >= 0) & (target < vocabulary) & (tl.load(weights + token) != 0.0)
    tl.store(
        target_logits + token, tl.load(logits + target, mask=is_local, other=0.0).to(tl.float32)
    )


@triton.jit
def linear_cross_entropy_gradients(
    logits, targets, weights, log_z, vocabulary, row_stride, first_id, z_loss,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Replace logits by d/dlogit_i of w·(log Z − logit_target + z_loss·log²Z), in place:

    w·(1 + 2·z_loss·log Z)·exp(logit_i − log Z) − w·[i = target].
    """
    token = tl.program_id(0).to(tl.int64)
    logits += token * row_stride
    weight = tl.load(weights + token)
    log_z_t = tl.load(log_z + token)
    target = tl.load(targets + token) - first_id
    column = tl.arange(0, BLOCK)
    scale = weight * (1.0 + 2.0 * z_loss * log_z_t)
    for block in range(tl.cdiv(vocabulary, BLOCK)):
        ids = block * BLOCK + column
        mask = ids < row_stride
        value = tl.load(logits + ids, mask=mask, other=0.0).to(tl.float32)
        value = tl.where(ids < vocabulary, value, float("-inf"))
        grad = scale * tl.exp(value - log_z_t) - tl.where(ids == target, weight, 0.0)
        grad = tl.where(weight != 0.0, grad, 0.0)
        tl.store(logits + ids, grad.to(logits.dtype.element_ty), mask=mask)


@triton.jit
def linear_cross_entropy_scale(x, scale, out, num_elements, BLOCK: tl.constexpr):
    """out = scale · x, in fp32 before the rounding."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + offsets, mask=offsets < num_elements, other=0.0).to(tl.float32) * tl.load(
        scale
    )
    tl.store(out + offsets, value.to(out.dtype.element_ty), mask=offsets < num_elements)
