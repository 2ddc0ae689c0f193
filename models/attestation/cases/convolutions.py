"""Gated convolutions by four kernels: taps in registers, blocks in a filter's matrix, Fourier
transforms, and the modal form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from ...config.options.names import Kernel
from ...documents import Documents
from ...kernels.fft_convolution import fft_convolution
from ...layers.gated_convolution import gated_convolution, gated_modal, plain
from .case import NARROW, SHORT, Case, Draw, Inputs, InputShape

SHAPES = {"short_convolution": SHORT, "toeplitz": NARROW}


def short_convolution_cases() -> Iterator[Case]:
    name = "short_convolution"
    yield direct_case(name, 7, 8, packed=True)  # Hyena-SE
    yield direct_case(name, 7, 8)
    yield direct_case(name, 3, 1, gated=False)  # a featurizer
    yield direct_case(name, 3, 1, gated=False, bias=True, history=True, packed=True)
    yield direct_case(name, 4, 1, gated=False, silu=True, bias=True, packed=True)  # Mamba
    yield direct_case(name, 1, 3, bias=True, skip=True)
    yield direct_case(name, 16, 24, silu=True, bias=True, skip=True, history=True, packed=True)


def toeplitz_cases() -> Iterator[Case]:
    name = "toeplitz"
    yield direct_case(name, 128, 16, skip=True, packed=True)  # Hyena-MR
    yield direct_case(name, 128, 16)
    yield direct_case(name, 65, 20, skip=True)  # two passes
    yield direct_case(name, 17, 18, gated=False, history=True, packed=True)
    yield direct_case(name, 130, 8, history=True, packed=True)
    yield direct_case(name, 257, 40, skip=True, history=True, packed=True)  # the longest


def direct_case(
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
    features = [option for option, enabled in options.items() if enabled]

    def make(draw: Draw, shape: InputShape) -> Inputs:
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

    name = ", ".join([f"{reach} taps, {share} each", *features])
    return Case(kernel, name, make, run, twin, SHAPES[kernel])


def fft_cases() -> Iterator[Case]:
    """Filters shorter and longer than the row."""
    yield fft_case(300, 1, gates=True, packed=True)
    yield fft_case(33, 3, gates=False, packed=False)


def fft_case(
    reach: int, share: int, *, gates: bool, packed: bool, skip: bool | None = None
) -> Case:
    """Gates come with a skip, unless `skip` says otherwise."""
    skip = gates if skip is None else skip

    def make(draw: Draw, shape: InputShape) -> Inputs:
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


def modal_cases() -> Iterator[Case]:
    yield modal_case(16, gates=True, state=False, packed=True)
    yield modal_case(5, gates=False, state=True, packed=True)
    yield modal_case(17, gates=True, state=True, packed=True)
    yield modal_case(4, gates=True, state=True, packed=False)


def modal_case(
    modes: int, *, gates: bool, state: bool, packed: bool, skip: bool | None = None
) -> Case:
    """Gates come with a skip, unless `skip` says otherwise."""
    skip = gates if skip is None else skip

    def make(draw: Draw, shape: InputShape) -> Inputs:
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

    def make_run(kernel: Kernel) -> Callable[..., Any]:
        def run(**inputs: Any) -> Any:
            y, last = gated_modal(gated=gates, final_state=state, kernel=kernel, **inputs)
            return (y, last) if state else y

        return run

    name = f"{modes} states{', gated' * gates}{', a state' * state}{', packed' * packed}"
    return Case("modal", name, make, make_run("triton"), make_run("torch"))
