"""Devices of this machine."""

from __future__ import annotations

from typing import Literal

import torch

from ...console.errors import LayoutError

DeviceKind = Literal["auto", "cpu", "cuda"]


def choose_device(kind: DeviceKind) -> Literal["cpu", "cuda"]:
    """Return the kind of device to run on; raise if a GPU is asked for and none is there."""
    if kind == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and not torch.cuda.is_available():
        raise LayoutError(
            "device=cuda, and torch finds no GPU",
            hint="set device=cpu, or run `headrace doctor`",
        )
    return kind


def count_gpus() -> int:
    return torch.cuda.device_count()
