"""Launches: the program that Triton would choose, and every launch is seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from headrace.models.kernels import launch
from headrace.models.kernels.launch import BoundLaunch, KernelLauncher, Programs


@triton.jit
def program(
    x, y, size, stride, scale,
    LOOP: triton.language.constexpr, STEP: triton.language.constexpr = 4,
):  # fmt: skip
    pass


class Driver:
    """A driver without a device."""

    device = 0

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 100 + device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class Compiled:
    """A compiled program that notes its launches."""

    packed_metadata = "metadata"

    def __init__(self, notes: list[Any], key: str) -> None:
        self.notes, self.function = notes, key

    def run(self, *arguments: Any) -> None:
        self.notes.append(arguments)

    def launch_metadata(self, *_: Any) -> None: ...


@pytest.fixture
def notes() -> Iterator[list[Any]]:
    """Compile nothing; return what compiled programs are launched with."""
    notes: list[Any] = []

    def compile_nothing(program: Any, key: str, signature: Any, device: int, *_: Any) -> Compiled:
        program.device_caches[device][0][key] = compiled = Compiled(notes, f"{device}: {key}")
        return compiled

    program.device_caches.clear()
    active = driver._active
    with ExitStack() as patched:
        patched.enter_context(mock.patch.object(JITFunction, "_do_compile", compile_nothing))
        patched.callback(lambda: setattr(driver, "_active", active))
        driver.set_active(Driver())
        yield notes
    program.device_caches.clear()


X = torch.zeros(64, dtype=torch.bfloat16)
CALLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((x, y, size, stride, scale), {"LOOP": loop, **options})
    for x in (X, X[1:], X[8:], X.float(), torch.nn.Parameter(X))
    for y in (X, X.view(torch.float16))
    for size in (0, 1, 2, 16, 17, 2**31, 2**31 + 1, 2**63)
    for stride, scale in ((1, 1.0), (1, 1), (16, 0.0), (16, 0), (True, True), (1.0, None))
    for loop, options in ((1, {}), (2, {}), (2, {"STEP": 8}), (2, {"num_warps": 8}))
]


Launch = Callable[..., None]


def launch_at_once(launcher: KernelLauncher, arguments: tuple[Any, ...], constants: Any) -> None:
    launcher[3, 2](*arguments, **constants)


def mismatches(notes: list[Any], launch_ours: Launch = launch_at_once) -> int:
    """Launch all calls in turn, by headrace and by Triton; count what differs."""
    launcher, differences = KernelLauncher(program), 0
    for _ in range(2):  # the second time, programs are known
        for arguments, constants in CALLS:
            notes.clear()
            launch_ours(launcher, arguments, constants)
            program[3, 2](*arguments, **constants)
            ours, tritons = notes
            differences += any(a is not b for a, b in zip(ours[9:], tritons[9:], strict=True))
            differences += ours[:6] != tritons[:6]
    return differences


class BoundLaunches:
    """Launches bound to the numbers and constants of each call, not to its tensors."""

    def __init__(self) -> None:
        self.launches: dict[str, Launch] = {}

    def __call__(self, launcher: KernelLauncher, arguments: Any, constants: Any) -> None:
        x, y, *numbers = arguments
        key = repr((numbers, constants))
        if key not in self.launches:
            self.launches[key] = BoundLaunch(launcher, (3, 2), tuple(numbers), constants)
        self.launches[key](x, y)


def test_a_launch_takes_the_program_that_triton_would_take(notes: list[Any]) -> None:
    assert mismatches(notes) == 0


def test_a_bound_launch_takes_the_program_that_triton_would_take(notes: list[Any]) -> None:
    assert mismatches(notes, BoundLaunches()) == 0


@pytest.mark.parametrize(
    ("name", "value"), [("_dtype", lambda _: 0), ("ALIGNMENT", 1)], ids=["no dtype", "no alignment"]
)
def test_a_bound_launch_that_knows_less_of_tensors_takes_a_wrong_program(
    notes: list[Any], name: str, value: Any
) -> None:
    with mock.patch.object(launch, name, value):
        assert mismatches(notes, BoundLaunches()) > 0


@pytest.mark.parametrize(
    "key",
    [
        lambda x: x.dtype if isinstance(x, Tensor) else (type(x), x),
        lambda x: x.data_ptr() % 16 if isinstance(x, Tensor) else (type(x), x),
        lambda x: (x.dtype, x.data_ptr() % 16) if isinstance(x, Tensor) else x,
        lambda x: (x.dtype, x.data_ptr() % 16) if isinstance(x, Tensor) else type(x),
    ],
    ids=["no alignment", "no dtype", "no type", "no value"],
)
def test_a_key_that_says_less_takes_a_wrong_program(
    notes: list[Any], key: Callable[[Any], Any]
) -> None:
    with mock.patch.object(launch, "_specialize", lambda arguments: map(key, arguments)):
        assert mismatches(notes) > 0


@pytest.mark.parametrize("bound", [False, True])
def test_each_device_has_its_programs(notes: list[Any], bound: bool) -> None:
    launcher = KernelLauncher(program)
    bound_launch = BoundLaunch(launcher, (1,), (1, 1, 1.0), {"LOOP": 1})
    for device in (0, 1, 0):
        with mock.patch.object(Driver, "device", device):
            if bound:
                bound_launch(X, X)
            else:
                launcher[(1,)](X, X, 1, 1, 1.0, LOOP=1)
    streams = [(stream, function[0]) for _, _, _, stream, function, *_ in notes]
    assert streams == [(100, "0"), (101, "1"), (100, "0")]


def test_whoever_replaces_tritons_run_sees_every_launch(notes: list[Any]) -> None:
    launcher, seen = KernelLauncher(program), mock.Mock(return_value=None)
    bound_launch = BoundLaunch(launcher, (1,), (1, 1, 1.0), {"LOOP": 1})
    launcher[(1,)](X, X, 1, 1, 1.0, LOOP=1)
    bound_launch(X, X)
    with mock.patch.object(JITFunction, "run", lambda *_, **__: seen()):
        launcher[(1,)](X, X, 1, 1, 1.0, LOOP=1)
        bound_launch(X, X)
    assert seen.call_count == 2 and len(notes) == 2
    hook = knobs.runtime.launch_enter_hook
    hook.add(seen)
    try:
        launcher[(1,)](X, X, 1, 1, 1.0, LOOP=1)
    finally:
        hook.remove(seen)
    assert notes[-1][7] is hook  # Triton's own run gave it
    launcher[(1,)](X, X, 1, 1, 1.0, LOOP=1)
    assert notes[-1][7] is None


def test_launches_that_always_differ_do_not_fill_the_memory(notes: list[Any]) -> None:
    launcher = KernelLauncher(program)
    with mock.patch.object(launch, "MAX_PROGRAMS", 4):
        for size in range(20):
            launcher[(1,)](X, X, size, 1, 1.0, LOOP=1)
    assert len(launcher._compiled) <= 4 and len(notes) == 20


def test_programs_of_a_module() -> None:
    from headrace.models.kernels.programs import glu

    programs = Programs(glu)
    assert isinstance(programs.glu_forward, KernelLauncher)
    assert programs.glu_forward is programs.glu_forward
    assert programs.tl is glu.tl
