"""Model files: safetensors, torch's `.bin`, JSON, and folders written atomically."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...console.errors import StorageError, file_fault
from ..weights import Weights

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FILE_BYTES = 5 * 10**9

TORCH = "pytorch_model.bin"
TORCH_INDEX = "pytorch_model.bin.index.json"

COMPLETE_HINT = "name a folder with a complete model: its configuration and every .safetensors file"
TORCH_HINT = (
    "it must be a file of torch.save (torch 1.6 or later) that holds tensors alone; if it is one, "
    "download it again"
)


def read_weights(folder: Path) -> Weights:
    """Read safetensors files, or torch's `.bin` files if there are none."""
    if any((folder / name).exists() for name in (SINGLE, INDEX)):
        return read_safetensors(folder)
    index = folder / TORCH_INDEX
    if not index.exists() and not (folder / TORCH).exists():
        raise StorageError(
            f"{folder} has no weights: neither {SINGLE} nor {TORCH}", hint=COMPLETE_HINT
        )
    tensors: dict[str, Tensor] = {}
    for file in _list_indexed_files(index) if index.exists() else [TORCH]:
        tensors |= read_torch(folder / file, hint=TORCH_HINT)
    return Weights.wrap(tensors)


def read_torch(file: Path, *, hint: str) -> dict[str, Tensor]:
    """Read tensors from a torch.save file, memory-mapped. Nothing else is unpickled."""
    import pickle
    import zipfile

    if file.exists() and not zipfile.is_zipfile(file):
        raise StorageError(f"{file} is damaged, or was not written by torch.save", hint=hint)
    try:
        with torch.serialization.safe_globals([io.BytesIO]):
            loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise StorageError(f"cannot read {file}: {error}", hint=hint) from None
    if not isinstance(loaded, dict):
        raise StorageError(f"{file} holds no tensors by name", hint=hint)
    if isinstance(loaded.get("model"), dict):  # a training checkpoint, as BlackMamba's
        loaded = loaded["model"]
    return {name: tensor for name, tensor in loaded.items() if isinstance(tensor, Tensor)}


def read_safetensors(folder: Path) -> Weights:
    """Read a single safetensors file, or all files in an index."""
    from safetensors import SafetensorError, safe_open

    index = folder / INDEX
    files = _list_indexed_files(index) if index.exists() else [SINGLE]
    shapes: dict[str, Sequence[int]] = {}
    handles: dict[str, Any] = {}
    for file in files:
        try:
            handle: Any = safe_open(folder / file, framework="pt")
        except (OSError, SafetensorError) as error:
            reason = file_fault(error)[0] if isinstance(error, OSError) else str(error)
            raise StorageError(
                f"cannot read {folder / file}: {reason}", hint=COMPLETE_HINT
            ) from None
        for name in handle.keys():  # noqa: SIM118 - not a mapping
            shapes[name] = handle.get_slice(name).get_shape()
            handles[name] = handle
    return Weights(shapes, lambda name: handles[name].get_tensor(name))


def _list_indexed_files(index: Path) -> list[str]:
    """List the files in an index."""
    files_by_tensor = read_json(index).get("weight_map")
    if not isinstance(files_by_tensor, dict) or not all(
        isinstance(file, str) for file in files_by_tensor.values()
    ):
        raise StorageError(f"{index} has no `weight_map` of file names", hint=COMPLETE_HINT)
    return sorted(set(files_by_tensor.values()))


def write_safetensors(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], file_bytes: int = FILE_BYTES
) -> set[torch.dtype]:
    """Write a single file, or several files with an index above `file_bytes`. Return the dtypes.

    Tensors are read one by one; at most one file's tensors are in memory.
    """
    from safetensors.torch import save_file

    groups: list[list[str]] = []
    dtypes: set[torch.dtype] = set()
    total = 0

    def save(group: dict[str, Tensor]) -> None:
        file_path = folder / f"part-{len(groups)}"
        save_file(group, file_path, metadata={"format": "pt"})
        # safetensors makes files that only their owner can read; the folder has the user's umask.
        file_path.chmod(folder.stat().st_mode & 0o666)
        groups.append(list(group))

    batch: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if batch and size + tensor.nbytes > file_bytes:
            save(batch)
            batch, size = {}, 0
        batch[name] = tensor
        size += tensor.nbytes
        total += tensor.nbytes
        dtypes.add(tensor.dtype)
    save(batch)
    if len(groups) == 1:
        (folder / "part-0").rename(folder / SINGLE)
        return dtypes
    files_by_tensor = {}
    for number, names in enumerate(groups):
        file = f"model-{number + 1:05d}-of-{len(groups):05d}.safetensors"
        (folder / f"part-{number}").rename(folder / file)
        files_by_tensor.update(dict.fromkeys(names, file))
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": files_by_tensor})
    return dtypes


@contextmanager
def stage_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder, and rename it to `folder` at the end."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise StorageError(f"{folder} exists already", hint="name a new folder")
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)  # left by a killed attempt
        partial.mkdir(parents=True)
        yield partial
        partial.rename(folder)
    except OSError as error:
        reason, hint = file_fault(error)
        raise StorageError(f"cannot write {folder}: {reason}", hint=hint) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def read_json(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"), object_hook=_decode_float)
    except OSError as error:
        raise StorageError(
            f"cannot read {file}: {file_fault(error)[0]}", hint=COMPLETE_HINT
        ) from None
    except ValueError as error:
        raise StorageError(f"cannot read {file}: {error}", hint=COMPLETE_HINT) from None
    if not isinstance(data, dict):
        raise StorageError(f"{file} is not a JSON object", hint=COMPLETE_HINT)
    return data


def _decode_float(values: dict[str, Any]) -> Any:
    """Return transformers' `{"__float__": "Infinity"}` as a number, all else unchanged."""
    return float(values["__float__"]) if values.keys() == {"__float__"} else values


def write_json(file: Path, data: object) -> None:
    file.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
