"""Triton programs of gated_rms_norm.py: ROWS rows and one run of channels at a time.

A run is a group of channels, or this rank's shard of one: `share` of the group's `members`.
CUT: sums over whole groups are inputs; `sums` computed them for the runs of each rank.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .fp8 import store_fp8_rows


@triton.jit
def _tile(x, row, stride, first, at, inside):
    return tl.load(x + row * stride + first + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _gated(y, z, row, y_stride, z_stride, first, at, inside):
    gate = _tile(z, row, z_stride, first, at, inside)
    return _tile(y, row, y_stride, first, at, inside) * (gate * tl.sigmoid(gate))


@triton.jit
def _given(totals, row, rows):
    """Return the offsets of one number of each row for this run."""
    return tl.load(totals + row * tl.num_programs(1) + tl.program_id(1), mask=row < rows, other=0.0)


@triton.jit
def gated_rms_norm_sums(
    grad, y, z, weight, out, rows, width, share, y_stride, z_stride,
    BACKWARD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the squares of a run; if BACKWARD, also the products of gradient and normed input."""
    first = tl.program_id(1) * share
    at = tl.arange(0, BLOCK)[None, :]
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    inside = (row < rows) & (at < share)
    gated = _gated(y, z, row, y_stride, z_stride, first, at, inside)
    to = out + row * tl.num_programs(1) + tl.program_id(1)
    tl.store(to, tl.sum(gated * gated, axis=1)[:, None], mask=row < rows)
    if BACKWARD:
        gain = tl.load(weight + first + at, mask=at < share, other=0.0).to(tl.float32)
        pulled = _tile(grad, row, width, first, at, inside) * gain
        to = out + (rows + row) * tl.num_programs(1) + tl.program_id(1)
        tl.store(to, tl.sum(pulled * gated, axis=1)[:, None], mask=row < rows)


@triton.jit
def gated_rms_norm_forward(
    y, z, weight, powers, out, values, scales, rows, width, share, members, y_stride, z_stride, eps,
    CUT: tl.constexpr, FP8: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """FP8: a run is a whole row."""
    first = tl.program_id(1) * share
    at = tl.arange(0, BLOCK)[None, :]
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    inside = (row < rows) & (at < share)
    value = _gated(y, z, row, y_stride, z_stride, first, at, inside)
    power = _given(powers, row, rows) if CUT else tl.sum(value * value, axis=1)[:, None]
    scale = 1.0 / tl.sqrt(power / members + eps)
    gain = tl.load(weight + first + at, mask=at < share, other=0.0).to(tl.float32)
    normal = (value * scale).to(y.dtype.element_ty).to(tl.float32)
    stored = (normal * gain).to(out.dtype.element_ty)
    tl.store(out + row * width + first + at, stored, mask=inside)
    if FP8:
        store_fp8_rows(stored, values, scales, row, width, at, rows, inside)


@triton.jit
def gated_rms_norm_backward(
    grad, y, z, weight, powers, pulls, grad_y, grad_z, partial, rows, each, width, share, members,
    y_stride, z_stride, eps,
    CUT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(1) * share
    at = tl.arange(0, BLOCK)[None, :]
    program = tl.program_id(0).to(tl.int64)
    gain = tl.load(weight + first + at, mask=at < share, other=0.0).to(tl.float32)
    summed = tl.zeros([BLOCK], dtype=tl.float32)
    for number in range(each):
        row = (program * each + number) * ROWS + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (at < share)
        gate = _tile(z, row, z_stride, first, at, inside)
        value = _tile(y, row, y_stride, first, at, inside)
        above = _tile(grad, row, width, first, at, inside)
        open_ = tl.sigmoid(gate)
        gated = value * gate * open_
        pulled = above * gain
        if CUT:
            power, pull = _given(powers, row, rows), _given(pulls, row, rows)
        else:
            power = tl.sum(gated * gated, axis=1)[:, None]
            pull = tl.sum(pulled * gated, axis=1)[:, None]
        scale = 1.0 / tl.sqrt(power / members + eps)
        normal = gated * scale
        change = scale * (pulled - normal * (pull * scale / members))
        of_y = change * gate * open_
        place = row * width + first + at
        tl.store(grad_y + place, of_y.to(grad_y.dtype.element_ty), mask=inside)
        slope = open_ * (1.0 + gate * (1.0 - open_))
        of_z = change * value * slope
        tl.store(grad_z + place, of_z.to(grad_z.dtype.element_ty), mask=inside)
        summed += tl.sum(above * normal, axis=0)
    to = tl.arange(0, BLOCK)
    tl.store(partial + program * width + first + to, summed, mask=to < share)
