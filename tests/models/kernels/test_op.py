"""Kernels as custom ops: the device of a launch, and errors where none is possible."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

from headrace.console.errors import LayoutError
from headrace.models import kernels
from headrace.models.kernels import choice
from headrace.models.kernels.glu import glu


def test_programs_run_on_the_device_of_the_tensors() -> None:
    current: list[Tensor | None] = [None]
    launched = []

    @contextmanager
    def device_of(x: Tensor) -> Iterator[None]:
        current.append(x)
        yield
        current.pop()

    x = torch.ones(2, 6, requires_grad=True)
    with (
        mock.patch.object(choice, "INTERPRETED", True),
        mock.patch.object(torch.cuda, "device_of", device_of),
        mock.patch.object(JITFunction, "run", lambda *_, **__: launched.append(current[-1])),
    ):
        glu(x, "silu").sum().backward()
    assert [t.shape for t in launched if t is not None] == [x.shape, (2, 3)]


class Operations(TorchDispatchMode):
    """Records the operations that torch sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.fixture
def empty_launches() -> Iterator[None]:
    with (
        mock.patch.object(choice, "INTERPRETED", True),
        mock.patch.object(JITFunction, "run", lambda *_, **__: None),
    ):
        yield


def test_torch_sees_an_op_where_it_watches_operations(empty_launches: None) -> None:
    x = torch.ones(2, 6, requires_grad=True)
    with Operations() as seen:
        glu(x, "silu").sum().backward()
    assert [name for name in seen.names if name.startswith("headrace::")] == [
        "headrace::glu",
        "headrace::glu_backward",
    ]


def test_a_plain_call_goes_without_torchs_dispatcher(empty_launches: None) -> None:
    x = torch.ones(2, 6, requires_grad=True)
    with mock.patch.object(glu, "custom_op", None):
        y = glu(x, "silu")
        y.backward(torch.ones(2, 3))
        assert glu(x.detach(), "silu").grad_fn is None
    assert x.grad is not None and x.grad.shape == x.shape
    with torch.profiler.profile() as profile:
        glu(x, "silu")
    assert "headrace::glu" in {event.name for event in profile.events() or ()}


def test_a_second_derivative_is_an_error(empty_launches: None) -> None:
    x = torch.ones(2, 6, requires_grad=True)
    [gradient] = torch.autograd.grad(
        glu(x, "silu"), x, torch.ones(2, 3, requires_grad=True), create_graph=True
    )
    with pytest.raises(RuntimeError, match=r"glu_backward.*no autograd formula"):
        gradient.sum().backward()


def test_a_launch_without_a_gpu_is_an_error() -> None:
    with pytest.raises(LayoutError, match="the kernel glu cannot run: the tensors are on cpu"):
        glu(torch.ones(2, 6), "silu")


def test_a_program_too_large_for_the_gpu_is_an_error() -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OutOfResources(262144, 232448, "shared memory")

    with (
        mock.patch.object(choice, "INTERPRETED", True),
        mock.patch.object(JITFunction, "run", refuse),
        pytest.raises(LayoutError, match=r"the kernel glu failed.*262144"),
    ):
        glu(torch.ones(2, 6), "silu")


def test_every_kernel_is_registered_by_op() -> None:
    folder = Path(kernels.__file__).parent
    for name in kernels.KERNELS:
        source = (folder / f"{name}.py").read_text()
        assert "@op(" in source and "custom_op" not in source, name
