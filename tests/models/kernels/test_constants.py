"""Constants are computed once, except where operations are watched."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from headrace.models.kernels import constants
from headrace.models.kernels.constants import constant


@pytest.fixture(autouse=True)
def empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "_constants", {})


calls: list[int] = []


def ramp(size: int, device: torch.device) -> torch.Tensor:
    calls.append(size)
    return torch.arange(size, device=device, dtype=torch.float32)


CPU = torch.device("cpu")


def test_a_constant_is_computed_once() -> None:
    calls.clear()
    with torch.inference_mode():  # an evaluation may be first
        first = constant(ramp, 3, CPU)
    assert constant(ramp, 3, CPU) is first and not first.is_inference()
    assert constant(ramp, 4, CPU).tolist() == [0, 1, 2, 3]
    assert calls == [3, 4]


def test_a_graph_does_not_depend_on_earlier_calls() -> None:
    real = constant(ramp, 3, CPU)
    with FakeTensorMode():
        assert isinstance(constant(ramp, 3, CPU), FakeTensor)
        assert isinstance(constant(ramp, 5, CPU), FakeTensor)
    assert constant(ramp, 3, CPU) is real
    assert constant(ramp, 5, CPU).tolist() == [0, 1, 2, 3, 4]


def test_constants_do_not_fill_the_memory() -> None:
    with mock.patch.object(constants, "MAX_CONSTANTS", 4):
        for size in range(20):
            constant(ramp, size, CPU)
    assert len(constants._constants) <= 4
