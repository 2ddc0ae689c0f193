"""Triton programs of linear_cross_entropy.py: a program processes one token's row of logits.

Rows are `stride` numbers apart, more than the vocabulary where it is odd. Programs read and write
the numbers between, without using them: a mask that ends at a multiple of 16 lets Triton move
vectors.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def linear_cross_entropy_statistics(
    logits, targets, weights, top, total, chosen, vocabulary, stride, first, BLOCK: tl.constexpr
):
    """Write the largest logit m, Σ exp(logit − m), and the target's logit (0 in other shards)."""
    token = tl.program_id(0).to(tl.int64)
    logits += token * stride
    at = tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    for block in range(tl.cdiv(vocabulary, BLOCK)):
        place = block * BLOCK + at
        value = tl.load(logits + place, mask=place < stride, other=0.0).to(tl.float32)
        value = tl.where(place < vocabulary, value, float("-inf"))
        higher = tl.maximum(highest, value)
        # A column without a logit so far has no sum to rescale.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        sums = sums * tl.exp(highest - base) + tl.exp(value - base)
        highest = higher
    most = tl.max(highest, axis=0)
    base = tl.where(most == float("-inf"), 0.0, most)
    tl.store(top + token, most)
    tl.store(total + token, tl.sum(sums * tl.exp(highest - base), axis=0))
    target = tl.load(targets + token) - first
    known = (target >= 0) & (target < vocabulary) & (tl.load(weights + token) != 0.0)
    tl.store(chosen + token, tl.load(logits + target, mask=known, other=0.0).to(tl.float32))


@triton.jit
def linear_cross_entropy_gradients(
    logits, targets, weights, log_z, vocabulary, stride, first, z_loss, BLOCK: tl.constexpr
):  # fmt: skip
    """Replace logits by the gradients of w·(log Z − chosen + z_loss·log²Z), in place."""
    token = tl.program_id(0).to(tl.int64)
    logits += token * stride
    weight = tl.load(weights + token)
    normal = tl.load(log_z + token)
    target = tl.load(targets + token) - first
    at = tl.arange(0, BLOCK)
    scale = weight * (1.0 + 2.0 * z_loss * normal)
    for block in range(tl.cdiv(vocabulary, BLOCK)):
        place = block * BLOCK + at
        inside = place < stride
        value = tl.load(logits + place, mask=inside, other=0.0).to(tl.float32)
        value = tl.where(place < vocabulary, value, float("-inf"))
        change = scale * tl.exp(value - normal) - tl.where(place == target, weight, 0.0)
        change = tl.where(weight != 0.0, change, 0.0)
        tl.store(logits + place, change.to(logits.dtype.element_ty), mask=inside)


@triton.jit
def linear_cross_entropy_scale(x, scale, out, numbers, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < numbers, other=0.0).to(tl.float32) * tl.load(scale)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=at < numbers)
