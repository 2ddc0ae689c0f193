"""Read the index of a checkpoint's tensors, which torch writes as a pickle.

A pickle can call any function when it is read. This reader allows only the names in torch's index,
so a checkpoint from a stranger runs no code.
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
    """Parse a `.metadata` file. Raise if it names anything outside torch's index."""
    reader = _Unpickler(io.BytesIO(data))
    try:
        metadata = reader.load()
        if reader.undo_changes() or not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError("it does not hold an index")
    except _ForeignName as error:
        raise CheckpointError(
            f"the index of the checkpoint's tensors names {error}, which torch never writes there;"
            " it was not read",
            where=file,
            hint="do not use this checkpoint: reading that name could run code of its author",
        ) from None
    except Exception as error:  # a reader of pickles may raise nearly anything
        raise CheckpointError(
            f"the index of the checkpoint's tensors is damaged: {error or type(error).__name__}",
            where=file,
            hint="restore it from a copy, or run again with --fallback",
        ) from None
    finally:
        reader.undo_changes()
    return metadata


class _ForeignName(pickle.UnpicklingError):
    pass


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._before: dict[type, dict[str, Any]] = {}

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in _NAMES.get(module, ()):
            raise _ForeignName(f"{module}.{name}")
        value = super().find_class(module, name)
        if isinstance(value, type):
            self._before.setdefault(value, dict(vars(value)))
        return value

    def undo_changes(self) -> bool:
        """Undo changes to classes, whose attributes a pickle can set. Return whether there were
        any."""
        changed = False
        for cls, before in self._before.items():
            for attribute, value in dict(vars(cls)).items():
                if attribute not in before:
                    delattr(cls, attribute)
                elif value is not before[attribute]:
                    setattr(cls, attribute, before[attribute])
                else:
                    continue
                changed = True
        return changed
