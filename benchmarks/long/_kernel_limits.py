"""Part `limits` of kernels.py, for one kernel: conditions that only a device can test.

The first case of a kernel, in bf16: tensors with gaps in memory, one token, no rows, more elements
than 32 bits can index, a device that is not the current one, a CUDA graph, and a compiled graph
that runs rows of several lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from headrace.models.attestation.cases import all_cases
from headrace.models.attestation.cases.case import Case, Draw, InputShape
from headrace.models.attestation.cases.compare import add_gaps, evaluate, measure_errors
from headrace.models.documents import Documents

BOUND = 2e-2
"""Largest ‖got − wanted‖ / ‖wanted‖."""
ODD = InputShape(3, 515, 520)
ROWS = 5
FAR = InputShape(1, 1 << 17, 4096)
"""Shape of a row, before `far` lengthens it until ROWS rows exceed 2³¹ elements."""


def beyond_limits(kernel: str, dry: bool) -> Iterator[str]:
    """Yield a line for each failure of a kernel."""
    case = next(case for case in all_cases() if case.kernel == kernel)
    draw = Draw(torch.float32 if dry else torch.bfloat16, "cpu" if dry else "cuda", 1)
    odd = case.tiny if dry else ODD
    tries: dict[str, Callable[[], float]] = {
        "gaps in memory": lambda: max_error(measure_errors(case, draw, odd, add_gaps)),
        "one token": lambda: max_error(measure_errors(case, draw, InputShape(1, 1, odd.width))),
        "no rows": lambda: no_row(case, draw, odd),
        "equal rows": lambda: rows_alike(
            case, draw, InputShape(1, 20, 72) if dry else far_shape(case, draw)
        ),
        "several lengths in a compiled graph": lambda: compiled(case, draw, odd),
    }
    if not dry and kernel != "fft_convolution":  # its launches follow the documents
        tries["a CUDA graph"] = lambda: recorded(case, draw, odd)
    if torch.cuda.device_count() > 1:
        second_device = Draw(draw.dtype, "cuda:1", 1)
        tries["another device"] = lambda: max_error(measure_errors(case, second_device, odd))
    for name, run in tries.items():
        try:
            error = run()
        except Exception as raised:  # continue with the other conditions
            yield f"WRONG {name}: {type(raised).__name__}: {raised}"[:300]
        else:
            if not error < BOUND:
                yield f"WRONG {name}: {error:.1e}"
        if not dry:
            torch.cuda.empty_cache()
    print(f"{kernel}: tried {', '.join(tries)}", flush=True)


def max_error(by_tensor: dict[str, float]) -> float:
    return max(by_tensor.values())


def difference(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(
        float((got[name].double() - y.double()).norm() / y.double().norm().clamp(min=1e-30))
        for name, y in expected.items()
    )


def no_row(case: Case, draw: Draw, shape: InputShape) -> float:
    """Return the largest gradient: without rows, all gradients of weights are 0."""
    inputs = case.make(draw, InputShape(0, shape.length, shape.width))
    tensors = evaluate(case.run, inputs, draw, Tensor.clone)
    return max(float(y.abs().sum()) for y in tensors.values())


def compiled(case: Case, draw: Draw, shape: InputShape) -> float:
    """Compare one compiled graph for all lengths with the kernel alone."""
    backend = "inductor" if draw.device != "cpu" else "aot_eager"
    graph = torch.compile(case.run, fullgraph=True, dynamic=True, backend=backend)
    largest = 0.0
    for length in (shape.length, shape.length + 13):
        inputs = case.make(draw, InputShape(shape.rows, length, shape.width))
        both = (evaluate(function, inputs, draw, Tensor.clone) for function in (graph, case.run))
        largest = max(largest, difference(*both))
    return largest


class Known(Draw):
    """Random numbers drawn once and reused: a CUDA graph cannot draw."""

    normal = cache(Draw.normal)


def recorded(case: Case, draw: Draw, shape: InputShape) -> float:
    """Compare forward and backward in a CUDA graph, which allows no synchronisation."""
    known = Known(draw.dtype, draw.device, draw.seed)
    inputs = case.make(known, shape)
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        expected = evaluate(case.run, inputs, known, Tensor.clone)
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = evaluate(case.run, inputs, known, Tensor.clone)
    graph.replay()
    return difference(replayed, expected)


class Alike(Draw):
    """Gradients of the output that are equal for ROWS rows."""

    def normal(self, name: str, *shape: int, scale: float = 1.0) -> Tensor:
        if not name.startswith("probe") or not shape:
            return super().normal(name, *shape, scale=scale)
        row = super().normal(name, shape[0] // ROWS, *shape[1:], scale=scale)
        return repeat_rows(row)


def far_shape(case: Case, draw: Draw) -> InputShape:
    largest = max(map(numbers, case.make(draw, FAR).values()))
    return replace(FAR, length=FAR.length * -(-(1 << 31) // (ROWS * largest)))


def rows_alike(case: Case, draw: Draw, shape: InputShape) -> float:
    """Compare the first and the last of ROWS equal rows: their results must be equal."""
    alike = Alike(draw.dtype, draw.device, draw.seed)
    single, double = (case.make(draw, InputShape(rows, 4, 72)) for rows in (1, 2))
    of_rows = {name for name in single if size(single[name]) != size(double[name])}
    inputs = case.make(draw, shape)
    inputs |= {name: repeat_rows(inputs[name]) for name in of_rows}
    results = {
        name: y.unflatten(0, (ROWS, -1))
        for name, y in evaluate(case.run, inputs, alike, Tensor.clone).items()
        if (name.startswith("output") and y.dim()) or name.removeprefix("gradient of ") in of_rows
    }
    first, last = ({name: y[end] for name, y in results.items()} for end in (0, -1))
    return difference(last, first)


def repeat_rows(value: Any) -> Any:
    """Repeat a value ROWS times."""
    if isinstance(value, Documents):
        return Documents(repeat_rows(value.positions))
    if isinstance(value, tuple):
        return tuple(repeat_rows(part) for part in value)
    return value.repeat(ROWS, *[1] * (value.dim() - 1))


def numbers(value: Any) -> int:
    return value.numel() if isinstance(value, Tensor) else 0


def size(value: Any) -> int:
    """Return the length of a tensor, a tuple or documents."""
    if isinstance(value, Documents):
        return len(value.positions)
    if isinstance(value, tuple):
        return size(value[0])
    return len(value) if isinstance(value, Tensor) else 0
