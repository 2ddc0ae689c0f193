"""Devices of this machine."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Literal, get_args

from ...console.errors import LayoutError
from ...console.machine import gpus_seen

if TYPE_CHECKING:
    import torch

DeviceKind = Literal["auto", "cpu", "cuda"]
DEVICES: tuple[DeviceKind, ...] = get_args(DeviceKind)
FP8_CAPABILITY = (8, 9)

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Environment variables that configure torch's GPU allocator, the newest name first."""
SEGMENTS = "expandable_segments:True"
"""Growing segments: rows and documents with changing lengths leave no unusable gaps."""


def choose_device(kind: DeviceKind) -> Literal["cpu", "cuda"]:
    """Resolve `auto`; raise LayoutError if a GPU is requested and torch finds none."""
    if kind == "cpu":
        return kind
    has_gpu = _has_gpu()
    if kind == "auto":
        return "cuda" if has_gpu else "cpu"
    if not has_gpu:
        raise LayoutError(
            "device=cuda, and torch finds no GPU",
            hint="set device=cpu, or run `headrace doctor`",
        )
    return kind


def _has_gpu() -> bool:
    """Return True if torch finds a GPU. Imports torch only where there may be one."""
    if sys.modules.get("torch") is None and not gpus_seen():
        return False
    import torch

    return torch.cuda.is_available()


def local_device(kind: Literal["cpu", "cuda"]) -> torch.device:
    """Return this rank's device."""
    import torch

    if kind == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", 0))))


def set_allocator() -> None:
    """Choose torch's GPU allocator, unless a person has. Call before the first GPU memory."""
    if not any(variable in os.environ for variable in ALLOCATOR):
        os.environ[ALLOCATOR[0]] = SEGMENTS


def count_gpus() -> int:
    if not _has_gpu():
        return 0
    import torch

    return torch.cuda.device_count()


def gpu_capabilities() -> list[tuple[int, int]]:
    """Return the distinct compute capabilities of this machine's GPUs."""
    import torch

    return sorted({torch.cuda.get_device_capability(number) for number in range(count_gpus())})


def fp8_problem() -> str | None:
    """Return why this machine's GPUs cannot multiply in FP8, or None."""
    import torch

    if torch.version.hip is not None:
        return "its GPUs are from AMD, and FP8 is implemented for NVIDIA"
    for number in range(count_gpus()):
        capability = torch.cuda.get_device_capability(number)
        if capability < FP8_CAPABILITY:
            version = ".".join(map(str, capability))
            model = torch.cuda.get_device_name(number)
            return f"GPU {number} ({model}) has compute capability {version}, and FP8 needs 8.9"
    return None
