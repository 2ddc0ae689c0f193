"""Registration of a kernel as an op of torch.

torch must see an op where operations are watched: under torch.compile, in traces, where shapes are
derived from fake tensors, and under selective recompute. There a call goes through torch's custom
op, whose dispatch and autograd in Python cost the host 60 to 300 µs. In a plain step nothing
watches, and a call runs the same functions as an autograd.Function in a fraction of that time.
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

TRITON_MESSAGES = ("Triton Error", "PassManager::run failed")
"""Beginnings of the RuntimeErrors that Triton raises for the driver and for its compiler."""
PLAIN_TYPES = frozenset((Tensor, torch.nn.Parameter, type(None), bool, int, float, str))
"""Types of arguments that only hold values: other tensors may be fake, sharded or traced."""


def op(
    name: str, *, mutates: tuple[str, ...] = (), **options: Any
) -> Callable[[Callable[..., Any]], Op]:
    """Return a decorator that registers a function as the op `headrace::name`, with `options` of
    torch.library.custom_op.

    The function writes to the arguments that `mutates` names, and to no others. It runs on the
    device of the first one; by itself, Triton launches on the current device. A call raises
    LayoutError if that device has no kernels: under torch.compile, `uses_kernel` has not checked
    it.
    """
    return lambda function: Op(name, function, mutates, options)


class Op:
    """A function that is called directly where possible, and as torch's custom op elsewhere."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        mutates: tuple[str, ...],
        options: dict[str, Any],
    ) -> None:
        self.name = name
        self.function = function
        self.__doc__ = function.__doc__
        self.__wrapped__ = function
        self.custom_op = torch.library.custom_op(
            f"headrace::{name}",
            self._run,
            mutates_args=mutates,
            schema=torch.library.infer_schema(function, mutates_args=mutates),
            **options,
        )
        self.autograd_function: type[torch.autograd.Function] | None = None
        """The function with its gradients; None if it has none."""

    def __call__(self, *arguments: Any) -> Any:
        if is_compiling() or is_watched():
            return self.custom_op(*arguments)
        if not PLAIN_TYPES.issuperset(map(type, arguments)) or arguments[0].is_meta:
            return self.custom_op(*arguments)
        call = self._run
        if torch.is_grad_enabled() and any(
            argument.requires_grad for argument in arguments if isinstance(argument, Tensor)
        ):
            if self.autograd_function is None:
                return self.custom_op(*arguments)  # raises: torch says that it has no gradient
            call = self.autograd_function.apply
        if profiler._is_profiler_enabled:
            with profiler.record_function(f"headrace::{self.name}"):
                return call(*arguments)
        return call(*arguments)

    def register_fake(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Register the function that returns empty results, for fake tensors."""
        return self.custom_op.register_fake(function)

    def register_autograd(
        self, backward: Callable[..., Any], *, setup_context: Callable[..., None]
    ) -> None:
        """Register the backward function, like torch.library.CustomOpDef.register_autograd."""
        self.custom_op.register_autograd(backward, setup_context=setup_context)

        def forward(ctx: Any, *arguments: Any) -> Any:
            # A separate `setup_context` is slow: torch binds its arguments by signature.
            output = self._run(*arguments)
            setup_context(ctx, arguments, output)
            return output

        methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        self.autograd_function = type(self.name, (torch.autograd.Function,), methods)

    def _run(self, *arguments: Any) -> Any:
        problem = find_device_problem(arguments[0].device)
        if problem is not None:
            raise LayoutError(
                f"the kernel {self.name} cannot run: {problem}",
                hint="use `kernel: torch`, which computes the same in plain torch",
            )
        try:
            with torch.cuda.device_of(arguments[0]):
                return self.function(*arguments)
        except _error_types() as error:  # imports Triton only if something is raised
            if isinstance(error, RuntimeError) and not str(error).startswith(TRITON_MESSAGES):
                raise
            kernel = self.function.__module__.rpartition(".")[2]
            raise KernelFailed(kernel, f"{self.name}: {error}") from error


def is_watched() -> bool:
    """Return True if a dispatch mode or functorch sees operations."""
    return torch._C._len_torch_dispatch_stack() > 0 or torch._C._are_functorch_transforms_active()


def _error_types() -> tuple[type[Exception], ...]:
    """Return the types of error that Triton raises if it cannot compile or launch a program."""
    from triton.errors import TritonError

    return TritonError, RuntimeError
