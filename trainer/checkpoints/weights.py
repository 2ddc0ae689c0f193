"""Weights of a checkpoint from its files alone: in one process, without an engine."""

from __future__ import annotations

from pathlib import Path

import torch

from ...dataplane.storage import storage
from ...models.parallel.sharding import LocalShard
from ...models.weights import Weights
from . import store, tensors
from .fragments import MASTER, Fragment, keyed


def weights(checkpoint: Path | str) -> Weights:
    """Return the fp32 weights, read lazily, after verifying the files."""
    store.verify(checkpoint, store.read_manifest(checkpoint).files)
    stored = tensors.Stored(storage.join(store.place(checkpoint), store.TENSORS))
    shapes = stored.shapes(MASTER)

    def read(name: str) -> torch.Tensor:
        whole = torch.empty(shapes[name], dtype=torch.float32)
        stored.read([Fragment(keyed(MASTER, name), LocalShard(shapes[name]), 0, whole.view(-1))])
        return whole

    return Weights(shapes, read)
