"""Kernels that store rows in FP8: the twin rounds the output that the kernel stores beside them, so
FP8 values are compared to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...config.options.names import Activation
from ...kernels.fp8 import fp8_rows
from ...kernels.gated_rms_norm import gated_rms_norm, gated_rms_norm_fp8
from ...kernels.glu import glu, glu_fp8
from ...kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_fp8
from ...layers import fp8
from .case import Case, Draw, Inputs, InputShape
from .tokens import EPS, gated_norm_case, glu_case, norm_case


def fp8_cases() -> list[Case]:
    """Return cases whose `run` returns outputs, then the last output in FP8; the `twin`, another
    kernel, returns the outputs alone, with equal bits."""

    def rows(draw: Draw, s: InputShape) -> Inputs:
        x, weight = draw.normal("x", s.rows, s.length, s.width), draw.normal("weight", s.width)
        return {"x": x, "weight": weight}

    def summed(draw: Draw, s: InputShape) -> Inputs:
        return {**rows(draw, s), "residual": draw.normal("residual", s.rows, s.length, s.width)}

    def gates(draw: Draw, s: InputShape) -> Inputs:
        return {"x": draw.normal("x", s.rows, s.length, 2 * s.width)}

    def gated(draw: Draw, s: InputShape) -> Inputs:
        x, weight = rows(draw, s).values()
        return {"y": x, "z": x.flip(0), "weight": weight}

    def powers(weight: Tensor) -> Tensor:
        return torch.exp2(weight.detach().round())

    def scaled(x: Tensor, weight: Tensor) -> Tensor:
        return x * powers(weight) + 0 * weight  # all inputs have gradients

    def round_across_ranks(x: Tensor) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = fp8_rows(x, None, x.abs().amax(-1, keepdim=True).float())
        return result

    return [
        Case(
            "rms_norm",
            "fp8",
            rows,
            lambda x, weight: rms_norm_fp8(x, None, weight, 1e-5, False)[1:],
            lambda x, weight: (rms_norm(x, weight, 1e-5, False),),
        ),
        Case(
            "rms_norm",
            "sum, fp8",
            summed,
            lambda x, weight, residual: rms_norm_fp8(x, residual, weight, 1e-5, True),
            lambda x, weight, residual: add_rms_norm(residual, x, weight, 1e-5, True),
        ),
        Case("glu", "fp8", gates, lambda x: glu_fp8(x, "silu"), lambda x: (glu(x, "silu"),)),
        Case(
            "gated_rms_norm",
            "fp8",
            gated,
            lambda y, z, weight: gated_rms_norm_fp8(y, z, weight, 1e-5),
            lambda y, z, weight: (gated_rms_norm(y, z, weight, 1e-5, 1, ""),),
        ),
        Case(
            "fp8",
            "rows of x · gains",
            rows,
            lambda x, weight: (scaled(x, weight), *fp8_rows(x.detach(), powers(weight), None)),
            lambda x, weight: (scaled(x, weight),),
        ),
        Case(
            "fp8",
            "rows of several ranks",
            rows,
            lambda x, weight: (x * weight, *round_across_ranks((x * weight).detach())),
            lambda x, weight: (x * weight,),
        ),
    ]


def attested_fp8_cases() -> list[Case]:
    """Return cases that add a count to the outputs: FP8 values and scales that differ from a
    rounding of the output beside them."""
    return [
        fp8_norm_case(outside=False),
        fp8_norm_case(outside=True, residual=True),
        fp8_glu_case("silu"),
        fp8_gated_norm_case(),
        fp8_rounding_case(),
    ]


def fp8_norm_case(*, outside: bool, residual: bool = False, eps: float = EPS) -> Case:
    def run(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = rms_norm_fp8(x, residual, weight, eps, outside)
        return outputs if residual is not None else outputs[1:]

    return _stored(norm_case(outside=outside, residual=residual, eps=eps), run)


def fp8_gated_norm_case(eps: float = EPS) -> Case:
    def run(y: Tensor, wide: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = gated_rms_norm_fp8(
            y, wide[..., 8 : 8 + len(weight)], weight, eps
        )
        return outputs

    return _stored(gated_norm_case(1, eps), run)


def fp8_glu_case(activation: Activation) -> Case:
    def run(x: Tensor) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = glu_fp8(x, activation)
        return outputs

    return _stored(glu_case(activation), run)


def fp8_rounding_case() -> Case:
    """Rows alone, and rows times gains that are powers of two, like a matrix's scales."""

    def make(draw: Draw, shape: InputShape) -> Inputs:
        x = draw.normal("x", shape.rows, shape.length, shape.width)
        return {"x": x, "powers": torch.exp2(draw.normal("gains", shape.width).round())}

    def run(x: Tensor, powers: Tensor) -> Tensor:
        with torch.no_grad():
            return sum_tensors(
                _count_differences(fp8_rows(x, gains, None), fp8.plain(x, gains, None))
                for gains in (None, powers)
            )

    return Case("fp8", "rows, and rows of x · gains", make, run, lambda x, powers: x.new_zeros(1))


def _stored(case: Case, run: Callable[..., tuple[Tensor, ...]]) -> Case:
    """Return the case for a kernel that also stores its last output in FP8."""

    def run_and_count(**inputs: Any) -> tuple[Tensor, ...]:
        *outputs, values, scales = run(**inputs)
        rounded = fp8.plain(outputs[-1].detach(), None, None)
        return *outputs, _count_differences((values, scales), rounded)

    def twin(**inputs: Any) -> tuple[Tensor, ...]:
        outputs = case.twin(**inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return *outputs, outputs[0].new_zeros(1)

    return replace(case, name=f"{case.name}, fp8", run=run_and_count, twin=twin)


def _count_differences(stored: tuple[Tensor, Tensor], rounded: tuple[Tensor, Tensor]) -> Tensor:
    """Count values and scales that differ, [1]."""
    pairs = zip(stored, rounded, strict=True)
    return sum_tensors((a.float() != b.float()).sum().view(1) for a, b in pairs)


def sum_tensors(tensors: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(tensors)).sum(0)
