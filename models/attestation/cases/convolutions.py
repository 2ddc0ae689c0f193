"""Gated convolutions by their four kernels: taps in registers, blocks of a filter's matrix,
Fourier transforms, and the modal form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from ...config.options.names import Kernel
from ...documents import Documents
from ...kernels.fft_convolution import fft_convolution
from ...layers.gated_convolution import gated_convolution, gated_modal, plain
from .case import NARROW, SHORT, Case, Draw, Inputs, Shape

SHAPES = {"short_convolution": SHORT, "toeplitz": NARROW}


def short_convolutions() -> Iterator[Case]:
    name = "short_convolution"
    yield direct(name, 7, 8, packed=True)  # Hyena-SE
    yield direct(name, 7, 8)
    yield direct(name, 3, 1, gated=False)  # a featurizer
    yield direct(name, 3, 1, gated=False, bias=True, history=True, packed=True)
    yield direct(name, 4, 1, gated=False, silu=True, bias=True, packed=True)  # Mamba
    yield direct(name, 1, 3, bias=True, skip=True)
    yield direct(name, 16, 24, silu=True, bias=True, skip=True, history=True, packed=True)


def toeplitzes() -> Iterator[Case]:
    name = "toeplitz"
    yield direct(name, 128, 16, skip=True, packed=True)  # Hyena-MR
    yield direct(name, 128, 16)
    yield direct(name, 65, 20, skip=True)  # two passes
    yield direct(name, 17, 18, gated=False, history=True, packed=True)
    yield direct(name, 130, 8, history=True, packed=True)
    yield direct(name, 257, 40, skip=True, history=True, packed=True)  # the longest


def direct(
    kernel: str,
    reach: int,
    share: int,
    *,
    gated: bool = True,
    silu: bool = False,
    bias: bool = False,
    skip: bool = False,
    history: bool = False,
    packed: bool = False,
) -> Case:
    options = {"gated": gated, "silu": silu, "bias": bias, "skip": skip}
    options |= {"history": history, "packed": packed}
    named = [name for name, on in options.items() if on]

    def make(draw: Draw, shape: Shape) -> Inputs:
        width = shape.width // share * share
        inputs: Inputs = {
            "x": draw.normal("x", shape.rows, shape.length, width * (3 if gated else 1)),
            "taps": draw.normal("taps", width // share, reach, scale=reach**-0.5),
        }
        if kernel == "toeplitz":  # with a decay, computed in fp32
            inputs["taps"] = inputs["taps"].float()
        if bias:
            inputs["bias"] = draw.normal("bias", width)
        if skip:
            inputs["skip"] = draw.normal("skip", width)
        if history:
            inputs["history"] = draw.normal("history", shape.rows, reach - 1, width)
        if packed:
            inputs["documents"] = draw.documents(shape, continued=history)
        return inputs

    def run(**inputs: Any) -> Tensor:
        return gated_convolution(gated=gated, silu=silu, kernel="triton", **inputs)

    def twin(**inputs: Any) -> Tensor:
        return plain(gated=gated, silu=silu, method="direct", **inputs)

    name = ", ".join([f"{reach} taps, {share} each", *named])
    return Case(kernel, name, make, run, twin, SHAPES[kernel])


def transforms() -> Iterator[Case]:
    """Filters shorter and longer than the row; several pieces of channels and lengths."""
    yield transform(300, 1, gates=True, packed=True)
    yield transform(33, 3, gates=False, packed=False)


def transform(
    reach: int, share: int, *, gates: bool, packed: bool, skip: bool | None = None
) -> Case:
    """Gates come with a skip, unless `skip` says otherwise."""
    skip = gates if skip is None else skip

    def make(draw: Draw, shape: Shape) -> Inputs:
        width = shape.width // share * share
        inputs: Inputs = {
            "x": draw.normal("x", shape.rows, shape.length, width * (3 if gates else 1)),
            "taps": draw.normal("taps", width // share, reach, scale=reach**-0.5).float(),
            "skip": draw.normal("skip", width) if skip else None,
        }
        if packed:
            inputs["documents"] = draw.documents(shape)
        return inputs

    def run(
        x: Tensor, taps: Tensor, skip: Tensor | None, documents: Documents | None = None
    ) -> Tensor:
        positions = None if documents is None else (documents.host or documents).positions
        fused: Tensor = fft_convolution(x, taps, skip, positions, gates)
        return fused

    def twin(**inputs: Any) -> Tensor:
        return plain(gated=gates, method="fft", **inputs)

    name = f"{reach} taps, {share} each{', gated' * gates}{', skip' * skip}{', packed' * packed}"
    return Case("fft_convolution", name, make, run, twin)


def modals() -> Iterator[Case]:
    yield modal(16, gates=True, state=False, packed=True)
    yield modal(5, gates=False, state=True, packed=True)
    yield modal(17, gates=True, state=True, packed=True)
    yield modal(4, gates=True, state=True, packed=False)


def modal(modes: int, *, gates: bool, state: bool, packed: bool, skip: bool | None = None) -> Case:
    """Gates come with a skip, unless `skip` says otherwise."""
    skip = gates if skip is None else skip

    def make(draw: Draw, shape: Shape) -> Inputs:
        width = shape.width
        inputs: Inputs = {
            "x": draw.normal("x", shape.rows, shape.length, width * (3 if gates else 1)),
            "rates": draw.normal("rates", width, modes).float().abs() * 0.1 + 0.003,
            "residues": draw.normal("residues", width, modes, scale=0.3).float(),
            "skip": draw.normal("skip", width) if skip else None,
        }
        if state:
            inputs["state"] = draw.normal("state", shape.rows, width, modes).float()
        if packed:
            inputs["documents"] = draw.documents(shape, continued=state)
        return inputs

    def by(kernel: Kernel) -> Callable[..., Any]:
        def run(**inputs: Any) -> Any:
            y, last = gated_modal(gated=gates, final_state=state, kernel=kernel, **inputs)
            return (y, last) if state else y

        return run

    name = f"{modes} states{', gated' * gates}{', a state' * state}{', packed' * packed}"
    return Case("modal", name, make, by("triton"), by("torch"))
