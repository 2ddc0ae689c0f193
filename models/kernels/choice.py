"""Choice between a fused kernel and its twin, by configuration, device and the kernel's limits."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import is_compiling

from ...console.errors import LayoutError
from ..config.options.names import DeltaKernel, Kernel
from . import faults

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FAILED: dict[str, str] = {}
"""Why kernels failed at the start of this run, by name; `kernel: auto` runs their twins."""
NEXT: set[str] = set()
"""Kernels whose next programs run in this process: faster by their counts, but on no device so
far."""
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""True if Triton interprets its programs in Python, on any device. Triton decides at import."""
TRITON = faults.installed()
"""Version of Triton, whose compiler may have known faults; None if it is not installed."""
FAULTY = {} if INTERPRETED else faults.excluded(TRITON)
"""Known faults of this version's compiler, by kernel and dtype: such a kernel does not run."""


class KernelFailed(LayoutError):
    """A kernel could not be compiled or launched."""

    def __init__(self, kernel: str, problem: str) -> None:
        super().__init__(
            f"the kernel {kernel} failed: {problem}",
            hint="set kernels.fallback=true in the run, or `kernel: torch` in the model: both take "
            "plain torch",
        )
        self.kernel = kernel
        self.problem = problem


_as_on_gpu = ContextVar("as_on_gpu", default=False)


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """Inside, `kernel: auto` chooses for fake tensors as on a GPU: kernels, and without a warning
    the twins of those that cannot run."""
    token = _as_on_gpu.set(True)
    try:
        yield
    finally:
        _as_on_gpu.reset(token)


@contextmanager
def next_programs(kernels: Iterable[str]) -> Iterator[None]:
    """Run the next programs of these kernels inside, and the confirmed ones of all others."""
    before = set(NEXT)
    NEXT.clear()
    NEXT.update(kernels)
    try:
        yield
    finally:
        NEXT.clear()
        NEXT.update(before)


def _chooses_as_on_gpu() -> bool:
    # Dynamo of torch 2.11 cannot trace a context variable, and nothing is compiled inside it.
    return not is_compiling() and _as_on_gpu.get()


def requests_kernel(kernel: DeltaKernel, device: torch.device) -> bool:
    """Return True if the configuration asks for kernels on this device."""
    if kernel == "auto":
        return device.type == "cuda" or _chooses_as_on_gpu()
    return kernel in ("triton", "fla")


def uses_kernel(kernel: Kernel, name: str, x: Tensor, problem: str | None = None) -> bool:
    """Return True if the kernel of this name runs, False if its twin does.

    `problem` is the kernel's reason why it cannot do the work; the machine may have others. With
    one, `kernel: auto` warns and runs the twin, and `kernel: triton` raises LayoutError. For fake
    tensors the machine does not count: with `kernel: triton` they take the kernel's path.
    """
    if not requests_kernel(kernel, x.device):
        return False
    problem = FAILED.get(name) or FAULTY.get((name, x.dtype)) or _find_tensor_problem(x) or problem
    if problem is None:
        return True
    if kernel == "triton":
        raise LayoutError(
            f"the kernel {name} cannot do this: {problem}",
            hint="use `kernel: auto`, which runs plain torch where the kernel cannot",
        )
    if not _chooses_as_on_gpu():
        warnings.warn(f"{name} runs as plain torch: {problem}", RuntimeWarning, stacklevel=3)
    return False


def refuse(name: str, x: Tensor, missing: str | None, *, hint: str) -> None:
    """Raise LayoutError if the kernel of another package is `missing`, for which `hint` has the
    command, or if it cannot run here. For fake tensors nothing is missing."""
    if missing is not None and not (is_compiling() or isinstance(x, FakeTensor)):
        raise LayoutError(f"the kernel {name} cannot run: {missing}", hint=hint)
    problem = FAILED.get(name) or _find_tensor_problem(x)
    if problem is not None:
        raise LayoutError(
            f"the kernel {name} cannot do this: {problem}", hint="use `kernel: auto` or `torch`"
        )


def _find_tensor_problem(x: Tensor) -> str | None:
    # Fake tensors are on no device, and under torch.compile a query of the driver breaks the graph.
    if not (is_compiling() or isinstance(x, FakeTensor)):
        problem = find_device_problem(x.device)
        if problem is not None:
            return problem
    if x.dtype not in SUPPORTED_DTYPES:
        return f"it supports fp32, bf16 and fp16, not {x.dtype}"
    return None


def find_device_problem(device: torch.device) -> str | None:
    """Return why no kernel can run on a device, or None."""
    if INTERPRETED:
        return None
    if device.type != "cuda":
        return f"the tensors are on {device.type}, and Triton needs a GPU"
    return _find_gpu_problem(device)


@cache
def _find_gpu_problem(gpu: torch.device) -> str | None:
    if torch.version.hip is not None:
        return "kernels support NVIDIA GPUs, and this GPU is from AMD"
    capability = torch.cuda.get_device_capability(gpu)
    if capability < (8, 0):
        version = ".".join(map(str, capability))
        return f"kernels need compute capability 8.0 or later, and this GPU has {version}"
    if find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    return None
