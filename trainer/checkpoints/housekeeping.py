"""`trainer clean`: delete the checkpoints of a run that its policy does not keep."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import dataclass

from ...console.errors import CheckpointError
from ..folder import RunFolder
from . import store
from .policy import CheckpointConfig


@dataclass(frozen=True)
class Outdated:
    """A checkpoint that the policy does not keep."""

    checkpoint: str
    size: int | None
    """Bytes of its files; None if its manifest cannot be read."""


def clean(
    folder: RunFolder, config: CheckpointConfig, keep: Collection[int], *, dry_run: bool
) -> list[Outdated]:
    """Delete the outdated checkpoints of a run that is not going, and what killed starts left half
    written. Return the checkpoints. A dry run deletes nothing, and the run may be going."""
    with contextlib.nullcontext() if dry_run else folder.locked():
        paths = store.outdated(folder.checkpoints, config, keep)
        doomed = [Outdated(str(path), _size(str(path))) for path in paths]
        if not dry_run:
            store.clean(folder.checkpoints)
            store.prune(folder.checkpoints, config, keep)
        return doomed


def _size(path: str) -> int | None:
    try:
        return sum(file.size for file in store.read_manifest(path).files)
    except CheckpointError:
        return None
