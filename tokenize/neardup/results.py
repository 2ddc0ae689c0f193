"""Results of a search, in a folder beside the drop list.

drop.parquet                    input and record of each document to leave out
drop.neardup/neardup.json       settings, inputs, counts, and the hashes of the other files
drop.neardup/results/….parquet  pairs, and clusters with the documents that stay
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ...console.errors import InputError, MisuseError
from ...dataplane.storage import storage
from ...dataplane.storage.sealed import sealed, sealed_parquet, unsealed
from ...dataplane.storage.verified import lost_or_damaged, read_named, write_named
from .clusters import Clusters

NAME = "neardup.json"
FOLDER = "results"
RUN_AGAIN = "run `tokenize neardup` again with the same inputs"


@dataclass(frozen=True, kw_only=True)
class Results:
    """The result of a search, as `neardup.json` has it."""

    settings: dict[str, Any]
    inputs: list[list[Any]]
    """Name, size and hash of each file, in the order of the corpus."""
    documents: int
    clusters: int
    duplicates: int
    """Documents that the drop list names."""
    counts: dict[str, int]
    """Counts of the documents read, as in the manifest of a build."""
    problems: list[str]
    drop_list: str
    """sha256 of the drop list."""
    files: dict[str, str]
    """Names of the files of pairs and of clusters."""


def folder_of(out: str) -> str:
    """Return the folder beside a drop list."""
    if not out.endswith(".parquet"):
        raise MisuseError(
            f"the drop list is a Parquet file, and {out} has another ending",
            hint="write --out NAME.parquet",
        )
    return out.removesuffix(".parquet") + ".neardup"


def save(out: str, results: Results) -> None:
    storage.write(storage.join(folder_of(out), NAME), sealed(asdict(results), indent=1))


def load(out: str) -> Results | None:
    """Return the results beside a drop list, or None if there are none."""
    where = storage.join(folder_of(out), NAME)
    if not storage.exists(where):
        return None
    hint = f"remove the file, and {RUN_AGAIN}"
    return Results(**unsealed(where, storage.read(where), hint=hint))


def read_table(out: str, results: Results, name: str) -> Any:
    """Return the table of pairs or of clusters."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    data = read_named(folder_of(out), results.files[name], hint=RUN_AGAIN)
    return pq.read_table(pa.BufferReader(data))


def is_whole(out: str, results: Results) -> bool:
    """Return True if the drop list and the tables have the hashes that the results name."""
    if not storage.exists(out) or _digest(storage.read(out)) != results.drop_list:
        return False
    return not lost_or_damaged(folder_of(out), results.files.values())


def write_tables(
    out: str,
    clusters: Clusters,
    inputs: Sequence[Sequence[Any]],
    places: Iterable[tuple[Any, Any]],
    pairs: Iterable[tuple[int, Any]],
) -> tuple[str, dict[str, str]]:
    """Write the drop list and the tables; return the hash of the list and the names of the tables.

    `places` has the file and the record of each document, for each part of the corpus; `pairs` has
    the pairs of each band.
    """
    import pyarrow as pa

    where = list(_places(clusters, places))
    files = np.concatenate([np.zeros(0, np.int64), *(file for file, _ in where)])
    records = np.concatenate([np.zeros(0, np.int64), *(record for _, record in where)])
    names = pa.array([name for name, _, _ in inputs], pa.string())
    hashes = pa.array([hash for _, _, hash in inputs], pa.string())
    kept = clusters.documents == clusters.firsts
    table = pa.table(
        {
            "cluster": clusters.firsts,
            "document": clusters.documents,
            "kept": kept,
            "file": names.take(pa.array(files)),
            "input": hashes.take(pa.array(files)),
            "record": records,
        }
    )
    listed = table.filter(pa.array(~kept)).select(
        ["input", "record", "file", "document", "cluster"]
    )
    by_cluster = table.sort_by([("cluster", "ascending"), ("document", "ascending")])
    folder = folder_of(out)
    kinds = {"first": pa.int64(), "second": pa.int64(), "band": pa.int32()}
    rows = (
        pa.table(
            {
                "first": block["first"],
                "second": block["second"],
                "band": np.full(len(block), band, np.int32),
            }
        )
        for band, block in pairs
    )
    files_made = {
        "pairs": write_named(folder, FOLDER, "parquet", sealed_parquet(pa.schema(kinds), rows)),
        "clusters": write_named(
            folder, FOLDER, "parquet", sealed_parquet(by_cluster.schema, [by_cluster])
        ),
    }
    data = sealed_parquet(listed.schema, [listed])
    storage.write(out, data)
    return _digest(data), files_made


def _places(clusters: Clusters, places: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    """Yield the file and the record of the documents of clusters."""
    base = 0
    for files, records in places:
        low, high = np.searchsorted(clusters.documents, [base, base + len(files)])
        wanted = clusters.documents[low:high] - base
        yield files[wanted].astype(np.int64), records[wanted].astype(np.int64)
        base += len(files)


def remove_half_written(out: str) -> None:
    """Remove what killed searches left half written."""
    folder, _, name = out.rpartition("/")
    storage.remove_half_written(folder or ".", of=name)
    for place in ("", FOLDER):
        storage.remove_half_written(storage.join(folder_of(out), place))


def remove_others(out: str, results: Results) -> None:
    """Remove files of earlier results."""
    folder = storage.join(folder_of(out), FOLDER)
    for name in storage.list_files(folder):
        if f"{FOLDER}/{name}" not in results.files.values():
            storage.delete(storage.join(folder, name))


def required(out: str) -> Results:
    """Return the results beside a drop list; raise if there are none."""
    results = load(out)
    if results is None:
        raise InputError(
            f"there are no results of a search beside {out}",
            where=storage.join(folder_of(out), NAME),
            hint="name the list that `tokenize neardup --out` wrote",
        )
    return results


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
