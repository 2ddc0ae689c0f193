"""Read a checkpoint's weights from its files, without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from ...console.errors import CheckpointError, UserError
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
    stored = _open_tensors(checkpoint)
    kinds = _kinds(checkpoint, stored, kind)
    masters = stored.shapes(MASTER)

    def read(parameter: str) -> torch.Tensor:
        tensor = torch.empty(masters[parameter], dtype=torch.float32)
        key = tensor_key(kinds[parameter], parameter)
        stored.read([Fragment(key, LocalShard(masters[parameter]), 0, tensor.view(-1))])
        return tensor

    return Weights(masters, read)


def fill_weights(
    checkpoint: Path | str,
    fragments: Sequence[Fragment],
    kind: str,
    group: dist.ProcessGroup | None,
) -> None:
    """Verify the files and read this rank's weights, or their moving averages, into the fragments
    of masters. The ranks of `group` share the hashing. Collective."""
    manifest, _ = store.read_checkpoint(checkpoint)
    verify_together(checkpoint, manifest.files, group)
    stored = _open_tensors(checkpoint)
    kinds = _kinds(checkpoint, stored, kind)
    keys = [tensor_key(kinds.get(part.parameter, MASTER), part.parameter) for part in fragments]
    stored.read([replace(part, key=key) for part, key in zip(fragments, keys, strict=True)])


def verify_together(
    checkpoint: Path | str, files: Sequence[store.StoredFile], group: dist.ProcessGroup | None
) -> None:
    """Verify files, each on one of the ranks; all raise if one does. Collective."""
    if group is None:
        store.verify(checkpoint, files)
        return
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    failure: UserError | None = None
    try:
        store.verify(checkpoint, files[rank::world])
    except UserError as error:
        failure = error
    failures = [failure] * world
    dist.all_gather_object(failures, failure, group=group)
    for rank_failure in failures:
        if rank_failure is not None:
            raise rank_failure


def _open_tensors(checkpoint: Path | str) -> tensors.StoredTensors:
    return tensors.StoredTensors(storage.join(store.locate_files(checkpoint), store.TENSORS))


def _kinds(checkpoint: Path | str, stored: tensors.StoredTensors, kind: str) -> dict[str, str]:
    """Return by parameter the kind of tensor to read in place of `kind`."""
    shapes = stored.shapes(kind)
    if not shapes:
        raise CheckpointError(
            f"{checkpoint} holds no moving average of the weights",
            hint="leave out --ema, or train with optimizer.ema=0.9999",
        )
    return {name: kind if name in shapes else MASTER for name in stored.shapes(MASTER)}
