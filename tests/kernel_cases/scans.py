"""Mamba's scans: SSD and the selective scan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from headrace.models.documents import Documents
from headrace.models.kernels.choice import Kernel
from headrace.models.kernels.ssd import ssd as ssd_kernel
from headrace.models.layers import scan
from headrace.models.layers.gated_scan import gated_scan

from .case import KERNEL_AND_TWIN, SHORT, Case, Draw, Inputs, Shape


def ssds() -> Iterator[Case]:
    yield ssd(1, 3, state=False, packed=True)
    yield ssd(2, 4, state=True, packed=False)


def ssd(groups: int, heads: int, *, state: bool, packed: bool) -> Case:
    def make(draw: Draw, shape: Shape) -> Inputs:
        dim, size, over = 64, 128, (shape.rows, shape.length)
        if shape.width < 100:
            dim, size = 10, 17
        inputs: Inputs = {
            "x": draw.normal("x", *over, heads, dim),
            "dt": draw.normal("dt", *over, heads).float().abs() * 0.3,
            "A": -draw.normal("A", heads).float().abs(),
            "B": draw.normal("B", *over, groups, size, scale=size**-0.5),
            "C": draw.normal("C", *over, groups, size),
        }
        if state:
            inputs["state"] = draw.normal("state", shape.rows, heads, dim, size).float()
        if packed:
            inputs["documents"] = draw.documents(shape, continued=state)
        return inputs

    def run(
        state: Tensor | None = None, documents: Documents | None = None, **inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        positions = documents.positions if documents is not None else None
        y, final, *_ = ssd_kernel(**inputs, state=state, positions=positions, axis="")
        return y, final

    name = f"{heads} heads, {groups} groups{', a state' * state}{', packed' * packed}"
    return Case("ssd", name, make, run, scan.ssd)


def selective_scans() -> Iterator[Case]:
    yield selective(1, 16, state=False, packed=True)
    yield selective(2, 3, state=True, packed=True)


def selective(heads: int, size: int, *, state: bool, packed: bool) -> Case:
    def make(draw: Draw, shape: Shape) -> Inputs:
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

    def by(kernel: Kernel) -> Callable[..., Any]:
        def run(wide: Tensor, z: Tensor, **inputs: Any) -> tuple[Tensor, Tensor]:
            _, B, C = wide.split([5, size, size], dim=-1)  # slices, as of a projection
            return gated_scan(B=B, C=C, z=z[..., 8:], kernel=kernel, **inputs)

        return run

    name = f"{heads} heads, {size} states{', a state' * state}{', packed' * packed}"
    return Case("selective_scan", name, make, *map(by, KERNEL_AND_TWIN), SHORT)
