"""Files of models: safetensors, JSON, and folders that appear at once."""

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

WHOLE = "name a folder with a complete model: its configuration and every .safetensors file"
ZIPPED = (
    "it must be a file of torch.save (torch 1.6 or later) that holds tensors alone; if it is one, "
    "download it again"
)


def read_weights(folder: Path) -> Weights:
    """Return the tensors of safetensors files, or of torch's `.bin` files where there are none."""
    if any((folder / name).exists() for name in (SINGLE, INDEX)):
        return read_safetensors(folder)
    index = folder / TORCH_INDEX
    if not index.exists() and not (folder / TORCH).exists():
        raise StorageError(f"{folder} has no weights: neither {SINGLE} nor {TORCH}", hint=WHOLE)
    tensors: dict[str, Tensor] = {}
    for file in _indexed(index) if index.exists() else [TORCH]:
        tensors |= read_torch(folder / file, hint=ZIPPED)
    return Weights.held(tensors)


def read_torch(file: Path, *, hint: str) -> dict[str, Tensor]:
    """Return the tensors of a file of torch.save, mapped into memory. Nothing else is unpickled."""
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
    """Return the tensors of one file, or of all files in an index."""
    from safetensors import SafetensorError, safe_open

    index = folder / INDEX
    files = _indexed(index) if index.exists() else [SINGLE]
    shapes: dict[str, Sequence[int]] = {}
    opened: dict[str, Any] = {}
    for file in files:
        try:
            handle: Any = safe_open(folder / file, framework="pt")
        except (OSError, SafetensorError) as error:
            reason = file_fault(error)[0] if isinstance(error, OSError) else str(error)
            raise StorageError(f"cannot read {folder / file}: {reason}", hint=WHOLE) from None
        for name in handle.keys():  # noqa: SIM118 - not a mapping
            shapes[name] = handle.get_slice(name).get_shape()
            opened[name] = handle
    return Weights(shapes, lambda name: opened[name].get_tensor(name))


def _indexed(index: Path) -> list[str]:
    """Return the files that an index names."""
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict):
        raise StorageError(f"{index} has no `weight_map`", hint=WHOLE)
    return sorted(set(places.values()))


def write_safetensors(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], file_bytes: int = FILE_BYTES
) -> set[torch.dtype]:
    """Write one file, or several with an index if one is too large. Return the tensors' types.

    Tensors are read one at a time; at most one file's tensors are in memory.
    """
    from safetensors.torch import save_file

    groups: list[list[str]] = []
    dtypes: set[torch.dtype] = set()
    total = 0

    def save(group: dict[str, Tensor]) -> None:
        part = folder / f"part-{len(groups)}"
        save_file(group, part, metadata={"format": "pt"})
        # safetensors makes files that only their owner can read; the folder has the user's umask.
        part.chmod(folder.stat().st_mode & 0o666)
        groups.append(list(group))

    held: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if held and size + tensor.nbytes > file_bytes:
            save(held)
            held, size = {}, 0
        held[name] = tensor
        size += tensor.nbytes
        total += tensor.nbytes
        dtypes.add(tensor.dtype)
    save(held)
    if len(groups) == 1:
        (folder / "part-0").rename(folder / SINGLE)
        return dtypes
    places = {}
    for number, names in enumerate(groups):
        file = f"model-{number + 1:05d}-of-{len(groups):05d}.safetensors"
        (folder / f"part-{number}").rename(folder / file)
        places.update(dict.fromkeys(names, file))
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": places})
    return dtypes


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder beside this one; rename it at the end."""
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
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise StorageError(f"cannot read {file}: {file_fault(error)[0]}", hint=WHOLE) from None
    except ValueError as error:
        raise StorageError(f"cannot read {file}: {error}", hint=WHOLE) from None
    if not isinstance(data, dict):
        raise StorageError(f"{file} is not a JSON object", hint=WHOLE)
    return data


def write_json(file: Path, data: object) -> None:
    file.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
