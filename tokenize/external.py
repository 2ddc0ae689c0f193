"""Find an external dataset's shards and its ids' type."""

from __future__ import annotations

import numpy as np

from ..console.errors import InputError
from ..dataplane.datasets.manifest import Shard
from ..dataplane.shards import FORMATS, shard_format
from ..dataplane.storage import storage


def detect_format(url: str) -> str:
    """Detect the dataset format in a folder; return its name."""
    names = storage.list_files(url)
    for name in FORMATS:
        if shard_format(name).recognises(names):
            return name
    known = [
        f"{files} ({name})" for name in FORMATS if (files := shard_format(name).external_files)
    ]
    raise InputError(
        f"no dataset of a known format at {url}",
        hint=f"name the folder that holds the shards themselves: {', or '.join(known)}",
    )


def list_shards(url: str, format: str, column: str, dtype: str | None) -> tuple[list[Shard], str]:
    """List a dataset's shards, without hashes and counts; return them and their ids' type, which is
    `dtype` if the format does not record it."""
    shards = list(shard_format(format).external_shards(url, column, dtype))
    if not shards:
        raise InputError(f"no {format} shards at {url}")
    types = {shard.dtype for shard in shards}
    for name in types:
        if not _is_integer(name):
            raise InputError(
                f"the values of {url} are {name}: ids are integers",
                hint="name the column of the ids with --column, or their type with --dtype",
            )
    if len(types) > 1:
        raise InputError(f"the files of {url} have ids of several types: {sorted(types)}")
    return [
        Shard(
            name=shard.name,
            size=shard.size,
            documents=0,
            tokens=0,
            hash="",
            chunks=b"",
            stored_name=shard.stored_name,
            stored_size=shard.stored_size,
            details=shard.details,
        )
        for shard in shards
    ], types.pop()


def _is_integer(name: str) -> bool:
    """Return whether numpy has an integer type with this name."""
    try:
        return np.dtype(name).kind in "iu"
    except TypeError:
        return False
