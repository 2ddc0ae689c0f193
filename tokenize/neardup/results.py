"""A search's results, in a folder next to the drop list.

drop.parquet                    input and record of every document to leave out
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
from ...dataplane.storage.sealed import seal, seal_parquet, unseal
from ...dataplane.storage.verified import find_damaged, read_named, write_named
from .clusters import Clusters

NAME = "neardup.json"
FOLDER = "results"
RUN_AGAIN = "run `tokenize neardup` again with the same inputs"


@dataclass(frozen=True, kw_only=True)
class Results:
    """A search's results, as `neardup.json` has them."""

    settings: dict[str, Any]
    inputs: list[list[Any]]
    """[name, size, hash] by file, in corpus order."""
    documents: int
    clusters: int
    duplicates: int
    """Documents that the drop list names."""
    counts: dict[str, int]
    """Counts of documents read, as in a build's manifest."""
    problems: list[str]
    drop_list: str
    """The drop list's sha256."""
    files: dict[str, str]
    """The tables' file names: `pairs` and `clusters`."""


def results_folder(out: str) -> str:
    """Return the folder next to a drop list."""
    if not out.endswith(".parquet"):
        raise MisuseError(
            f"the drop list is a Parquet file, and {out} has another ending",
            hint="write --out NAME.parquet",
        )
    return out.removesuffix(".parquet") + ".neardup"


def save(out: str, results: Results) -> None:
    storage.write(storage.join(results_folder(out), NAME), seal(asdict(results), indent=1))


def load(out: str) -> Results | None:
    """Load a drop list's results, or None if there are none."""
    url = storage.join(results_folder(out), NAME)
    if not storage.exists(url):
        return None
    hint = f"remove the file, and {RUN_AGAIN}"
    return Results(**unseal(url, storage.read(url), hint=hint))


def read_table(out: str, results: Results, name: str) -> Any:
    """Read the table `pairs` or `clusters`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    data = read_named(results_folder(out), results.files[name], hint=RUN_AGAIN)
    return pq.read_table(pa.BufferReader(data))


def is_intact(out: str, results: Results) -> bool:
    """Return True if the drop list and the tables match the hashes in the results."""
    if not storage.exists(out) or _digest(storage.read(out)) != results.drop_list:
        return False
    return not find_damaged(results_folder(out), results.files.values())


def write_tables(
    out: str,
    clusters: Clusters,
    inputs: Sequence[Sequence[Any]],
    places: Iterable[tuple[Any, Any]],
    pairs: Iterable[tuple[int, Any]],
) -> tuple[str, dict[str, str]]:
    """Write the drop list and the tables; return the list's hash and the tables' file names.

    `places` yields the documents' files and records, part by part; `pairs` yields bands with pairs.
    """
    import pyarrow as pa

    cluster_places = list(_places(clusters, places))
    files = np.concatenate([np.zeros(0, np.int64), *(file for file, _ in cluster_places)])
    records = np.concatenate([np.zeros(0, np.int64), *(record for _, record in cluster_places)])
    file_names = pa.array([name for name, _, _ in inputs], pa.string())
    input_hashes = pa.array([hash for _, _, hash in inputs], pa.string())
    is_kept = clusters.documents == clusters.firsts
    table = pa.table(
        {
            "cluster": clusters.firsts,
            "document": clusters.documents,
            "kept": is_kept,
            "file": file_names.take(pa.array(files)),
            "input": input_hashes.take(pa.array(files)),
            "record": records,
        }
    )
    drop_table = table.filter(pa.array(~is_kept)).select(
        ["input", "record", "file", "document", "cluster"]
    )
    by_cluster = table.sort_by([("cluster", "ascending"), ("document", "ascending")])
    folder = results_folder(out)
    pair_types = {"first": pa.int64(), "second": pa.int64(), "band": pa.int32()}
    pair_tables = (
        pa.table(
            {
                "first": block["first"],
                "second": block["second"],
                "band": np.full(len(block), band, np.int32),
            }
        )
        for band, block in pairs
    )
    table_names = {
        "pairs": write_named(
            folder, FOLDER, "parquet", seal_parquet(pa.schema(pair_types), pair_tables)
        ),
        "clusters": write_named(
            folder, FOLDER, "parquet", seal_parquet(by_cluster.schema, [by_cluster])
        ),
    }
    data = seal_parquet(drop_table.schema, [drop_table])
    storage.write(out, data)
    return _digest(data), table_names


def _places(clusters: Clusters, places: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    """Yield files and records for clustered documents, part by part."""
    base = 0
    for files, records in places:
        low, high = np.searchsorted(clusters.documents, [base, base + len(files)])
        indices = clusters.documents[low:high] - base
        yield files[indices].astype(np.int64), records[indices].astype(np.int64)
        base += len(files)


def remove_half_written(out: str) -> None:
    """Remove files that killed searches left half-written."""
    folder, _, name = out.rpartition("/")
    storage.remove_half_written(folder or ".", target=name)
    for place in ("", FOLDER):
        storage.remove_half_written(storage.join(results_folder(out), place))


def remove_unreferenced(out: str, results: Results) -> None:
    """Remove tables to which the results do not refer."""
    folder = storage.join(results_folder(out), FOLDER)
    for name in storage.list_files(folder):
        if f"{FOLDER}/{name}" not in results.files.values():
            storage.delete(storage.join(folder, name))


def load_required(out: str) -> Results:
    """Load a drop list's results; raise InputError if there are none."""
    results = load(out)
    if results is None:
        raise InputError(
            f"there are no results of a search beside {out}",
            where=storage.join(results_folder(out), NAME),
            hint="name the list that `tokenize neardup --out` wrote",
        )
    return results


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
