"""External datasets: find their shards and the type of their ids."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from ..console.errors import InputError, MisuseError, UserError
from ..dataplane.datasets.manifest import Shard
from ..dataplane.shards import arrow, megatron
from ..dataplane.storage import storage

ENDINGS = {".idx": "megatron", ".arrow": "arrow", ".feather": "arrow"}


def format_of(url: str) -> str:
    """Detect the format of the dataset in a folder."""
    names = storage.list_files(url)
    if "index.json" in names:
        return "mds"
    for ending, format in ENDINGS.items():
        if any(name.endswith(ending) for name in names):
            return format
    raise InputError(
        f"{url} holds neither an index.json of MDS, nor .arrow files, nor Megatron's .bin and .idx",
        hint="name the folder that holds the shards themselves",
    )


def shards_of(url: str, format: str, column: str, dtype: str | None) -> tuple[list[Shard], str]:
    """Return the shards of a dataset (their files; documents and tokens are not counted), and the
    type of their ids: `dtype` if the format does not define it."""
    pairs = list(FORMATS[format](url, column, dtype))
    if not pairs:
        raise InputError(f"no {format} shards at {url}")
    types = {kind for _, kind in pairs}
    if len(types) > 1:
        raise InputError(f"the files of {url} have ids of several types: {sorted(types)}")
    return [shard for shard, _ in pairs], types.pop()


@contextlib.contextmanager
def errors_in(where: str) -> Iterator[None]:
    """Add the file to errors raised in the `with` block."""
    try:
        yield
    except UserError as error:
        error.where = error.where or where
        raise


TypedShards = Iterator[tuple[Shard, str]]
"""Shards, and the type of each shard's ids."""


def _shard(name: str, size: int, details: dict[str, object]) -> Shard:
    return Shard(name=name, size=size, documents=0, tokens=0, hash="", chunks=b"", details=details)


def _mds(url: str, column: str, dtype: str | None) -> TypedShards:
    for entry in json.loads(storage.read(storage.join(url, "index.json")))["shards"]:
        raw, packed = entry["raw_data"], entry["zip_data"]
        details: dict[str, object] = {"column": column, "file": raw["basename"]}
        shard = _shard(raw["basename"], raw["bytes"], details)
        if packed is not None:
            if not str(entry["compression"]).startswith("zstd"):
                raise InputError(
                    f"{packed['basename']} is compressed with {entry['compression']}; only zstd "
                    "is supported",
                    hint="decompress the shards",
                )
            shard = replace(shard, stored_name=packed["basename"], stored_size=packed["bytes"])
        yield shard, _mds_type(entry, column, dtype)


def _mds_type(entry: dict[str, Any], column: str, dtype: str | None) -> str:
    names = entry["column_names"]
    if column not in names:
        raise InputError(
            f"the MDS shards have no column `{column}`",
            hint=f"choose a column with --column: {', '.join(names)}",
        )
    encoding = entry["column_encodings"][names.index(column)]
    kind, stored = (*encoding.split(":"), "")[:2]
    if stored and dtype is not None:
        raise MisuseError(
            f"the column `{column}` defines the type of its ids: {stored}",
            hint="leave --dtype out",
        )
    id_type = stored or dtype
    if kind not in ("ndarray", "bytes") or not id_type:
        raise InputError(
            f"the column `{column}` is encoded as `{encoding}`, which does not define the "
            "type of its ids",
            hint="name the type with --dtype, for example --dtype uint16",
        )
    return str(id_type)


def _arrow(url: str, column: str, dtype: str | None) -> TypedShards:
    for name in storage.list_files(url):
        if not name.endswith((".arrow", ".feather")):
            continue
        where = storage.join(url, name)
        size = storage.size(where)
        with errors_in(where):
            kind = arrow.id_type(partial(storage.read, where), size, column)
        yield _shard(name, size, {"column": column, "file": name}), kind


def _megatron(url: str, column: str, dtype: str | None) -> TypedShards:
    for name in storage.list_files(url):
        if not name.endswith(".idx"):
            continue
        data = name.removesuffix(".idx") + ".bin"
        kind, details = megatron.details_of(storage.read(storage.join(url, name)), name)
        details["file"] = data
        yield _shard(data, storage.size(storage.join(url, data)), details), kind


FORMATS = {"mds": _mds, "arrow": _arrow, "megatron": _megatron}
MEANT_FOR = {"column": ("mds", "arrow"), "dtype": ("mds",)}
"""Settings that other formats do not use."""
