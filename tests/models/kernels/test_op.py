"""Kernels as operations: where their programs are launched, and what is said where none can be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

from headrace.console.errors import LayoutError
from headrace.models import kernels
from headrace.models.kernels import choice
from headrace.models.kernels.glu import glu


def test_programs_are_launched_where_the_tensors_are() -> None:
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


def test_where_none_can_be_launched_it_is_said() -> None:
    with pytest.raises(LayoutError, match="the kernel glu cannot run: the tensors are on cpu"):
        glu(torch.ones(2, 6), "silu")


def test_a_program_too_large_for_the_gpu_is_told() -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OutOfResources(262144, 232448, "shared memory")

    with (
        mock.patch.object(choice, "INTERPRETED", True),
        mock.patch.object(JITFunction, "run", refuse),
        pytest.raises(LayoutError, match=r"the kernel glu cannot run.*262144"),
    ):
        glu(torch.ones(2, 6), "silu")


def test_every_kernel_is_made_so() -> None:
    folder = Path(kernels.__file__).parent
    for name in kernels.KERNELS:
        source = (folder / f"{name}.py").read_text()
        assert "@op(" in source and "custom_op" not in source, name
