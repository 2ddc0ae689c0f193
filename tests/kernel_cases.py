"""Every fused kernel, with every option: what it is given, how it is called, and its twin.

The tests run them by Triton's interpreter and compile them; the benchmark of kernels runs them on
a GPU. A case's twin is run in fp64 on the numbers that the kernel was given, rounded as they are.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from headrace.models import scan
from headrace.models.documents import Documents
from headrace.models.gated_convolution import gated_convolution, gated_modal, plain
from headrace.models.gated_scan import gated_scan
from headrace.models.kernels import fft_convolution, gated_rms_norm, linear_cross_entropy, rms_norm
from headrace.models.kernels import ssd as ssd_kernel
from headrace.models.kernels.choice import Kernel
from headrace.models.loss import cross_entropy
from headrace.models.norms import GatedRMSNorm, RMSNorm
from headrace.models.operators.mlp import Activation, gated
from headrace.models.rope import Rope, rotate, rotation

Inputs = dict[str, Any]
KERNEL_AND_TWIN: tuple[Kernel, Kernel] = ("triton", "torch")


@dataclass(frozen=True)
class Shape:
    rows: int
    length: int
    width: int


TINY = Shape(2, 70, 72)
"""More than one tile of each kind, and no side a multiple of one."""
SHORT = Shape(2, 20, 72)
"""The same for kernels that walk along tokens, which the interpreter does slowly."""

NARROW = Shape(2, 70, 40)
"""For blocks of a filter's matrix, of which a group of channels takes many."""


@dataclass(frozen=True)
class Draw:
    """Fresh random numbers of a type, on a device."""

    dtype: torch.dtype
    device: str
    seed: int

    def normal(self, name: str, *shape: int, scale: float = 1.0) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(
            zlib.crc32(f"{self.seed} {name}".encode())
        )
        x = torch.randn(shape, generator=generator, device=self.device)
        return (x * scale).to(self.dtype)

    def documents(self, shape: Shape, *, goes_on: bool = False) -> Documents:
        """A few for each row, one of a single token; the first may have begun before the row."""
        if not shape.rows:
            return Documents(torch.zeros(0, shape.length, dtype=torch.int64, device=self.device))
        generator = torch.Generator().manual_seed(self.seed)
        total = shape.rows * shape.length
        cuts = torch.randint(1, max(total, 2), (4 * shape.rows,), generator=generator)
        cuts = torch.cat([cuts, cuts[:1] + 1, torch.tensor([0, total])]).clamp(max=total)
        sorted_cuts = cuts.sort().values.to(torch.int32)
        documents = Documents.from_cu_seqlens(sorted_cuts, (shape.rows, shape.length))
        positions = documents.positions
        if goes_on:
            positions = positions + 5 * ((positions == 0).cumsum(1) == 1)
        return Documents(positions.to(self.device))


@dataclass(frozen=True)
class Case:
    kernel: str
    name: str
    make: Callable[[Draw, Shape], Inputs]
    run: Callable[..., Any]
    twin: Callable[..., Any]

    @property
    def tiny(self) -> Shape:
        if self.kernel == "toeplitz":
            return NARROW
        return SHORT if self.kernel in ("selective_scan", "short_convolution") else TINY


def errors(
    case: Case, draw: Draw, shape: Shape, given: Callable[[Tensor], Tensor] = Tensor.clone
) -> dict[str, float]:
    """‖got − wanted‖ / ‖wanted‖ of every output and gradient, in fp64; infinite for a NaN. `given`
    is how tensors are given to the kernel."""
    inputs = case.make(draw, shape)
    got = evaluate(case.run, inputs, draw, given)
    wanted = evaluate(case.twin, inputs, draw, Tensor.double)
    found = {}
    for name, reference in wanted.items():
        assert got[name].shape == reference.shape, (case.name, name)
        error = (got[name].double() - reference).norm() / reference.norm().clamp(min=1e-30)
        found[name] = float(error.nan_to_num(nan=float("inf")))
    return found


def apart(x: Tensor) -> Tensor:
    """The same numbers, no two of which are neighbours in memory."""
    return torch.stack([x, x], dim=-1)[..., 0]


