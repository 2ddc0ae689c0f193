"""Choice between kernel and plain torch, by configuration and device."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from headrace.console.errors import LayoutError
from headrace.models.kernels import choice
from headrace.models.kernels.choice import find_device_problem, requests_kernel, uses_kernel
from headrace.models.kernels.ssd_limits import unsupported_reason

GPU = torch.device("cuda", 0)


class OnGPU:
    """Attributes of a tensor that the choice reads."""

    device, dtype = GPU, torch.bfloat16


@pytest.fixture(autouse=True)
def h200() -> object:
    """A suitable GPU, unless a test changes it."""
    choice._find_gpu_problem.cache_clear()
    with mock.patch.object(torch.cuda, "get_device_capability", lambda _: (9, 0)):
        yield
    choice._find_gpu_problem.cache_clear()


def test_kernels_are_wanted_by_device_or_by_name() -> None:
    assert requests_kernel("auto", GPU) and not requests_kernel("auto", torch.device("cpu"))
    assert requests_kernel("triton", torch.device("cpu")) and not requests_kernel("torch", GPU)


def test_a_suitable_gpu_runs_kernels() -> None:
    assert uses_kernel("auto", "glu", OnGPU())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("owner", "name", "value", "message"),
    [
        (torch.version, "hip", "7.0", "AMD"),
        (torch.cuda, "get_device_capability", lambda _: (7, 5), "this GPU has 7.5"),
        (choice, "find_spec", lambda _: None, "pip install triton"),
    ],
)
def test_unsuitable_devices_are_reported(
    owner: object, name: str, value: object, message: str
) -> None:
    with mock.patch.object(owner, name, value):
        assert message in str(find_device_problem(GPU))
        with pytest.warns(RuntimeWarning, match=message):
            assert not uses_kernel("auto", "glu", OnGPU())  # type: ignore[arg-type]
        with pytest.raises(LayoutError, match=message):
            uses_kernel("triton", "glu", OnGPU())  # type: ignore[arg-type]


def test_a_head_of_ssd_must_fit_the_shared_memory() -> None:
    for dim, size, fits in ((128, 128, True), (64, 256, True), (65, 256, False), (1, 257, False)):
        assert (unsupported_reason(dim, size) is None) == fits


def test_limits_of_a_kernel_are_reported() -> None:
    with pytest.warns(RuntimeWarning, match="too wide"):
        assert not uses_kernel("auto", "glu", OnGPU(), "too wide")  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="on cpu"):
        uses_kernel("triton", "glu", torch.ones(2))
    with mock.patch.object(OnGPU, "dtype", torch.float64), pytest.warns(match="float64"):
        assert not uses_kernel("auto", "glu", OnGPU())  # type: ignore[arg-type]


def test_compiled_code_reads_no_context_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo of torch 2.11 cannot trace one."""
    with choice.as_on_gpu():
        assert requests_kernel("auto", torch.device("cpu"))
        monkeypatch.setattr(choice, "is_compiling", lambda: True)
        monkeypatch.setattr(choice, "_as_on_gpu", None)
        assert not requests_kernel("auto", torch.device("cpu"))
        monkeypatch.undo()
