"""Comparison of a kernel with its twin, which runs in fp64 on the kernel's rounded inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .case import Case, Draw, Inputs, InputShape

PEAK = 10.0
"""An element may be this many times as wrong as its tensor: rounding has tails, and the tensor's
norm hides a single wrong element or token."""
REPEATED = ", in a second run"
INFINITE = float("inf")


def measure_errors(
    case: Case,
    draw: Draw,
    shape: InputShape,
    prepare: Callable[[Tensor], Tensor] = Tensor.clone,
    *,
    repeated: bool = False,
) -> dict[str, float]:
    """Return errors of outputs and gradients by name: ‖y − ŷ‖ / ‖ŷ‖ or, if larger,
    max |y − ŷ| / (|ŷ| + rms ŷ) / PEAK, with ŷ from the twin in fp64. A NaN has an infinite error.

    `prepare` copies tensors for the kernel. `repeated` runs the kernel twice: a tensor whose bits
    differ has an infinite error under its name + REPEATED, or the larger error of the two if the
    case is not repeatable.
    """
    inputs = case.make(draw, shape)
    # Poison needs torch's deterministic mode, in which a case that is not repeatable is another.
    with case.context(), poisoned() if case.repeatable else nullcontext():
        results = evaluate(case.run, inputs, draw, prepare)
        again = evaluate(case.run, inputs, draw, prepare) if repeated else {}
    references = evaluate(case.twin, inputs, draw, Tensor.double)
    tensor_errors = {}
    for name, reference in references.items():
        assert results[name].shape == reference.shape, (case.name, name)
        tensor_errors[name] = measure_tensor_error(results[name], reference)
        if not repeated:
            continue
        if not case.repeatable:
            error = measure_tensor_error(again[name], reference)
            tensor_errors[name] = max(error, tensor_errors[name])
        elif not torch.equal(results[name], again[name]):
            tensor_errors[name + REPEATED] = INFINITE
    return tensor_errors


def measure_tensor_error(result: Tensor, reference: Tensor) -> float:
    """Return a tensor's error, as in `measure_errors`."""
    if not reference.numel():
        return 0.0
    difference = (result.double() - reference).abs()
    norm = reference.norm().clamp(min=1e-30)
    rms = norm / reference.numel() ** 0.5
    peak = (difference / (reference.abs() + rms)).max() / PEAK
    error = torch.maximum(difference.norm() / norm, peak)
    return float(error.nan_to_num(nan=INFINITE))


def evaluate(
    function: Callable[..., Any], inputs: Inputs, draw: Draw, convert: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """Return outputs of `function`, and gradients for floating-point inputs, by name."""
    arguments = {
        name: convert(value.detach()).requires_grad_()
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for name, value in inputs.items()
    }
    outputs = function(**arguments)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    leaves = {n: x for n, x in arguments.items() if isinstance(x, Tensor) and x.requires_grad}
    differentiable = [(n, y) for n, y in enumerate(outputs) if y.requires_grad]
    results = {f"output {n}": y.detach() for n, y in enumerate(outputs)}
    if differentiable:
        upstream = [
            convert(draw.normal(f"probe {n}", *y.shape).to(y.dtype)) for n, y in differentiable
        ]
        gradients = torch.autograd.grad(
            [y for _, y in differentiable], list(leaves.values()), upstream
        )
        results |= {f"gradient of {n}": g for n, g in zip(leaves, gradients, strict=True)}
    return results


@contextmanager
def poisoned() -> Iterator[None]:
    """Let torch fill new memory with NaN, which shows elements that no kernel writes."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)


def add_gaps(x: Tensor) -> Tensor:
    """Return equal values with gaps in memory between them."""
    return torch.stack([x, x], dim=-1)[..., 0]
