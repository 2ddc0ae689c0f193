"""Comparison of a kernel with its twin, which runs in fp64 on the kernel's rounded inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .case import Case, Draw, Inputs, Shape


def errors(
    case: Case, draw: Draw, shape: Shape, given: Callable[[Tensor], Tensor] = Tensor.clone
) -> dict[str, float]:
    """Return ‖got − wanted‖ / ‖wanted‖ of every output and gradient, in fp64; infinite for a NaN.
    `given` prepares the tensors for the kernel."""
    inputs = case.make(draw, shape)
    got = evaluate(case.run, inputs, draw, given)
    wanted = evaluate(case.twin, inputs, draw, Tensor.double)
    found = {}
    for name, reference in wanted.items():
        assert got[name].shape == reference.shape, (case.name, name)
        error = (got[name].double() - reference).norm() / reference.norm().clamp(min=1e-30)
        found[name] = float(error.nan_to_num(nan=float("inf")))
    return found


def evaluate(
    function: Callable[..., Any], inputs: Inputs, draw: Draw, convert: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """Return the outputs of `function`, and the gradients of its floating-point inputs."""
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


def apart(x: Tensor) -> Tensor:
    """Return the same numbers with gaps in memory between all of them."""
    return torch.stack([x, x], dim=-1)[..., 0]
