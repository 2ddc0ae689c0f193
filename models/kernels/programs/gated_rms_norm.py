"""Triton programs for gated_rms_norm.py: ROWS rows and one channel run at a time.

A run is a channel group, or this rank's shard of it: `run_width` channels out of `group_width`.
CUT: sums over whole groups are inputs; gated_rms_norm_sums computed them for each rank's runs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .fp8 import store_fp8_rows


@triton.jit
def _load_tile(x, row, stride, first_channel, channel, mask):
    """Load a run's channels from ROWS rows in fp32, [ROWS, BLOCK]."""
    return tl.load(x + row * stride + first_channel + channel, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _load_gated(y, z, row, y_stride, z_stride, first_channel, channel, mask):
    """Load v = y·silu(z), [ROWS, BLOCK]."""
    gate = _load_tile(z, row, z_stride, first_channel, channel, mask)
    return _load_tile(y, row, y_stride, first_channel, channel, mask) * (gate * tl.sigmoid(gate))


@triton.jit
def _load_run_sum(run_sums, row, num_rows):
    """Load this run's number for each row, [ROWS, 1]."""
    return tl.load(
        run_sums + row * tl.num_programs(1) + tl.program_id(1), mask=row < num_rows, other=0.0
    )


@triton.jit
def gated_rms_norm_sums(
    dy, y, z, weight, out, num_rows, width, run_width, y_stride, z_stride,
    BACKWARD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Σ v² over a run, v = y·silu(z); BACKWARD: also Σ dy·weight·v. out [1 or 2, rows, runs]."""
    first_channel = tl.program_id(1) * run_width
    channel = tl.arange(0, BLOCK)[None, :]
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    mask = (row < num_rows) & (channel < run_width)
    gated = _load_gated(y, z, row, y_stride, z_stride, first_channel, channel, mask)
    out_ptrs = out + row * tl.num_programs(1) + tl.program_id(1)
    tl.store(out_ptrs, tl.sum(gated * gated, axis=1)[:, None], mask=row < num_rows)
    if BACKWARD:
        gain = tl.load(weight + first_channel + channel, mask=channel < run_width, other=0.0).to(
            tl.float32
        )
        normed_grad = _load_tile(dy, row, width, first_channel, channel, mask) * gain
        out_ptrs = out + (num_rows + row) * tl.num_programs(1) + tl.program_id(1)
        tl.store(out_ptrs, tl.sum(normed_grad * gated, axis=1)[:, None], mask=row < num_rows)


@triton.jit
def gated_rms_norm_forward(
    y, z, weight, square_sums, out, values, scales, num_rows, width, run_width, group_width,
    y_stride, z_stride, eps,
    CUT: tl.constexpr, FP8: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = weight · v / √(mean(v²) + eps),  v = y·silu(z), with the mean over a channel group.

    FP8 also stores `out` in FP8: a run is then a whole row.
    """
    first_channel = tl.program_id(1) * run_width
    channel = tl.arange(0, BLOCK)[None, :]
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    mask = (row < num_rows) & (channel < run_width)
    value = _load_gated(y, z, row, y_stride, z_stride, first_channel, channel, mask)
    square_sum = (
        _load_run_sum(square_sums, row, num_rows) if CUT else tl.sum(value * value, axis=1)[:, None]
    )
    scale = 1.0 / tl.sqrt(square_sum / group_width + eps)
    gain = tl.load(weight + first_channel + channel, mask=channel < run_width, other=0.0).to(
        tl.float32
    )
    normed = (value * scale).to(y.dtype.element_ty).to(tl.float32)
    stored = (normed * gain).to(out.dtype.element_ty)
    tl.store(out + row * width + first_channel + channel, stored, mask=mask)
    if FP8:
        store_fp8_rows(stored, values, scales, row, width, channel, num_rows, mask)


@triton.jit
def gated_rms_norm_backward(
    dy, y, z, weight, square_sums, product_sums, grad_y, grad_z, weight_grads, num_rows,
    tiles_per_program, width, run_width, group_width, y_stride, z_stride, eps,
    CUT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dv = s·(u − v·s²·mean(u·v)),  u = dy·weight,  v = y·silu(z),  s = 1/√(mean(v²) + eps).

    dy_value = dv·silu(z), dz_value = dv·y·silu'(z); weight_grads = Σ dy·v·s over a program's rows,
    fp32 [programs, width].
    """
    first_channel = tl.program_id(1) * run_width
    channel = tl.arange(0, BLOCK)[None, :]
    program = tl.program_id(0).to(tl.int64)
    gain = tl.load(weight + first_channel + channel, mask=channel < run_width, other=0.0).to(
        tl.float32
    )
    weight_grad = tl.zeros([BLOCK], dtype=tl.float32)
    for index in tl.range(0, tiles_per_program, num_stages=STAGES):
        row = (program * tiles_per_program + index) * ROWS + tl.arange(0, ROWS)[:, None]
        mask = (row < num_rows) & (channel < run_width)
        gate = _load_tile(z, row, z_stride, first_channel, channel, mask)
        value = _load_tile(y, row, y_stride, first_channel, channel, mask)
        dy_tile = _load_tile(dy, row, width, first_channel, channel, mask)
        sigmoid = tl.sigmoid(gate)
        gated = value * gate * sigmoid
        normed_grad = dy_tile * gain
        if CUT:
            square_sum, product_sum = (
                _load_run_sum(square_sums, row, num_rows),
                _load_run_sum(product_sums, row, num_rows),
            )
        else:
            square_sum = tl.sum(gated * gated, axis=1)[:, None]
            product_sum = tl.sum(normed_grad * gated, axis=1)[:, None]
        scale = 1.0 / tl.sqrt(square_sum / group_width + eps)
        normed = gated * scale
        gated_grad = scale * (normed_grad - normed * (product_sum * scale / group_width))
        dy_value = gated_grad * gate * sigmoid
        offsets = row * width + first_channel + channel
        tl.store(grad_y + offsets, dy_value.to(grad_y.dtype.element_ty), mask=mask)
        slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
        dz_value = gated_grad * value * slope
        tl.store(grad_z + offsets, dz_value.to(grad_z.dtype.element_ty), mask=mask)
        weight_grad += tl.sum(dy_tile * normed, axis=0)
    weight_channel = tl.arange(0, BLOCK)
    tl.store(
        weight_grads + program * width + first_channel + weight_channel,
        weight_grad,
        mask=weight_channel < run_width,
    )
