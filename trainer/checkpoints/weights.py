"""Weights of a checkpoint from its files alone: in one process, without an engine."""

from __future__ import annotations

from pathlib import Path

import torch

from ...console.errors import CheckpointError
from ...dataplane.storage import storage
from ...models.parallel.local_shard import LocalShard
from ...models.weights import Weights
from . import store, tensors
from .fragments import Fragment
from .kinds import MASTER, keyed


def weights(checkpoint: Path | str, kind: str = MASTER) -> Weights:
    """Return the fp32 weights, or their moving average, read lazily, after verifying the files.
    Frozen parameters have no average: it is their weights."""
    manifest, _ = store.look_at(checkpoint)
    store.verify(checkpoint, manifest.files)
    stored = tensors.Stored(storage.join(store.place(checkpoint), store.TENSORS))
    shapes = stored.shapes(kind)
    if not shapes:
        raise CheckpointError(
            f"{checkpoint} holds no moving average of the weights",
            hint="leave out --ema, or train with optimizer.ema=0.9999",
        )

    def read(name: str) -> torch.Tensor:
        whole = torch.empty(masters[name], dtype=torch.float32)
        key = keyed(kind if name in shapes else MASTER, name)
        stored.read([Fragment(key, LocalShard(masters[name]), 0, whole.view(-1))])
        return whole

    masters = stored.shapes(MASTER)
    return Weights(masters, read)
