"""What one process of kernels.py tries at the limits of a kernel: what only a device can show.

The first case of a kernel, in bf16: tensors that lie strangely, one token, no row, rows beyond the
reach of 32 bits, another device than the current one, a recorded graph, and a compiled one that is
given rows of several lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from kernel_cases import all_cases
from kernel_cases.case import Case, Draw, Shape
from kernel_cases.compare import apart, errors, evaluate
from torch import Tensor

from headrace.models.documents import Documents

BOUND = 2e-2
"""‖got − wanted‖ / ‖wanted‖, at most."""
ODD = Shape(3, 515, 520)
ROWS = 5
FAR = Shape(1, 1 << 17, 4096)
"""And longer, until ROWS of them are more numbers than 32 bits count."""


def beyond_limits(kernel: str, dry: bool) -> Iterator[str]:
    """What is wrong with a kernel."""
    case = next(case for case in all_cases() if case.kernel == kernel)
    draw = Draw(torch.float32 if dry else torch.bfloat16, "cpu" if dry else "cuda", 1)
    odd = case.tiny if dry else ODD
    tries: dict[str, Callable[[], float]] = {
        "numbers apart in memory": lambda: worst(errors(case, draw, odd, apart)),
        "one token": lambda: worst(errors(case, draw, Shape(1, 1, odd.width))),
        "no row": lambda: no_row(case, draw, odd),
        "rows that are alike": lambda: rows_alike(
            case, draw, Shape(1, 20, 72) if dry else far(case, draw)
        ),
        "rows of several lengths, compiled": lambda: compiled(case, draw, odd),
    }
    if not dry and kernel != "fft_convolution":  # which waits for the lengths of documents
        tries["a recorded graph"] = lambda: recorded(case, draw, odd)
    if torch.cuda.device_count() > 1:
        other = Draw(draw.dtype, "cuda:1", 1)
        tries["another device"] = lambda: worst(errors(case, other, odd))
    for what, run in tries.items():
        try:
            found = run()
        except Exception as error:  # what one runs into is no reason to skip others
            yield f"WRONG {what}: {type(error).__name__}: {error}"[:300]
        else:
            if not found < BOUND:
                yield f"WRONG {what}: {found:.1e}"
        if not dry:
            torch.cuda.empty_cache()
    print(f"{kernel}: tried {', '.join(tries)}", flush=True)


def worst(found: dict[str, float]) -> float:
    return max(found.values())


def difference(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    return max(
        float((got[name].double() - y.double()).norm() / y.double().norm().clamp(min=1e-30))
        for name, y in wanted.items()
    )


def no_row(case: Case, draw: Draw, shape: Shape) -> float:
    """Weights have no gradient then."""
    inputs = case.make(draw, Shape(0, shape.length, shape.width))
    found = evaluate(case.run, inputs, draw, Tensor.clone)
    return max(float(y.abs().sum()) for y in found.values())


def compiled(case: Case, draw: Draw, shape: Shape) -> float:
    """As one graph for all lengths, beside what the kernel gives by itself."""
    backend = "inductor" if draw.device != "cpu" else "aot_eager"
    graph = torch.compile(case.run, fullgraph=True, dynamic=True, backend=backend)
    found = 0.0
    for length in (shape.length, shape.length + 13):
        inputs = case.make(draw, Shape(shape.rows, length, shape.width))
        both = (evaluate(function, inputs, draw, Tensor.clone) for function in (graph, case.run))
        found = max(found, difference(*both))
    return found


class Known(Draw):
    """What was drawn once is not drawn again: a recorded graph can draw nothing."""

    normal = cache(Draw.normal)


def recorded(case: Case, draw: Draw, shape: Shape) -> float:
    """Forward and backward as a CUDA graph, which waits for nothing."""
    known = Known(draw.dtype, draw.device, draw.seed)
    inputs = case.make(known, shape)
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        wanted = evaluate(case.run, inputs, known, Tensor.clone)
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = evaluate(case.run, inputs, known, Tensor.clone)
    graph.replay()
    return difference(found, wanted)


class Alike(Draw):
    """Gradients that are the same for each of ROWS."""

    def normal(self, name: str, *shape: int, scale: float = 1.0) -> Tensor:
        if not name.startswith("probe") or not shape:
            return super().normal(name, *shape, scale=scale)
        row = super().normal(name, shape[0] // ROWS, *shape[1:], scale=scale)
        return again(row)


def far(case: Case, draw: Draw) -> Shape:
    largest = max(map(numbers, case.make(draw, FAR).values()))
    return replace(FAR, length=FAR.length * -(-(1 << 31) // (ROWS * largest)))


def rows_alike(case: Case, draw: Draw, shape: Shape) -> float:
    """The same row many times gives the same many times: the last as the first."""
    alike = Alike(draw.dtype, draw.device, draw.seed)
    one, two = (case.make(draw, Shape(rows, 4, 72)) for rows in (1, 2))
    of_rows = {name for name in one if size(one[name]) != size(two[name])}
    inputs = case.make(draw, shape)
    inputs |= {name: again(inputs[name]) for name in of_rows}
    found = {
        name: y.unflatten(0, (ROWS, -1))
        for name, y in evaluate(case.run, inputs, alike, Tensor.clone).items()
        if (name.startswith("output") and y.dim()) or name.removeprefix("gradient of ") in of_rows
    }
    first, last = ({name: y[end] for name, y in found.items()} for end in (0, -1))
    return difference(last, first)


def again(value: Any) -> Any:
    """ROWS times."""
    if isinstance(value, Documents):
        return Documents(again(value.positions))
    if isinstance(value, tuple):
        return tuple(again(part) for part in value)
    return value.repeat(ROWS, *[1] * (value.dim() - 1))


def numbers(value: Any) -> int:
    return value.numel() if isinstance(value, Tensor) else 0


def size(value: Any) -> int:
    """How long it is, whatever it is."""
    if isinstance(value, Documents):
        return len(value.positions)
    if isinstance(value, tuple):
        return size(value[0])
    return len(value) if isinstance(value, Tensor) else 0
