"""Bytes and CPU time of free long filters beside eager torch, forward and backward.

    python -m benchmarks.fft_filters

A row of one document, gated, with filters as long as the row. Every operation of torch counts its
inputs and outputs once, every launch of a program its tensors; the inverse of a real transform also
copies its input, as cuFFT overwrites it. What cuFFT moves within a transform is not counted: a real
one has a pass more than a complex one of half its size. Programs are not run: CPU time is that of
torch's operations, mostly transforms (by MKL, which is no measure of cuFFT).
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1] / ".root"))  # headrace, if it is not installed

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import JITFunction

from headrace.models.kernels import choice, fft_convolution
from headrace.models.layers.gated_convolution import plain

LENGTH, WIDTH = 8192, 256
TURNS = 3


class Counts(TorchDispatchMode):
    """Bytes of operations, and those of transforms alone."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.transform_bytes, self.transforms = 0, 0, 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        name = str(function)
        if function.is_view or "empty" in name or "view" in name or "detach" in name:
            return result
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        moved = count_bytes(inputs) + count_bytes(outputs)
        if "_fft_c2r" in name:
            moved += 2 * count_bytes(inputs)
        self.bytes += moved
        if "_fft" in name:
            self.transform_bytes += moved
            self.transforms += 1
        return result


def count_bytes(tensors: list[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in {id(x): x for x in tensors}.values())


@contextmanager
def count_launches(counts: Counts) -> Iterator[None]:
    def record(program: JITFunction, *arguments: Any, **options: Any) -> None:
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        counts.bytes += count_bytes(tensors)
        if program.fn.__name__.endswith("multiply"):  # in place, but for filters and correlations
            counts.bytes += count_bytes(tensors[: len(tensors) // 2])

    with (
        mock.patch.object(JITFunction, "run", record),
        mock.patch.object(choice, "INTERPRETED", True),
    ):
        yield


def measure(kernel: str) -> tuple[Counts, Counts, float, float]:
    """Return the counts and the CPU seconds of a forward and a backward pass."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, LENGTH, 3 * WIDTH, generator=generator).bfloat16()
    taps = torch.randn(WIDTH, LENGTH, generator=generator) * LENGTH**-0.5
    skip, dy = torch.ones(WIDTH), torch.ones(1, LENGTH, WIDTH, dtype=torch.bfloat16)
    forward, backward = Counts(), Counts()
    if kernel == "eager":
        inputs = [tensor.requires_grad_() for tensor in (x, taps, skip)]
        began = cpu_seconds()
        with forward:
            y = plain(*inputs[:2], gated=True, skip=inputs[2], method="fft")
        middle = cpu_seconds()
        with backward:
            torch.autograd.grad(y, inputs, dy)
        return forward, backward, middle - began, cpu_seconds() - middle
    with choice.next_programs(["fft_convolution"] if kernel == "next" else []):
        began = cpu_seconds()
        with forward, count_launches(forward):
            fft_convolution.fft_convolution.function(x, taps, skip, None, True)
        middle = cpu_seconds()
        with backward, count_launches(backward):
            fft_convolution._backward.function(dy, x, taps, skip, None, True)
        return forward, backward, middle - began, cpu_seconds() - middle


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    torch.set_num_threads(1)
    turns = [{name: measure(name) for name in ("eager", "confirmed", "next")} for _ in range(TURNS)]
    numbers = LENGTH * WIDTH
    for index, direction in enumerate(("forward", "backward")):
        eager = turns[0]["eager"][index]
        eager_seconds = median(turn["eager"][2 + index] for turn in turns)
        for name in ("eager", "confirmed", "next"):
            counts = turns[0][name][index]
            seconds = median(turn[name][2 + index] for turn in turns)
            print(
                f"{direction}, {name}: {counts.transforms} transforms of "
                f"{counts.transform_bytes / numbers:.0f} bytes a token and channel, all operations "
                f"{counts.bytes / numbers:.0f}: {eager.bytes / counts.bytes:.2f}x fewer than "
                f"eager; {seconds:.2f} CPU s, {eager_seconds / seconds:.2f}x eager's speed",
                flush=True,
            )


if __name__ == "__main__":
    main()
