"""FlashAttention 4: the package flash-attn-4, in the place of the FlashAttention 2 in torch.

torch calls the package wherever it would call its own FlashAttention: in packed rows, in rows of
one document, in a ring, compiled or not. The package compiles its programs at their first call.
They are kept beside the attestations.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PACKAGE = "flash-attn-4"
INSTALL = 'pip install "headrace[flash4]"'
FIRST_TORCH = "2.15"
"""First version of torch that calls the functions of this package as they are: 2.11 expects two
results where the package returns five."""
CAPABILITIES = {9: "9.0 (H100, H200)", 10: "10.x (B200, B300)"}
"""Compute capabilities that torch's calls support, by major version."""


def installed() -> str | None:
    """Return the version of the package, or None."""
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None


def find_torch_problem() -> str | None:
    """Return why this torch cannot call the package, or None."""
    import torch
    from torch.torch_version import TorchVersion

    if TorchVersion(torch.__version__) >= FIRST_TORCH:
        return None
    return f"torch {torch.__version__} calls an older {PACKAGE}, torch 2.15 this one"


def find_capability_problem(capability: tuple[int, int]) -> str | None:
    """Return why GPUs with this compute capability cannot run it, or None."""
    if capability[0] in CAPABILITIES:
        return None
    version = ".".join(map(str, capability))
    return f"it needs compute capability {' or '.join(CAPABILITIES.values())}, not {version}"


@contextmanager
def in_place_of_flash() -> Iterator[None]:
    """Let torch call the package instead of its own FlashAttention inside."""
    from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(home) / "headrace-kernels" / "flash4"
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")  # read at import
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(folder))
    activate_flash_attention_impl("FA4")
    try:
        yield
    finally:
        restore_flash_attention_impl()
