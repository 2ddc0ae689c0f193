"""Scans: Mamba's (SSD and the selective scan), and the delta rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ...config.options.names import DeltaKernel, Kernel
from ...layers.delta.scan import kernel_delta_rule, normalize
from ...layers.gated_scan import gated_scan
from ...layers.mixed_scan import mixed_scan
from .case import SHORT, Case, Draw, Inputs, InputShape


def ssd_cases() -> Iterator[Case]:
    yield ssd_case(1, 6, state=False, packed=True)
    yield ssd_case(2, 4, state=True, packed=False)


def ssd_case(
    groups: int,
    heads: int,
    *,
    state: bool,
    packed: bool,
    head_dim: int | None = None,
    state_size: int | None = None,
) -> Case:
    """Default sizes are Mamba-2's, or small and odd in narrow shapes."""

    def make(draw: Draw, shape: InputShape) -> Inputs:
        over = shape.rows, shape.length
        dim = head_dim or (10 if shape.width < 100 else 64)
        size = state_size or (17 if shape.width < 100 else 128)
        inputs: Inputs = {
            "x": draw.normal("x", *over, heads * dim),
            "dt": draw.normal("dt", *over, heads + 8),
            "dt_bias": draw.normal("bias", heads) - 2,
            "A_log": draw.normal("A", heads).float(),
            "B": draw.normal("B", *over, groups * size, scale=size**-0.5),
            "C": draw.normal("C", *over, groups * size),
            "D": draw.normal("D", heads),
        }
        if state:
            inputs["state"] = draw.normal("state", shape.rows, heads, dim, size).float()
        if packed:
            inputs["documents"] = draw.documents(shape, continued=state)
        return inputs

    def make_run(kernel: Kernel) -> Callable[..., Any]:
        def run(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, **inputs: Any) -> Any:
            xBC = torch.cat([x, B, C], dim=-1)
            return mixed_scan(
                xBC,
                dt[..., 8:],
                **inputs,
                head_dim=x.shape[2] // heads,
                state_size=B.shape[2] // groups,
                kernel=kernel,
            )

        return run

    sizes = f" of {head_dim} × {state_size}" if head_dim else ""
    name = f"{heads} heads{sizes}, {groups} groups{', a state' * state}{', packed' * packed}"
    return Case("ssd", name, make, make_run("triton"), make_run("torch"))


def selective_scan_cases() -> Iterator[Case]:
    yield selective_scan_case(1, 16, state=False, packed=True)
    yield selective_scan_case(2, 3, state=True, packed=True)


def selective_scan_case(heads: int, size: int, *, state: bool, packed: bool) -> Case:
    def make(draw: Draw, shape: InputShape) -> Inputs:
        over, channels = (shape.rows, shape.length), shape.width // heads
        inputs: Inputs = {
            "x": draw.normal("x", *over, heads, channels),
            "dt": draw.normal("dt", *over, heads, channels),
            "bias": draw.normal("bias", heads, channels) - 2,
            "A": -draw.normal("A", heads, channels, size).float().abs() * 2,
            "wide": draw.normal("wide", *over, heads, 2 * size + 5),
            "D": draw.normal("D", heads, channels),
            "z": draw.normal("z", *over, shape.width + 8),
        }
        if state:
            inputs["state"] = draw.normal("state", shape.rows, heads, channels, size).float()
        if packed:
            inputs["documents"] = draw.documents(shape, continued=state)
        return inputs

    def make_run(kernel: Kernel) -> Callable[..., Any]:
        def run(wide: Tensor, z: Tensor, **inputs: Any) -> tuple[Tensor, Tensor]:
            _, B, C = wide.split([5, size, size], dim=-1)  # slices, as of a projection
            return gated_scan(B=B, C=C, z=z[..., 8:], kernel=kernel, **inputs)

        return run

    name = f"{heads} heads, {size} states{', a state' * state}{', packed' * packed}"
    return Case("selective_scan", name, make, make_run("triton"), make_run("torch"), SHORT)


def delta_cases() -> Iterator[Case]:
    yield delta_case(1, 2, by_channel=False, state=True, packed=True)
    yield delta_case(1, 1, by_channel=False, state=False, packed=False)
    yield delta_case(1, 2, by_channel=True, state=False, packed=False)
    yield delta_case(1, 1, by_channel=True, state=True, packed=True)


def delta_case(
    heads: int,
    value_heads: int,
    *,
    by_channel: bool,
    state: bool,
    packed: bool,
    key_dim: int | None = None,
    value_dim: int | None = None,
    kernel: DeltaKernel = "triton",
) -> Case:
    """Default sizes are 128 and, in narrow shapes, small and odd."""

    def make(draw: Draw, shape: InputShape) -> Inputs:
        over, narrow = (shape.rows, shape.length), shape.width < 100
        keys, values = key_dim or (17 if narrow else 128), value_dim or (10 if narrow else 128)
        inputs: Inputs = {
            "q": normalize(draw.normal("q", *over, heads, keys)),
            "k": normalize(draw.normal("k", *over, heads, keys)),
            "v": draw.normal("v", *over, value_heads, values),
            "g": -draw.normal("g", *over, value_heads, keys if by_channel else 1).float().abs(),
            "beta": 2 * draw.normal("beta", *over, value_heads).float().sigmoid(),
        }
        if state:
            inputs["state"] = draw.normal("state", shape.rows, value_heads, keys, values).float()
        if packed:
            inputs["documents"] = draw.documents(shape, continued=state)
        return inputs

    def make_run(kernel: DeltaKernel) -> Callable[..., Any]:
        def run(**inputs: Any) -> Any:
            y, final = kernel_delta_rule(**inputs, kernel=kernel)
            return y if without_state else (y, final)

        return run

    without_state = kernel == "fla"
    sizes = f" of {key_dim} × {value_dim}" if key_dim else ""
    decays = "decays by channel" if by_channel else "decays by head"
    name = f"{heads} heads, {value_heads} states{sizes}, {decays}"
    name += ", a state" * state + ", packed" * packed
    tiny = InputShape(1, 40, 72)  # the interpreter is slow on pairs with decays of their own
    op = "delta_fla" if kernel == "fla" else "delta"
    return Case(op, name, make, make_run(kernel), make_run("torch"), tiny)