def evaluate(
    function: Callable[..., Any], inputs: Inputs, draw: Draw, convert: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """The outputs of `function`, and the gradients of its floating-point inputs."""
    given = {
        name: convert(value.detach()).requires_grad_()
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for name, value in inputs.items()
    }
    outputs = function(**given)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    leaves = {n: x for n, x in given.items() if isinstance(x, Tensor) and x.requires_grad}
    flowing = [(n, y) for n, y in enumerate(outputs) if y.requires_grad]
    probes = [convert(draw.normal(f"probe {n}", *y.shape).to(y.dtype)) for n, y in flowing]
    gradients = torch.autograd.grad([y for _, y in flowing], list(leaves.values()), probes)
    return {
        **{f"output {n}": y.detach() for n, y in enumerate(outputs)},
        **{f"gradient of {n}": g for n, g in zip(leaves, gradients, strict=True)},
    }


# Gated convolutions


def convolution_case(
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
        if kernel == "toeplitz":  # under a decay, which is worked out in fp32
            inputs["taps"] = inputs["taps"].float()
        if bias:
            inputs["bias"] = draw.normal("bias", width)
        if skip:
            inputs["skip"] = draw.normal("skip", width)
        if history:
            inputs["history"] = draw.normal("history", shape.rows, reach - 1, width)
        if packed:
            inputs["documents"] = draw.documents(shape, goes_on=history)
        return inputs

    def run(**inputs: Any) -> Tensor:
        return gated_convolution(gated=gated, silu=silu, kernel="triton", **inputs)

    def twin(**inputs: Any) -> Tensor:
        return plain(gated=gated, silu=silu, method="direct", **inputs)

    return Case(kernel, f"{reach} taps, {share} each, {' '.join(named)}", make, run, twin)


def short_convolutions() -> Iterator[Case]:
    name = "short_convolution"
    yield convolution_case(name, 7, 8, packed=True)  # Hyena-SE
    yield convolution_case(name, 7, 8)
    yield convolution_case(name, 3, 1, gated=False)  # a featurizer
    yield convolution_case(name, 3, 1, gated=False, bias=True, history=True, packed=True)
    yield convolution_case(name, 4, 1, gated=False, silu=True, bias=True, packed=True)  # Mamba
    yield convolution_case(name, 1, 3, bias=True, skip=True)
    yield convolution_case(name, 16, 24, silu=True, bias=True, skip=True, history=True, packed=True)


def toeplitzes() -> Iterator[Case]:
    name = "toeplitz"
    yield convolution_case(name, 128, 16, skip=True, packed=True)  # Hyena-MR
    yield convolution_case(name, 128, 16)
    yield convolution_case(name, 65, 20, skip=True)  # two passes
    yield convolution_case(name, 17, 18, gated=False, history=True, packed=True)
    yield convolution_case(name, 130, 40, skip=True, history=True, packed=True)


def transforms() -> Iterator[Case]:
    """Filters that end within the row, and that do not; several pieces of channels and lengths."""
    for reach, share, gates, packed in ((300, 1, True, True), (33, 3, False, False)):
        name = f"{reach} taps, {share} each{', gated, skip' * gates}{', packed' * packed}"

        def make(
            draw: Draw,
            shape: Shape,
            reach: int = reach,
            share: int = share,
            gates: bool = gates,
            packed: bool = packed,
        ) -> Inputs:
            width = shape.width // share * share
            inputs: Inputs = {
                "x": draw.normal("x", shape.rows, shape.length, width * (3 if gates else 1)),
                "taps": draw.normal("taps", width // share, reach, scale=reach**-0.5).float(),
                "skip": draw.normal("skip", width) if gates else None,
            }
            if packed:
                inputs["documents"] = draw.documents(shape)
            return inputs

        def run(
            x: Tensor,
            taps: Tensor,
            skip: Tensor | None,
            documents: Documents | None = None,
            gates: bool = gates,
        ) -> Tensor:
            positions = documents.positions if documents is not None else None
            fused: Tensor = fft_convolution.fft_convolution(x, taps, skip, positions, gates)
            return fused

        def twin(gates: bool = gates, **inputs: Any) -> Tensor:
            return plain(gated=gates, method="fft", **inputs)

        yield Case("fft_convolution", name, make, run, twin)


def modals() -> Iterator[Case]:
    for modes, gates, state, packed in (
        (16, True, False, True),
        (5, False, True, True),
        (17, True, True, True),
        (4, True, True, False),
    ):
        name = f"{modes} states{', gated' * gates}{', a state' * state}{', packed' * packed}"

        def make(
            draw: Draw,
            shape: Shape,
            modes: int = modes,
            gates: bool = gates,
            state: bool = state,
            packed: bool = packed,
        ) -> Inputs:
            width = shape.width
            inputs: Inputs = {
                "x": draw.normal("x", shape.rows, shape.length, width * (3 if gates else 1)),
                "rates": draw.normal("rates", width, modes).float().abs() * 0.1 + 0.003,
                "residues": draw.normal("residues", width, modes, scale=0.3).float(),
                "skip": draw.normal("skip", width) if gates else None,
            }
            if state:
                inputs["state"] = draw.normal("state", shape.rows, width, modes).float()
            if packed:
                inputs["documents"] = draw.documents(shape, goes_on=state)
            return inputs

        def modal(kernel: Kernel, gates: bool = gates, state: bool = state) -> Callable[..., Any]:
            def run(**inputs: Any) -> Any:
                y, last = gated_modal(gated=gates, final_state=state, kernel=kernel, **inputs)
                return (y, last) if state else y

            return run

        yield Case("modal", name, make, *map(modal, KERNEL_AND_TWIN))


def ssds() -> Iterator[Case]:
    for groups, heads, state, packed in ((1, 3, False, True), (2, 4, True, False)):
        name = f"{heads} heads, {groups} groups{', a state' * state}{', packed' * packed}"

        def make(
            draw: Draw,
            shape: Shape,
            groups: int = groups,
            heads: int = heads,
            state: bool = state,
            packed: bool = packed,
        ) -> Inputs:
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
                inputs["documents"] = draw.documents(shape, goes_on=state)
            return inputs

        def run(
            state: Tensor | None = None, documents: Documents | None = None, **inputs: Tensor
        ) -> tuple[Tensor, Tensor]:
            positions = documents.positions if documents is not None else None
            y, final, *_ = ssd_kernel.ssd(**inputs, state=state, positions=positions, axis="")
            return y, final

        yield Case("ssd", name, make, run, scan.ssd)


def selective_scans() -> Iterator[Case]:
    for heads, size, state, packed in ((1, 16, False, True), (2, 3, True, True)):
        name = f"{heads} heads, {size} states{', a state' * state}{', packed' * packed}"

        def make(
            draw: Draw,
            shape: Shape,
            heads: int = heads,
            size: int = size,
            state: bool = state,
            packed: bool = packed,
        ) -> Inputs:
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
                inputs["documents"] = draw.documents(shape, goes_on=state)
            return inputs

        def scan(kernel: Kernel, size: int = size) -> Callable[..., Any]:
            def run(wide: Tensor, z: Tensor, **inputs: Any) -> tuple[Tensor, Tensor]:
                _, B, C = wide.split([5, size, size], dim=-1)  # slices, as a projection gives them
                return gated_scan(B=B, C=C, z=z[..., 8:], kernel=kernel, **inputs)

            return run

        yield Case("selective_scan", name, make, *map(scan, KERNEL_AND_TWIN))


# What is done to each token


def norms() -> Iterator[Case]:
    def make(draw: Draw, shape: Shape) -> Inputs:
        width = shape.width
        x = draw.normal("x", shape.rows, shape.length, width)
        return {"x": x, "weight": draw.normal("weight", width)}

    def make_sum(draw: Draw, shape: Shape) -> Inputs:
        residual = draw.normal("residual", shape.rows, shape.length, shape.width)
        return {"residual": residual, **make(draw, shape)}

    def make_wide_sum(draw: Draw, shape: Shape) -> Inputs:
        return {n: x if n == "x" else x.float() for n, x in make_sum(draw, shape).items()}

    for eps, outside in ((1e-2, False), (1e-2, True)):

        def twin(weight: Tensor, eps: float = eps, outside: bool = outside) -> RMSNorm:
            norm = RMSNorm(len(weight), eps, eps_outside=outside, kernel="torch")
            return with_weight(norm, weight)

        def norm(x: Tensor, weight: Tensor, eps: float = eps, outside: bool = outside) -> Any:
            return rms_norm.rms_norm(x, weight, eps, outside)

        def sum_norm(
            residual: Tensor, x: Tensor, weight: Tensor, eps: float = eps, outside: bool = outside
        ) -> Any:
            return rms_norm.add_rms_norm(residual, x, weight, eps, outside)

        def plain_norm(x: Tensor, weight: Tensor, twin: Any = twin) -> Any:
            return twin(weight)(x)

        def plain_sum(residual: Tensor, x: Tensor, weight: Tensor, twin: Any = twin) -> Any:
            return twin(weight)(x, residual)

        options = f"eps {'outside' if outside else 'inside'}"
        yield Case("rms_norm", f"norm, {options}", make, norm, plain_norm)
        yield Case("rms_norm", f"sum and norm, {options}", make_sum, sum_norm, plain_sum)
    name = "sum and norm, an fp32 stream and weight"
    yield Case("rms_norm", name, make_wide_sum, sum_norm, plain_sum)


def with_weight(norm: Any, weight: Tensor) -> Any:
    """The norm with another tensor for its weight, one that has gradients."""
    del norm._parameters["weight"]
    norm.weight = weight
    return norm


def gated_norms() -> Iterator[Case]:
    for groups in (1, 4):

        def make(draw: Draw, shape: Shape, groups: int = groups) -> Inputs:
            width = shape.width // groups * groups
            y = draw.normal("y", shape.rows, shape.length, width)
            wide = draw.normal("wide", shape.rows, shape.length, width + 24)
            return {"y": y, "wide": wide, "weight": draw.normal("weight", width)}

        def norm(y: Tensor, wide: Tensor, weight: Tensor, groups: int = groups) -> Tensor:
            z = wide[..., 8 : 8 + len(weight)]
            fused: Tensor = gated_rms_norm.gated_rms_norm(y, z, weight, 1e-2, groups)
            return fused

        def plain_norm(y: Tensor, wide: Tensor, weight: Tensor, groups: int = groups) -> Tensor:
            module = GatedRMSNorm(len(weight), 1e-2, groups=groups, kernel="torch")
            result: Tensor = with_weight(module, weight)(y, wide[..., 8 : 8 + len(weight)])
            return result

        yield Case("gated_rms_norm", f"{groups} groups", make, norm, plain_norm)


def ropes() -> Iterator[Case]:
    for heads, turning, packed in ((4, 16, True), (3, 10, False)):

        def make(draw: Draw, shape: Shape, heads: int = heads, packed: bool = packed) -> Inputs:
            dim = max(16, shape.width // 32)
            joint = draw.normal("x", shape.rows, shape.length, (heads + 1) * dim)
            positions = torch.arange(shape.length, device=draw.device).unsqueeze(0)
            if packed:
                positions = draw.documents(shape).positions
            return {"joint": joint, "positions": positions, "dim": dim}

        def turn(kernel: Kernel, heads: int = heads, turning: int = turning) -> Callable[..., Any]:
            def run(joint: Tensor, positions: Tensor, dim: int) -> Tensor:
                x = joint[..., : heads * dim].unflatten(-1, (heads, dim))
                cos, sin = rotation(Rope(base=100.0), positions, dim * turning // 16)
                return rotate(x, cos, sin, kernel)

            return run

        name = f"{heads} heads, {turning}/16 turning{', packed' if packed else ''}"
        yield Case("rope", name, make, *map(turn, KERNEL_AND_TWIN))


def glus() -> Iterator[Case]:
    def make(draw: Draw, shape: Shape) -> Inputs:
        return {"x": draw.normal("x", shape.rows, shape.length, 2 * shape.width)}

    for activation in get_args(Activation):

        def gate(kernel: Kernel, activation: Activation = activation) -> Callable[..., Any]:
            return lambda x: gated(x, activation, kernel)

        yield Case("glu", activation, make, *map(gate, KERNEL_AND_TWIN))


# The loss


def losses() -> Iterator[Case]:
    for z_loss, weighted in ((0.0, False), (1e-2, True)):

        def make(draw: Draw, shape: Shape, weighted: bool = weighted) -> Inputs:
            tokens, vocabulary = shape.rows * shape.length, 5 * shape.width + 3
            targets = draw.normal("targets", tokens).abs().mul(1e4).long() % vocabulary
            weights = draw.normal("weights", tokens).abs().float()
            weights = (
                torch.where(weights > 0.5, weights, 0) if weighted else torch.ones_like(weights)
            )
            targets = torch.where(weights > 0, targets, -100)
            return {
                "hidden": draw.normal("hidden", tokens, shape.width),
                "weight": draw.normal("weight", vocabulary, shape.width, scale=shape.width**-0.5),
                "fixed": (targets, weights),
            }

        def run(
            hidden: Tensor, weight: Tensor, fixed: Any, z_loss: float = z_loss
        ) -> tuple[Tensor, Tensor]:
            total, each, *_ = linear_cross_entropy.linear_cross_entropy(
                hidden, weight, *fixed, z_loss, True, len(weight), ""
            )
            return total, each

        def twin(
            hidden: Tensor, weight: Tensor, fixed: Any, z_loss: float = z_loss
        ) -> tuple[Tensor, Tensor]:
            logits = hidden @ weight.T
            each = [
                cross_entropy(*token, z_loss=z_loss)[0]
                for token in zip(logits[:, None], *(x[:, None] for x in fixed), strict=True)
            ]
            return cross_entropy(logits, *fixed, z_loss=z_loss)[0], torch.stack(each).detach()

        name = f"z_loss {z_loss}{', weighted' if weighted else ''}"
        yield Case("linear_cross_entropy", name, make, run, twin)


def all_cases() -> list[Case]:
    return [
        *losses(),
        *short_convolutions(),
        *toeplitzes(),
        *transforms(),
        *modals(),
        *ssds(),
        *selective_scans(),
        *norms(),
        *gated_norms(),
        *ropes(),
        *glus(),
    ]
