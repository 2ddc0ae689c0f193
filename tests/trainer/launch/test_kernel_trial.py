"""The trial of kernels before the first step: plain torch in place of those that fail."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

from headrace.console.errors import LayoutError
from headrace.models.config.config import load_model_config
from headrace.models.config.options.precision import PRECISIONS
from headrace.models.kernels import choice
from headrace.trainer.launch.kernel_trial import failing, settle_kernels

CPU = torch.device("cpu")
MODEL = load_model_config("tiny-hybrid")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Programs that were launched; those of `broken` fail, and the others write nothing."""
    names: list[str] = []

    def launch(program: JITFunction[Any], *_: object, **__: object) -> None:
        file = program.fn.__module__.rpartition(".")[2]
        names.append(file)
        if file == "toeplitz_backward":
            raise OutOfResources(262144, 232448, "shared memory")
        if file == "modal":
            raise RuntimeError("PassManager::run failed")
        if file == "rope":
            raise RuntimeError("Triton Error [CUDA]: invalid device function")

    monkeypatch.setattr(choice, "INTERPRETED", True)
    monkeypatch.setattr(choice, "requests_kernel", lambda kernel, _: kernel != "torch")
    with (
        mock.patch.dict(choice.FAILED, clear=True),
        mock.patch.object(JITFunction, "run", launch),
    ):
        yield names


@pytest.mark.filterwarnings("ignore:.*runs as plain torch:RuntimeWarning")
def test_kernels_that_fail_are_replaced(launched: list[str]) -> None:
    found = failing(MODEL, PRECISIONS["bf16"], CPU, length=64)
    assert set(found) == {"toeplitz", "rope", "modal"} == set(choice.FAILED)
    assert "262144" in found["toeplitz"] and "invalid device function" in found["rope"]
    assert {"short_convolution", "rms_norm", "linear_cross_entropy"} <= set(launched)
    launched.clear()
    assert failing(MODEL, PRECISIONS["bf16"], CPU, length=64) == {}
    assert launched and not {"toeplitz", "rope", "modal"} & set(launched)
    x = torch.ones(1)
    with pytest.warns(RuntimeWarning, match="rope runs as plain torch: rope: Triton Error"):
        assert not choice.uses_kernel("auto", "rope", x)


@pytest.mark.filterwarnings("ignore:.*runs as plain torch:RuntimeWarning")
def test_a_kernel_that_was_asked_for_by_name_is_not_replaced(launched: list[str]) -> None:
    attention = MODEL.operators["attention"]
    named = {**MODEL.operators, "attention": replace(attention, kernel="triton")}
    with pytest.raises(LayoutError, match="the kernel rope cannot do this"):
        failing(replace(MODEL, operators=named), PRECISIONS["bf16"], CPU, length=64)


def test_nothing_is_tried_unless_asked_for(launched: list[str]) -> None:
    job = SimpleNamespace(run=SimpleNamespace(kernels=SimpleNamespace(fallback=False)))
    assert settle_kernels(job, SimpleNamespace(device=torch.device("cuda"))) == {}  # type: ignore[arg-type]
    assert not launched
