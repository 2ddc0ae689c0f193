"""How a kernel becomes an operation of torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef

from ...console.errors import LayoutError
from .choice import unfit


def op(name: str, **options: Any) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """A custom op that writes to none of its arguments, and runs where the first of them is.

    (Triton launches programs on the current device, on which the tensors need not be.) `chosen`
    asks before whether the device will do; under torch.compile nobody asks, and here it is said.
    """

    def define(function: Callable[..., Any]) -> CustomOpDef:
        @wraps(function)
        def run(*arguments: Any) -> Any:
            problem = unfit(arguments[0].device)
            if problem is not None:
                raise _cannot(name, problem)
            try:
                with torch.cuda.device_of(arguments[0]):
                    return function(*arguments)
            except _out_of_resources() as error:  # evaluated if something is raised
                raise _cannot(name, str(error)) from error

        schema = torch.library.infer_schema(function, mutates_args=())
        return torch.library.custom_op(
            f"headrace::{name}", run, mutates_args=(), schema=schema, **options
        )

    return define


def _cannot(name: str, problem: str) -> LayoutError:
    return LayoutError(
        f"the kernel {name} cannot run: {problem}",
        hint="`kernel: torch` computes the same by plain torch",
    )


def _out_of_resources() -> type[Exception]:
    """What Triton raises where a program is too large for the GPU."""
    from triton.runtime.errors import OutOfResources

    refused: type[Exception] = OutOfResources
    return refused
