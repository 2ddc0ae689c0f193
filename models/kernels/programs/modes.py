"""The states of channels, as tuples of MODES vectors.

A thread has a channel, and all of its states in registers. (As one tensor of two sides they would
be dealt out over the warps, and every sum over modes would cross them.)
"""

from __future__ import annotations

import triton
import triton.language as tl


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
