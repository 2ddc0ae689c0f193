"""Registration of a kernel as a custom op of torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef

from ...console.errors import LayoutError
from .choice import KernelFailed, find_device_problem

OF_TRITON = ("Triton Error", "PassManager::run failed")
"""Beginnings of the messages of Triton that are no TritonError: errors of the driver and of the
compiler."""


def op(name: str, **options: Any) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Return a decorator that makes a custom op. The op writes to none of its arguments and runs on
    the device of the first one (Triton itself launches on the current device).

    `uses_kernel` checks the device beforehand, except under torch.compile; the op checks it always.
    """

    def define(function: Callable[..., Any]) -> CustomOpDef:
        @wraps(function)
        def run(*arguments: Any) -> Any:
            problem = find_device_problem(arguments[0].device)
            if problem is not None:
                raise _cannot(name, problem)
            try:
                with torch.cuda.device_of(arguments[0]):
                    return function(*arguments)
            except _failures() as error:  # evaluated only if something is raised
                if isinstance(error, RuntimeError) and not str(error).startswith(OF_TRITON):
                    raise
                kernel = function.__module__.rpartition(".")[2]
                raise KernelFailed(kernel, f"{name}: {error}") from error

        schema = torch.library.infer_schema(function, mutates_args=())
        return torch.library.custom_op(
            f"headrace::{name}", run, mutates_args=(), schema=schema, **options
        )

    return define


def _cannot(name: str, problem: str) -> LayoutError:
    return LayoutError(
        f"the kernel {name} cannot run: {problem}",
        hint="use `kernel: torch`, which computes the same in plain torch",
    )


def _failures() -> tuple[type[Exception], ...]:
    """Return the errors that Triton raises where it cannot compile or launch a program."""
    from triton.errors import TritonError

    return TritonError, RuntimeError
