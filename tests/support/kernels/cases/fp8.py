"""Cases of the kernels that store rows in FP8. Their twin rounds what the kernel stores beside it,
so they are compared to the bit (tests/models/kernels/test_fp8.py), not with fp64."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.models.kernels.fp8 import fp8_rows
from headrace.models.kernels.gated_rms_norm import gated_rms_norm, gated_rms_norm_fp8
from headrace.models.kernels.glu import glu, glu_fp8
from headrace.models.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_fp8

from .case import Case, Draw, Inputs, Shape


def fp8_cases() -> list[Case]:
    """Return cases whose `run` returns outputs, and the last one in FP8; `twin` returns the same
    outputs without FP8."""

    def rows(draw: Draw, s: Shape) -> Inputs:
        x, weight = draw.normal("x", s.rows, s.length, s.width), draw.normal("weight", s.width)
        return {"x": x, "weight": weight}

    def summed(draw: Draw, s: Shape) -> Inputs:
        return {**rows(draw, s), "residual": draw.normal("residual", s.rows, s.length, s.width)}

    def gates(draw: Draw, s: Shape) -> Inputs:
        return {"x": draw.normal("x", s.rows, s.length, 2 * s.width)}

    def gated(draw: Draw, s: Shape) -> Inputs:
        given = rows(draw, s)
        return {"y": given["x"], "z": given["x"].flip(0), "weight": given["weight"]}

    def powers(weight: Tensor) -> Tensor:
        return torch.exp2(weight.detach().round())

    def scaled(x: Tensor, weight: Tensor) -> Tensor:
        return x * powers(weight) + 0 * weight  # all inputs have gradients

    def of_ranks(x: Tensor) -> tuple[Tensor, Tensor]:
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
            lambda x, weight: (x * weight, *of_ranks((x * weight).detach())),
            lambda x, weight: (x * weight,),
        ),
    ]
