"""Show near-duplicate clusters: texts side by side, with similarities."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...console.errors import InputError
from ...console.progress import exact_count
from .. import sources
from ..chat.config import ChatFields
from ..chat.messages import MessageContents
from ..corpus.documents import DocumentReader
from ..corpus.inputs import find_files
from ..corpus.read_stats import ReadStats
from ..files.file_hashes import hash_files
from ..sources.fields import KeptField
from ..sources.format import Slice, SourceConfig
from . import results
from .results import Results
from .signatures import hash_shingles

SLICE_BYTES = 16 << 20
COLUMN = 58
"""Width in characters of a text column."""


@dataclass(frozen=True, kw_only=True)
class ClusterMember:
    """A document in a cluster."""

    document: int
    file: str
    record: int
    kept: bool
    text: str
    similarity: float
    """Jaccard similarity to the document that stays, exact."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    cluster: int
    """Document number of the one that stays."""
    documents: int
    members: list[ClusterMember]
    """The document that stays, then the first duplicates."""


def show_clusters(
    out: str, *, first: int = 0, count: int = 5, max_duplicates: int = 3, number: int | None = None
) -> Iterator[Cluster]:
    """Yield the largest clusters from `first` on, or the cluster `number`, with up to
    `max_duplicates` duplicates."""
    search = results.load_required(out)
    table = results.read_table(out, search, "clusters")
    numbers = table.column("cluster").to_numpy()
    sizes: dict[int, int] = {}
    for cluster in numbers.tolist():
        sizes[cluster] = sizes.get(cluster, 0) + 1
    if number is not None:
        if number not in sizes:
            raise InputError(
                f"no cluster has the number {number}",
                hint="the number of a cluster is that of the document that stays",
            )
        shown_clusters = [number]
    else:
        shown_clusters = sorted(sizes, key=lambda cluster: (-sizes[cluster], cluster))
        shown_clusters = shown_clusters[first : first + count]
    for cluster in shown_clusters:
        rows = table.filter(numbers == cluster).slice(0, max_duplicates + 1).to_pylist()
        texts = [_read_text(search, row["file"], row["record"]) for row in rows]
        members = [
            ClusterMember(
                document=row["document"],
                file=row["file"],
                record=row["record"],
                kept=row["kept"],
                text=text,
                similarity=similarity(texts[0], text, search.settings["ngram"]),
            )
            for row, text in zip(rows, texts, strict=True)
        ]
        yield Cluster(cluster=cluster, documents=sizes[cluster], members=members)


def similarity(text: str, other_text: str, ngram: int) -> float:
    """Return the Jaccard similarity between two texts' word runs."""
    hashes, edges = hash_shingles([text, other_text], ngram)
    runs, other_runs = set(hashes[: edges[1]].tolist()), set(hashes[edges[1] :].tolist())
    return len(runs & other_runs) / len(runs | other_runs)


def _read_text(search: Results, name: str, record: int) -> str:
    """Read a document from the corpus."""
    source = _source_config(search.settings["source"])
    hash = next(hash for file, _, hash in search.inputs if file == name)
    (file,) = hash_files(find_files([name], source)).files
    if file.fingerprint != hash:
        raise InputError(f"{name} has changed since the search", hint=results.RUN_AGAIN)
    reader = DocumentReader(source, search.settings["skip_bad"])
    slices = sources.cut(file, source, SLICE_BYTES, skip_bad=search.settings["skip_bad"])
    for _, texts in reader.read([_slice_with(slices, record)], ReadStats()):
        if record in texts.positions:
            text: str = texts.texts[texts.positions.index(record)]
            return text
    raise InputError(f"{name} has no record {record + 1} any more", hint=results.RUN_AGAIN)


def _source_config(settings: dict[str, Any]) -> SourceConfig:
    keep = tuple(KeptField(**field_settings) for field_settings in settings["keep"])
    chat = settings["chat"] and MessageContents(fields=ChatFields(**settings["chat"]["fields"]))
    return SourceConfig(**{**settings, "keep": keep, "chat": chat})


def _slice_with(slices: Sequence[Slice], record: int) -> Slice:
    return [file_slice for file_slice in slices if file_slice.first <= record][-1]


def describe(cluster: Cluster) -> str:
    """Describe a cluster as text: the document that stays, side by side with every duplicate."""
    kept, *duplicates = cluster.members
    lines = [f"cluster {cluster.cluster}: {exact_count(cluster.documents, 'documents')}"]
    lines.append(f"  stays: {kept.file}, record {kept.record + 1}")
    for duplicate in duplicates:
        lines.append(
            f"  leaves: {duplicate.file}, record {duplicate.record + 1} "
            f"(similarity {duplicate.similarity:.3f})"
        )
        columns = (_wrap(kept.text), _wrap(duplicate.text))
        for kept_line, duplicate_line in itertools.zip_longest(*columns, fillvalue=""):
            mark = " " if kept_line == duplicate_line else "|"
            lines.append(f"    {kept_line:<{COLUMN}} {mark} {duplicate_line}")
    if (num_hidden := cluster.documents - len(cluster.members)) > 0:
        lines.append(f"  and {num_hidden:,} more")
    return "\n".join(lines)


def _wrap(text: str) -> list[str]:
    lines = [
        wrapped_line
        for line in text.splitlines()
        for wrapped_line in textwrap.wrap(line, COLUMN) or [""]
    ]
    return [line.expandtabs() for line in lines]
