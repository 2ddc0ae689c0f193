"""The index of a checkpoint's tensors, which torch writes as a pickle.

A pickle can call any function when it is read. This one is read with the names that torch's index
consists of, and no other, so a checkpoint from a stranger runs no code.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from ...console.errors import CheckpointError

METADATA = ".metadata"

_NAMES = {
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},  # Python 3.13
    "torch": {"Size"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.serialization": {"_get_layout"},
}


def parse(data: bytes, file: str) -> Metadata:
    """Return the index in the bytes of a `.metadata` file. Raise if it names anything else."""
    try:
        metadata = _Unpickler(io.BytesIO(data)).load()
    except _ForeignName as error:
        raise CheckpointError(
            f"the index of the checkpoint's tensors names {error}, which torch never writes there;"
            " it was not read",
            where=file,
            hint="do not use this checkpoint: reading that name could run code of its author",
        ) from None
    assert isinstance(metadata, Metadata)
    return metadata


class _ForeignName(pickle.UnpicklingError):
    pass


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _NAMES.get(module, ()):
            return super().find_class(module, name)
        raise _ForeignName(f"{module}.{name}")
