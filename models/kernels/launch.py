"""Launch Triton programs with little work on the host.

Triton's JITFunction.run binds arguments, reads settings and spells a key for each launch, 10 to 20
µs of Python. A compiled program depends on less: dtypes, alignments, integers, constants and
options. Launches with equal ones take the program that Triton chose for the first of them.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

from torch import Tensor

ALIGNMENT = 16
"""Triton compiles programs for addresses that are multiples of this, and separately for others."""
MAX_PROGRAMS = 4096
"""Launches kept per program; lengths of rows that always differ must not fill the memory."""


class Programs:
    """The programs of a module, with cheap launches: `Programs(module).name[grid](…)`."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if _is_compiled(value):
            value = KernelLauncher(value)
        setattr(self, name, value)
        return value


class KernelLauncher:
    """Launches a program like Triton's JITFunction, which it asks for what it has not seen."""

    def __init__(self, program: Any) -> None:
        from triton import knobs
        from triton.runtime import driver
        from triton.runtime.jit import JITFunction

        self.program = program
        self._driver, self._settings = driver, knobs.runtime
        self._triton = JITFunction
        self._compiled: dict[Any, tuple[Any, ...]] = {}
        """Triton's launcher, the function on the device and its metadata, the constants that follow
        the arguments, and the compiled program, which unloads the function when it is freed."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return partial(self.launch, grid)

    def launch(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        """Launch on the current device and stream. `constants` are constexprs and options."""
        if self._is_watched():
            self.program.run(*arguments, grid=grid, warmup=False, **constants)
            return
        driver = self._driver.active
        device = driver.get_current_device()
        key = (device, *constants, *constants.values(), *_specialize(arguments))
        entry = self._compiled.get(key)
        if entry is None:
            self._compile(key, grid, arguments, constants)
            return
        run, function, metadata, constexprs, _ = entry
        run(
            *(*grid, 1, 1)[:3], driver.get_current_stream(device), function, metadata, None, None,
            None, *arguments, *constexprs,
        )  # fmt: skip

    def _compile(
        self,
        key: tuple[Any, ...],
        grid: tuple[int, ...],
        arguments: tuple[Any, ...],
        constants: dict[str, Any],
    ) -> None:
        """Let Triton compile and launch, and keep the program."""
        compiled = self.program.run(*arguments, grid=grid, warmup=False, **constants)
        if len(self._compiled) >= MAX_PROGRAMS:
            self._compiled.clear()
        constexprs = tuple(
            constants.get(parameter.name, parameter.default)
            for parameter in self.program.params[len(arguments) :]
        )
        self._compiled[key] = (
            compiled.run,
            compiled.function,
            compiled.packed_metadata,
            constexprs,
            compiled,
        )

    def _is_watched(self) -> bool:
        """Return True if a tool sees launches: hooks of Triton, or a replaced JITFunction.run."""
        enter, leave = self._settings.launch_enter_hook, self._settings.launch_exit_hook
        return bool(
            self._triton.run.__module__ != self._triton.__module__
            or self.program.pre_run_hooks
            or getattr(enter, "calls", enter)
            or getattr(leave, "calls", leave)
        )


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
