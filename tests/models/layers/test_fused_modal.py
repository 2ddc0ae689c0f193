"""What surrounds the modal kernel: no copies of whole rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace.models.kernels import modal
from headrace.models.layers.gated_convolution import gated_modal


@pytest.mark.parametrize(
    ("length", "whole"), [(2 * modal.BLOCK, True), (2 * modal.BLOCK + 1, False)]
)
def test_rows_of_whole_blocks_are_not_sliced(
    monkeypatch: pytest.MonkeyPatch, length: int, whole: bool
) -> None:
    """The gradient of a slice is a copy in a tensor of zeros, even if it has all tokens."""
    taken: list[torch.Tensor] = []

    def run(x: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
        taken.append(x)
        return x[..., :4] * 2, torch.zeros(1, 4, 16), torch.zeros(1)

    monkeypatch.setattr(modal, "modal", run)
    monkeypatch.setattr("headrace.models.layers.gated_convolution.uses_kernel", lambda *_: True)
    x = torch.ones(1, length, 12)
    y, _ = gated_modal(x, torch.ones(4, 16), torch.ones(4, 16), None)
    assert y.shape == (1, length, 4) and (taken[0] is x) == whole
