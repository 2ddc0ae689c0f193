"""Launch Triton programs with little work on the host.

Triton's JITFunction.run binds arguments, reads settings and spells a key for each launch, 10 to 20
µs of Python. A compiled program depends on less: dtypes, alignments, integers, constants and
options. Launches with equal ones take the program that Triton chose for the first of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial, reduce
from operator import attrgetter, or_
from types import ModuleType
from typing import Any

from torch import Tensor

ALIGNMENT = 16
"""Triton compiles programs for addresses that are multiples of this, and separately for others."""
MAX_PROGRAMS = 4096
"""Launches kept per program; lengths of rows that always differ must not fill the memory."""
MAX_BOUND = 512
"""Bound launches kept per function that binds them."""

Launch = Callable[..., None]
"""A launch that takes its tensors alone."""

keep_bound = lru_cache(MAX_BOUND)
"""Keeps what a function returned for equal arguments, which decide all that it binds."""
_address, _dtype = Tensor.data_ptr, attrgetter("dtype")


class Programs:
    """The programs of a module, with cheap launches: `Programs(module).name[grid](…)`.

    Where a call's sizes return, `bind` makes a launch of half the cost."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if _is_compiled(value):
            value = KernelLauncher(value)
        setattr(self, name, value)
        return value

    def bind(self, name: str, grid: tuple[int, ...], *numbers: Any, **constants: Any) -> Launch:
        """Return a launch of a program that takes its tensors, the first arguments, alone."""
        program = getattr(self, name)
        if isinstance(program, KernelLauncher):
            return BoundLaunch(program, grid, numbers, constants)
        return lambda *tensors: getattr(self, name)[grid](*tensors, *numbers, **constants)


class KernelLauncher:
    """Launches a program like Triton's JITFunction, which it asks for what it has not seen."""

    def __init__(self, program: Any) -> None:
        from triton import knobs
        from triton.runtime import driver
        from triton.runtime.jit import JITFunction

        self.program = program
        self.driver, self._settings = driver, knobs.runtime
        self._triton = JITFunction
        self._compiled: dict[Any, tuple[Any, ...]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return partial(self.launch, grid)

    def launch(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        """Launch on the current device and stream. `constants` are constexprs and options."""
        if self.is_watched():
            self.program.run(*arguments, grid=grid, warmup=False, **constants)
            return
        driver = self.driver.active
        device = driver.get_current_device()
        key = (device, *constants, *constants.values(), *_specialize(arguments))
        entry = self._compiled.get(key)
        if entry is None:
            if len(self._compiled) >= MAX_PROGRAMS:
                self._compiled.clear()
            self._compiled[key] = self.compile(grid, arguments, constants)
            return
        run, function, metadata, constexprs, _ = entry
        run(
            *(*grid, 1, 1)[:3], driver.get_current_stream(device), function, metadata, None, None,
            None, *arguments, *constexprs,
        )  # fmt: skip

    def compile(
        self, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]
    ) -> tuple[Any, ...]:
        """Let Triton compile and launch. Return its launcher, the function on the device and its
        metadata, the constants that follow the arguments, and the compiled program, which unloads
        the function when it is freed."""
        compiled = self.program.run(*arguments, grid=grid, warmup=False, **constants)
        constexprs = tuple(
            constants.get(parameter.name, parameter.default)
            for parameter in self.program.params[len(arguments) :]
        )
        return (
            compiled.run,
            compiled.function,
            compiled.packed_metadata,
            constexprs,
            compiled,
        )

    def is_watched(self) -> bool:
        """Return True if a tool sees launches: hooks of Triton, or a replaced JITFunction.run."""
        enter, leave = self._settings.launch_enter_hook, self._settings.launch_exit_hook
        return bool(
            self._triton.run.__module__ != self._triton.__module__
            or self.program.pre_run_hooks
            or getattr(enter, "calls", enter)
            or getattr(leave, "calls", leave)
        )


class BoundLaunch:
    """A launch with fixed grid, numbers and constants: only the tensors differ between calls."""

    def __init__(
        self,
        launcher: KernelLauncher,
        grid: tuple[int, ...],
        numbers: tuple[Any, ...],
        constants: dict[str, Any],
    ) -> None:
        self._launcher, self._grid, self._constants = launcher, grid, constants
        self._sizes = (*grid, 1, 1)[:3]
        self._numbers = numbers
        self._compiled: dict[Any, tuple[Any, ...]] = {}

    def __call__(self, *tensors: Tensor) -> None:
        """Launch on the current device and stream."""
        launcher, numbers = self._launcher, self._numbers
        if launcher.is_watched() or reduce(or_, map(_address, tensors)) % ALIGNMENT:
            launcher.launch(self._grid, *tensors, *numbers, **self._constants)
            return
        driver = launcher.driver.active
        device = driver.get_current_device()
        key = (device, *map(_dtype, tensors))
        entry = self._compiled.get(key)
        if entry is None:
            arguments = (*tensors, *numbers)
            self._compiled[key] = launcher.compile(self._grid, arguments, self._constants)
            return
        run, function, metadata, constexprs, _ = entry
        run(
            *self._sizes, driver.get_current_stream(device), function, metadata, None, None, None,
            *tensors, *numbers, *constexprs,
        )  # fmt: skip


def _specialize(arguments: tuple[Any, ...]) -> list[Any]:
    """Return what a compiled program depends on: types, and values except tensors' numbers. (Triton
    asks less of an integer: if it is 1, a multiple of 16, or needs 64 bits.)"""
    return [
        x
        if type(x) is int
        else (x.dtype, x.data_ptr() % ALIGNMENT)
        if isinstance(x, Tensor)
        else (type(x), x)
        for x in arguments
    ]


def _is_compiled(value: Any) -> bool:
    from triton.runtime.jit import JITFunction

    return isinstance(value, JITFunction)
