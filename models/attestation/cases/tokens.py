"""Kernels without neighbours in a row: norms, rotations, gates, routed rows, and the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, get_args

import torch
from torch import Tensor
from torch.func import functional_call

from ...config.options.names import Activation, Kernel
from ...config.options.rope import Rope
from ...kernels.gated_rms_norm import gated_rms_norm
from ...kernels.linear_cross_entropy import linear_cross_entropy
from ...kernels.rms_norm import add_rms_norm, rms_norm_with_input
from ...layers.norms import GatedRMSNorm, RMSNorm
from ...layers.rope import rotate, rotation
from ...layers.routed_rows import combine, dispatch, sort_choices
from ...model.loss import cross_entropy
from ...operators.mlp import apply_gate
from .case import Case, Draw, Inputs, InputShape

EPS = 1e-2


def norm_cases() -> Iterator[Case]:
    for outside in (False, True):
        yield norm_case(outside=outside)
        yield norm_case(outside=outside, pair=True)
        yield norm_case(outside=outside, residual=True)
    yield norm_case(outside=True, residual=True, wide=True)


def norm_case(
    *,
    outside: bool,
    pair: bool = False,
    residual: bool = False,
    wide: bool = False,
    eps: float = EPS,
) -> Case:
    def make(draw: Draw, shape: InputShape) -> Inputs:
        over = (shape.rows, shape.length, shape.width)
        inputs = {"x": draw.normal("x", *over), "weight": draw.normal("weight", shape.width)}
        if residual:
            inputs["residual"] = draw.normal("residual", *over)
        return {name: y.float() if wide and name != "x" else y for name, y in inputs.items()}

    def run(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Any:
        if residual is None:
            both = rms_norm_with_input(x, weight, eps, outside)
            return both if pair else both[1]
        return add_rms_norm(residual, x, weight, eps, outside)

    def twin(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Any:
        module = RMSNorm(len(weight), eps, eps_outside=outside, kernel="torch")
        return functional_call(module, {"weight": weight}, (x, residual), {"with_input": pair})

    name = f"{'x and ' * pair}{'sum and ' * residual}norm, eps {'outside' if outside else 'inside'}"
    return Case("rms_norm", name + ", an fp32 stream and weight" * wide, make, run, twin)


def gated_norm_cases() -> Iterator[Case]:
    yield gated_norm_case(1)
    yield gated_norm_case(4)


def gated_norm_case(groups: int, eps: float = EPS) -> Case:
    def make(draw: Draw, shape: InputShape) -> Inputs:
        width = shape.width // groups * groups
        y = draw.normal("y", shape.rows, shape.length, width)
        wide = draw.normal("wide", shape.rows, shape.length, width + 24)
        return {"y": y, "wide": wide, "weight": draw.normal("weight", width)}

    def run(y: Tensor, wide: Tensor, weight: Tensor) -> Tensor:
        fused: Tensor = gated_rms_norm(y, wide[..., 8 : 8 + len(weight)], weight, eps, groups, "")
        return fused

    def twin(y: Tensor, wide: Tensor, weight: Tensor) -> Any:
        module = GatedRMSNorm(len(weight), eps, groups=groups, kernel="torch")
        return functional_call(module, {"weight": weight}, (y, wide[..., 8 : 8 + len(weight)]))

    return Case("gated_rms_norm", f"{groups} groups", make, run, twin)


def rope_cases() -> Iterator[Case]:
    yield rope_case(4, 16, packed=True)
    yield rope_case(3, 10, packed=False)


def rope_case(heads: int, turning: float, *, packed: bool, head_dim: int | None = None) -> Case:
    """`turning` sixteenths of a head's channels turn."""

    def make(draw: Draw, shape: InputShape) -> Inputs:
        dim = head_dim or max(16, shape.width // 32)
        joint = draw.normal("x", shape.rows, shape.length, (heads + 1) * dim)
        positions = torch.arange(shape.length, device=draw.device).unsqueeze(0)
        if packed:
            positions = draw.documents(shape).positions
        return {"joint": joint, "positions": positions, "dim": dim}

    def make_run(kernel: Kernel) -> Callable[..., Tensor]:
        def run(joint: Tensor, positions: Tensor, dim: int) -> Tensor:
            x = joint[..., : heads * dim].unflatten(-1, (heads, dim))
            cos, sin = rotation(Rope(base=100.0), positions, round(dim * turning / 16))
            return rotate(x, cos, sin, kernel)

        return run

    size = f" of {head_dim}" if head_dim else ""
    name = f"{heads} heads{size}, {turning:g}/16 turning{', packed' * packed}"
    return Case("rope", name, make, make_run("triton"), make_run("torch"))


def glu_cases() -> Iterator[Case]:
    for activation in get_args(Activation):
        yield glu_case(activation)
    yield glu_case("quick-gelu", limit=1.0, offset=1.0)


def glu_case(activation: Activation, *, limit: float = 0.0, offset: float = 0.0) -> Case:
    def make(draw: Draw, shape: InputShape) -> Inputs:
        x = draw.normal("x", shape.rows, shape.length, 2 * shape.width)
        if limit:  # numbers at the bounds, as half precision has many
            x[..., ::7], x[..., 1::7] = limit, -limit
        return {"x": x}

    def make_run(kernel: Kernel) -> Callable[..., Tensor]:
        return lambda x: apply_gate(x, activation, kernel, limit=limit or None, offset=offset)

    name = (
        activation + f", clamped to {limit:g}" * (limit > 0) + f", up + {offset:g}" * (offset != 0)
    )
    return Case("glu", name, make, make_run("triton"), make_run("torch"))


def routed_rows_cases() -> Iterator[Case]:
    yield routed_rows_case(1)
    yield routed_rows_case(3)


def routed_rows_case(choices: int) -> Case:
    def make(draw: Draw, shape: InputShape) -> Inputs:
        tokens = shape.rows * shape.length
        return {
            "x": draw.normal("x", tokens, shape.width),
            "rows": draw.normal("rows", tokens * choices, shape.width),
            "weights": draw.normal("weights", tokens, choices).float(),
            "experts": draw.normal("experts", tokens, choices).mul(2).long(),
        }

    def make_run(kernel: Kernel) -> Callable[..., tuple[Tensor, Tensor]]:
        def run(x: Tensor, rows: Tensor, weights: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
            """Outside the kernel, rows are in token order."""
            places = sort_choices(experts)
            flat = places.flatten()
            dispatched = dispatch(x, places, kernel).index_select(0, flat)
            by_expert = torch.empty_like(rows).index_copy(0, flat, rows)
            return dispatched, combine(by_expert, places, weights, kernel)

        return run

    name = f"{choices} experts for each token"
    return Case("routed_rows", name, make, make_run("triton"), make_run("torch"))


def loss_cases() -> Iterator[Case]:
    yield loss_case(0.0, weighted=False)
    yield loss_case(1e-2, weighted=True, ids=61)  # so few that sums are fp32


def loss_case(z_loss: float, *, weighted: bool, ids: int | None = None) -> Case:
    """`ids` is the vocabulary's size: by default an odd number that grows with the width."""

    def make(draw: Draw, shape: InputShape) -> Inputs:
        tokens, vocabulary = shape.rows * shape.length, ids or 5 * shape.width + 3
        targets = draw.normal("targets", tokens).abs().mul(1e4).long() % vocabulary
        weights = draw.normal("weights", tokens).abs().float()
        weights = torch.where(weights > 0.5, weights, 0) if weighted else torch.ones_like(weights)
        targets = torch.where(weights > 0, targets, -100)
        return {
            "hidden": draw.normal("hidden", tokens, shape.width),
            "weight": draw.normal("weight", vocabulary, shape.width, scale=shape.width**-0.5),
            "fixed": (targets, weights),
        }

    def run(hidden: Tensor, weight: Tensor, fixed: Any) -> tuple[Tensor, Tensor]:
        total, token_losses, *_ = linear_cross_entropy(
            hidden, weight, *fixed, z_loss, True, len(weight), ""
        )
        return total, token_losses

    def twin(hidden: Tensor, weight: Tensor, fixed: Any) -> tuple[Tensor, Tensor]:
        logits = hidden @ weight.T
        tokens = list(zip(logits[:, None], *(x[:, None] for x in fixed), strict=True))
        plain, both = (
            torch.stack([cross_entropy(*token, z_loss=z)[0] for token in tokens]).detach()
            for z in (0.0, z_loss)
        )
        return cross_entropy(logits, *fixed, z_loss=z_loss)[0], torch.stack([plain, both - plain])

    name = f"{f'{ids:,} ids, ' if ids else ''}z_loss {z_loss}{', weighted' * weighted}"
    return Case("linear_cross_entropy", name, make, run, twin)
