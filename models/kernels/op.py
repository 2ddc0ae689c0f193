"""Registration of a kernel as an op of torch.

torch must see an op where it watches operations: under torch.compile, in a trace, in a derivation
of shapes, in a recompute rule. There a call takes torch's custom op, whose dispatcher and autograd
formula in Python cost the host 60 to 300 µs. A plain step has no such watcher: there a call runs
the same function, with the same formula as an autograd function, in a fraction of that time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.compiler import is_compiling

from ...console.errors import LayoutError
from .choice import KernelFailed, find_device_problem

OF_TRITON = ("Triton Error", "PassManager::run failed")
"""Beginnings of the messages of Triton that are no TritonError: errors of the driver and of the
compiler."""
PLAIN = (Tensor, torch.nn.Parameter)
"""Types of tensors that hold values on a device, and nothing else."""


def op(name: str, **options: Any) -> Callable[[Callable[..., Any]], Op]:
    """Return a decorator that makes an op. The op writes to none of its arguments and runs on the
    device of the first one (Triton itself launches on the current device).

    `uses_kernel` checks the device beforehand, except under torch.compile; the op checks it always.
    """
    return lambda function: Op(name, function, options)


class Op:
    """A function of tensors that torch knows by name."""

    def __init__(self, name: str, function: Callable[..., Any], options: dict[str, Any]) -> None:
        self.name = name
        self.function = function
        self.__doc__ = function.__doc__
        self.__wrapped__ = function
        self.custom_op = torch.library.custom_op(
            f"headrace::{name}",
            self._run,
            mutates_args=(),
            schema=torch.library.infer_schema(function, mutates_args=()),
            **options,
        )
        self.gradient: type[torch.autograd.Function] | None = None

    def __call__(self, *arguments: Any) -> Any:
        if is_compiling() or _is_watched(arguments):
            return self.custom_op(*arguments)
        differentiates = torch.is_grad_enabled() and any(
            isinstance(argument, Tensor) and argument.requires_grad for argument in arguments
        )
        if differentiates and self.gradient is None:
            return self.custom_op(*arguments)  # whose error says that it has no gradient
        call = self.gradient.apply if differentiates and self.gradient else self._run
        if profiler._is_profiler_enabled:
            with profiler.record_function(f"headrace::{self.name}"):
                return call(*arguments)
        return call(*arguments)

    def register_fake(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Register the function that derives the shapes of the results."""
        return self.custom_op.register_fake(function)

    def register_autograd(
        self, backward: Callable[..., Any], *, setup_context: Callable[..., None]
    ) -> None:
        """Register the formula of the gradients, as torch's custom ops take it."""
        self.custom_op.register_autograd(backward, setup_context=setup_context)

        def forward(ctx: Any, *arguments: Any) -> Any:
            # torch binds the arguments of a function with `setup_context` by its signature: slow.
            output = self._run(*arguments)
            setup_context(ctx, arguments, output)
            return output

        methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        self.gradient = type(self.name, (torch.autograd.Function,), methods)

    def _run(self, *arguments: Any) -> Any:
        problem = find_device_problem(arguments[0].device)
        if problem is not None:
            raise _cannot(self.name, problem)
        try:
            with torch.cuda.device_of(arguments[0]):
                return self.function(*arguments)
        except _failures() as error:  # evaluated only if something is raised
            if isinstance(error, RuntimeError) and not str(error).startswith(OF_TRITON):
                raise
            kernel = self.function.__module__.rpartition(".")[2]
            raise KernelFailed(kernel, f"{self.name}: {error}") from error


def _is_watched(arguments: tuple[Any, ...]) -> bool:
    """Return True if torch looks at operations, or a tensor is no plain one: fake, on the meta
    device, sharded, transformed."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or arguments[0].is_meta
        or any(isinstance(x, Tensor) and type(x) not in PLAIN for x in arguments)
    )


def _cannot(name: str, problem: str) -> LayoutError:
    return LayoutError(
        f"the kernel {name} cannot run: {problem}",
        hint="use `kernel: torch`, which computes the same in plain torch",
    )


def _failures() -> tuple[type[Exception], ...]:
    """Return the errors that Triton raises where it cannot compile or launch a program."""
    from triton.errors import TritonError

    return TritonError, RuntimeError
