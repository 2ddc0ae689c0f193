"""The states of a channel, as tuples of MODES vectors, and what they are fed with.

A thread has a channel, and all of its states in registers. (As one tensor of two sides they would
be dealt out over the warps, and every sum over modes would cross them.)
"""

from __future__ import annotations

import triton
import triton.language as tl

# States


@triton.jit
def load_modes(numbers, channel, width, MODES: tl.constexpr):
    """Of each channel; zeros where there is none."""
    found = ()
    for mode in tl.static_range(MODES):
        place = numbers + mode * width + channel
        found = found + (tl.load(place, mask=channel < width, other=0.0),)
    return found


@triton.jit
def store_modes(numbers, values, channel, width, MODES: tl.constexpr):
    for mode in tl.static_range(MODES):
        tl.store(numbers + mode * width + channel, values[mode], mask=channel < width)


@triton.jit
def zeros(MODES: tl.constexpr, CHANNELS: tl.constexpr):
    found = ()
    for _ in tl.static_range(MODES):
        found = found + (tl.zeros([CHANNELS], dtype=tl.float32),)
    return found


@triton.jit
def stepped(decay, state, added, MODES: tl.constexpr):
    """λ·S + added."""
    found = ()
    for mode in tl.static_range(MODES):
        found = found + (decay[mode] * state[mode] + added,)
    return found


@triton.jit
def products(a, b, MODES: tl.constexpr):
    found = ()
    for mode in tl.static_range(MODES):
        found = found + (a[mode] * b[mode],)
    return found


@triton.jit
def sum_of_products(a, b, MODES: tl.constexpr):
    total = a[0] * b[0]
    for mode in tl.static_range(1, MODES):
        total += a[mode] * b[mode]
    return total


@triton.jit
def plus_products(sums, values, factor, MODES: tl.constexpr):
    found = ()
    for mode in tl.static_range(MODES):
        found = found + (sums[mode] + values[mode] * factor,)
    return found


@triton.jit
def within(state, positions, token, broken, MODES: tl.constexpr):
    """The state, or zeros where a document begins."""
    found = state
    if broken:
        on = (tl.load(positions + token) != 0).to(tl.float32)
        found = ()
        for mode in tl.static_range(MODES):
            found = found + (state[mode] * on,)
    return found


# What is read of UNROLL tokens


@triton.jit
def read(x, first, channel, width, stride, UNROLL: tl.constexpr):
    """As it is."""
    found = ()
    for step in tl.static_range(UNROLL):
        place = x + (first + step) * stride + channel
        found = found + (tl.load(place, mask=channel < width, other=0.0),)
    return found


@triton.jit
def inputs_of(x, first, channel, width, stride, GATED: tl.constexpr, UNROLL: tl.constexpr):
    """w = k ⊙ v."""
    found = ()
    for step in tl.static_range(UNROLL):
        at = x + (first + step) * stride + channel
        if GATED:
            w = tl.load(at + width, mask=channel < width, other=0.0).to(tl.float32)
            w *= tl.load(at + 2 * width, mask=channel < width, other=0.0).to(tl.float32)
        else:
            w = tl.load(at, mask=channel < width, other=0.0).to(tl.float32)
        found = found + (w,)
    return found


@triton.jit
def pulls_of(grad, x, first, channel, width, stride, GATED: tl.constexpr, UNROLL: tl.constexpr):
    """The gradients of what stands between the gates."""
    found = ()
    for step in tl.static_range(UNROLL):
        place = grad + (first + step) * width + channel
        g = tl.load(place, mask=channel < width, other=0.0).to(tl.float32)
        if GATED:
            q = tl.load(x + (first + step) * stride + channel, mask=channel < width, other=0.0)
            g *= q.to(tl.float32)
        found = found + (g,)
    return found
