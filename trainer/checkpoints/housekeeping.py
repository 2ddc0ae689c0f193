"""`trainer clean`: delete the checkpoints of a run that its policy does not keep, and the tails of
records that starts after a kill have cut back."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...console.errors import CheckpointError
from ...dataplane.runlog import writer as lines
from ..folders.folder import RunFolder
from . import store
from .policy import CheckpointConfig


@dataclass(frozen=True)
class Outdated:
    """A checkpoint that the policy does not keep, or a tail of a record."""

    kind: Literal["checkpoint", "tail"]
    path: str
    size: int | None
    """Bytes of its files; None if its manifest cannot be read."""


def clean(
    folder: RunFolder, config: CheckpointConfig, keep: Collection[int], *, dry_run: bool
) -> list[Outdated]:
    """Delete the outdated checkpoints of a run that is not going, the tails of its records, and
    what killed starts left half written. Return the checkpoints and the tails. A dry run deletes
    nothing, and the run may be going."""
    with contextlib.nullcontext() if dry_run else folder.locked():
        tails = [tail for record in folder.records for tail in lines.list_tails(record)]
        outdated = [
            *(_outdated(path) for path in store.outdated(folder.checkpoints, config, keep)),
            *(Outdated("tail", str(tail), tail.stat().st_size) for tail in tails),
        ]
        if not dry_run:
            folder.clear()
            store.clean(folder.checkpoints)
            store.prune(folder.checkpoints, config, keep)
            for tail in tails:
                tail.unlink()
        return outdated


def _outdated(checkpoint: Path) -> Outdated:
    size = None
    with contextlib.suppress(CheckpointError):
        size = sum(file.size for file in store.read_manifest(str(checkpoint)).files)
    return Outdated("checkpoint", str(checkpoint), size)
