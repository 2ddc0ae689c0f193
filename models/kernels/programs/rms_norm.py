"""The Triton programs of rms_norm.py."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def forward(x, weight, out, width, eps, EPS_OUTSIDE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    inside = at < width
    row = tl.program_id(0).to(tl.int64) * width
    value = tl.load(x + row + at, mask=inside, other=0.0).to(tl.float32)
    power = tl.sum(value * value, axis=0) / width
    scale = 1.0 / (tl.sqrt(power) + eps) if EPS_OUTSIDE else 1.0 / tl.sqrt(power + eps)
    gain = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    # The twin rounds the normalised row before it is weighted, and so does this.
    normal = (value * scale).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row + at, (normal * gain).to(out.dtype.element_ty), mask=inside)


@triton.jit
def backward(
    grad, x, weight, out, partial, rows, each, width, eps,
    EPS_OUTSIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    inside = at < width
    program = tl.program_id(0).to(tl.int64)
    gain = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    summed = tl.zeros([BLOCK], dtype=tl.float32)
    for number in range(each):
        row = program * each + number
        here = inside & (at * 0 + row < rows)  # a whole mask: the interpreter takes no other
        value = tl.load(x + row * width + at, mask=here, other=0.0).to(tl.float32)
        above = tl.load(grad + row * width + at, mask=here, other=0.0).to(tl.float32)
        power = tl.sum(value * value, axis=0) / width
        pulled = above * gain
        along = tl.sum(pulled * value, axis=0) / width
        if EPS_OUTSIDE:
            root = tl.sqrt(power)
            scale = 1.0 / (root + eps)
            bend = tl.where(root > 0.0, scale * scale / tl.where(root > 0.0, root, 1.0), 0.0)
        else:
            scale = 1.0 / tl.sqrt(power + eps)
            bend = scale * scale * scale
        change = pulled * scale - value * along * bend
        tl.store(out + row * width + at, change.to(out.dtype.element_ty), mask=here)
        summed += above * value * scale
    tl.store(partial + program * width + at, summed, mask=inside)
