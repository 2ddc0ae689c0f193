"""Times of a function on a device: the median of several runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LEAST, MOST = 5, 100
"""Runs of a measurement."""
CYCLES = 4_000_000
"""GPU cycles (about 2 ms) before a run, in which the CPU gets ahead and adds no time."""


@dataclass(frozen=True)
class Clock:
    """Times runs on `device`, for about `budget` seconds each."""

    device: torch.device
    budget: float = 0.5
    busy: bool = False
    """True: on a CPU with one thread the process's CPU time counts. Programs beside it do not
    lengthen it, and waiting for another rank is not in it."""

    @property
    def counts_cpu(self) -> bool:
        """True if a time is CPU time."""
        return self.busy and self.device.type == "cpu" and torch.get_num_threads() == 1

    def seconds(self, run: Callable[[], object]) -> float:
        """Return the median of 5 to 100 runs, after one that is not counted."""
        run()
        times: list[float] = []
        until = time.perf_counter() + self.budget
        while len(times) < LEAST or (time.perf_counter() < until and len(times) < MOST):
            times.append(self.once(run))
        return sorted(times)[len(times) // 2]

    def once(self, run: Callable[[], object]) -> float:
        """Return the seconds of one run."""
        if self.device.type != "cuda":
            now = time.process_time if self.counts_cpu else time.perf_counter
            begin = now()
            run()
            return now() - begin
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(CYCLES)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        milliseconds: float = start.elapsed_time(end)
        return milliseconds / 1e3

    def passes(
        self, run: Callable[..., Any], inputs: Mapping[str, Any], weights: Sequence[Tensor] = ()
    ) -> tuple[float, float]:
        """Return the seconds of the forward and of the backward pass of `run(**inputs)`.

        The backward pass computes the gradients of `weights` and of the inputs that require them.
        """

        def forward() -> list[Tensor]:
            y = run(**inputs)
            return [each for each in (y if isinstance(y, tuple) else (y,)) if each.requires_grad]

        outputs = forward()
        leaves = [x for x in inputs.values() if isinstance(x, Tensor) and x.requires_grad]
        above = [torch.randn_like(y) for y in outputs]

        def backward() -> object:
            return torch.autograd.grad(
                outputs, [*leaves, *weights], above, retain_graph=True, allow_unused=True
            )

        return self.seconds(forward), self.seconds(backward)


def dtype_of(precision: str) -> torch.dtype:
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
