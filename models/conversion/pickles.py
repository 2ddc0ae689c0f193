"""Files of torch.save read as data: tensors and plain containers, never code.

A training checkpoint also holds random states, settings and objects of its program. Whatever is no
tensor, number, text or container becomes an empty stand-in: nothing is imported for it or called.
"""

from __future__ import annotations

import collections
import pickle
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...console.errors import StorageError

TORCH_NAMES = {
    *("_rebuild_tensor_v2", "_rebuild_parameter", "_rebuild_tensor", "_rebuild_device_tensor"),
}
"""Functions of torch._utils that build tensors."""


class StandIn:
    """An object of another program, without its contents."""

    def __new__(cls, *arguments: Any, **options: Any) -> StandIn:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None: ...

    def append(self, item: Any) -> None: ...

    def extend(self, items: Any) -> None: ...

    def __setitem__(self, key: Any, value: Any) -> None: ...


class DataUnpickler(pickle.Unpickler):
    """Builds tensors and containers alone."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if module == "torch._utils" and name in TORCH_NAMES:
            return getattr(torch._utils, name)
        if module == "torch" and (name.endswith("Storage") or name == "Size"):
            return getattr(torch, name, StandIn)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("torch.storage", "UntypedStorage"):
            return torch.UntypedStorage
        return StandIn


def read_data(file: Path, *, hint: str) -> Any:
    """Return the file's object, its tensors memory-mapped. Raise StorageError for a damaged file,
    and if some of the stored tensors are not in what was read."""
    reader = types.ModuleType("data_pickle")
    reader.Unpickler = DataUnpickler  # type: ignore[attr-defined]
    reader.load = pickle.load  # type: ignore[attr-defined]
    if file.exists() and not zipfile.is_zipfile(file):
        raise StorageError(f"{file} is damaged, or was not written by torch.save", hint=hint)
    try:
        data = torch.load(
            file, map_location="cpu", pickle_module=reader, weights_only=False, mmap=True
        )
        with zipfile.ZipFile(file) as archive:
            stored = sum(name.split("/")[-2:-1] == ["data"] for name in archive.namelist())
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise StorageError(f"cannot read {file}: {error}", hint=hint) from None
    storages = {tensor.untyped_storage().data_ptr() for tensor in iterate_tensors(data)}
    empty = any(not tensor.numel() for tensor in iterate_tensors(data))
    if len(storages) < stored - empty:
        raise StorageError(
            f"{file} has {stored} stored tensors, and {len(storages)} of them can be read as data",
            hint="save it again with tensors in dictionaries and lists alone",
        )
    return data


def iterate_tensors(data: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested containers."""
    if isinstance(data, Tensor):
        yield data
    elif isinstance(data, dict):
        for value in data.values():
            yield from iterate_tensors(value)
    elif isinstance(data, (list, tuple)):
        for value in data:
            yield from iterate_tensors(value)
