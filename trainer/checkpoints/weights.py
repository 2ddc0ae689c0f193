"""Read a checkpoint's weights from its files, in a single process and without an engine."""

from __future__ import annotations

from pathlib import Path

import torch

from ...console.errors import CheckpointError
from ...dataplane.storage import storage
from ...models.parallel.local_shard import LocalShard
from ...models.weights import Weights
from . import store, tensors
from .fragments import Fragment
from .kinds import MASTER, tensor_key


def read_weights(checkpoint: Path | str, kind: str = MASTER) -> Weights:
    """Verify the files and return the fp32 weights or their moving averages, read lazily. Frozen
    parameters have no average: their weights take its place."""
    manifest, _ = store.read_checkpoint(checkpoint)
    store.verify(checkpoint, manifest.files)
    stored = tensors.StoredTensors(storage.join(store.locate_files(checkpoint), store.TENSORS))
    shapes = stored.shapes(kind)
    if not shapes:
        raise CheckpointError(
            f"{checkpoint} holds no moving average of the weights",
            hint="leave out --ema, or train with optimizer.ema=0.9999",
        )

    def read(parameter: str) -> torch.Tensor:
        tensor = torch.empty(masters[parameter], dtype=torch.float32)
        key = tensor_key(kind if parameter in shapes else MASTER, parameter)
        stored.read([Fragment(key, LocalShard(masters[parameter]), 0, tensor.view(-1))])
        return tensor

    masters = stored.shapes(MASTER)
    return Weights(masters, read)
