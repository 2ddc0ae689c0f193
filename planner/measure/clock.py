"""Timing on a device: the median of several runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MIN_RUNS, MAX_RUNS = 5, 100
"""Runs per measurement."""
CYCLES = 4_000_000
"""GPU cycles (about 2 ms) before a run, in which the CPU gets ahead and adds no time."""


@dataclass(frozen=True)
class Clock:
    """Times runs on `device`, for about `budget` seconds each."""

    device: torch.device
    budget: float = 0.5
    busy: bool = False
    """True: on a CPU with one thread the process's CPU time counts, which other programs do not
    lengthen, and which does not include waiting for another rank."""

    @property
    def counts_cpu(self) -> bool:
        """True if CPU time is measured."""
        return self.busy and self.device.type == "cpu" and torch.get_num_threads() == 1

    def seconds(self, run: Callable[[], object]) -> float:
        """Return the median over 5 to 100 runs, after a warm-up run."""
        run()
        times: list[float] = []
        end = time.perf_counter() + self.budget
        while len(times) < MIN_RUNS or (time.perf_counter() < end and len(times) < MAX_RUNS):
            times.append(self.once(run))
        return sorted(times)[len(times) // 2]

    def once(self, run: Callable[[], object]) -> float:
        """Time one run in seconds."""
        if self.device.type != "cuda":
            now = time.process_time if self.counts_cpu else time.perf_counter
            start_time = now()
            run()
            return now() - start_time
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
        """Time the forward and the backward pass of `run(**inputs)`, in seconds.

        The backward pass computes gradients for `weights` and for inputs that require them.
        """

        def forward() -> list[Tensor]:
            y = run(**inputs)
            results = y if isinstance(y, tuple) else (y,)
            return [result for result in results if result.requires_grad]

        outputs = forward()
        leaves = [x for x in inputs.values() if isinstance(x, Tensor) and x.requires_grad]
        output_gradients = [torch.randn_like(y) for y in outputs]

        def backward() -> object:
            return torch.autograd.grad(
                outputs,
                [*leaves, *weights],
                output_gradients,
                retain_graph=True,
                allow_unused=True,
            )

        return self.seconds(forward), self.seconds(backward)


def torch_dtype(precision: str) -> torch.dtype:
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
