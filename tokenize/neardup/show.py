"""Show clusters of near-duplicates: texts side by side, with their similarity."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...console.errors import InputError
from .. import sources
from ..chat.config import ChatFields
from ..chat.messages import Contents
from ..corpus.documents import DocumentReader
from ..corpus.inputs import find_files
from ..corpus.read_stats import ReadStats
from ..files.file_hashes import hash_files
from ..sources.fields import KeptField
from ..sources.format import Slice, SourceConfig
from . import results
from .results import Results
from .signatures import shingles

SLICE_BYTES = 16 << 20
COLUMN = 58
"""Characters of a column of text."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """A document of a cluster."""

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
    """Number of the document that stays."""
    documents: int
    members: list[Member]
    """The document that stays, and the first of the others."""


def clusters(
    out: str, *, first: int = 0, count: int = 5, most: int = 3, number: int | None = None
) -> Iterator[Cluster]:
    """Yield the largest clusters from `first` on, or the cluster with this number: each with up to
    `most` of its duplicates."""
    held = results.required(out)
    table = results.read_table(out, held, "clusters")
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
        chosen = [number]
    else:
        chosen = sorted(sizes, key=lambda cluster: (-sizes[cluster], cluster))
        chosen = chosen[first : first + count]
    for cluster in chosen:
        rows = table.filter(numbers == cluster).slice(0, most + 1).to_pylist()
        texts = [_text(held, row["file"], row["record"]) for row in rows]
        members = [
            Member(
                document=row["document"],
                file=row["file"],
                record=row["record"],
                kept=row["kept"],
                text=text,
                similarity=similarity(texts[0], text, held.settings["ngram"]),
            )
            for row, text in zip(rows, texts, strict=True)
        ]
        yield Cluster(cluster=cluster, documents=sizes[cluster], members=members)


def similarity(one: str, other: str, ngram: int) -> float:
    """Return the Jaccard similarity of the runs of words of two texts."""
    hashes, edges = shingles([one, other], ngram)
    left, right = set(hashes[: edges[1]].tolist()), set(hashes[edges[1] :].tolist())
    return len(left & right) / len(left | right)


def _text(held: Results, name: str, record: int) -> str:
    """Read a document of the corpus."""
    source = _source(held.settings["source"])
    hash = next(hash for file, _, hash in held.inputs if file == name)
    (file,) = hash_files(find_files([name], source)).files
    if file.fingerprint != hash:
        raise InputError(f"{name} has changed since the search", hint=results.RUN_AGAIN)
    reader = DocumentReader(source, held.settings["skip_bad"])
    parts = sources.cut(file, source, SLICE_BYTES, skip_bad=held.settings["skip_bad"])
    for _, texts in reader.read([_last_before(parts, record)], ReadStats()):
        if record in texts.positions:
            text: str = texts.texts[texts.positions.index(record)]
            return text
    raise InputError(f"{name} has no record {record + 1} any more", hint=results.RUN_AGAIN)


def _source(settings: dict[str, Any]) -> SourceConfig:
    keep = tuple(KeptField(**each) for each in settings["keep"])
    chat = settings["chat"] and Contents(fields=ChatFields(**settings["chat"]["fields"]))
    return SourceConfig(**{**settings, "keep": keep, "chat": chat})


def _last_before(parts: Sequence[Slice], record: int) -> Slice:
    return [part for part in parts if part.first <= record][-1]


def describe(cluster: Cluster) -> str:
    """Return a cluster as text: the document that stays beside each other one."""
    kept, *others = cluster.members
    lines = [f"cluster {cluster.cluster}: {cluster.documents:,} documents"]
    lines.append(f"  stays: {kept.file}, record {kept.record + 1}")
    for other in others:
        lines.append(
            f"  leaves: {other.file}, record {other.record + 1} (similarity {other.similarity:.3f})"
        )
        columns = (_wrapped(kept.text), _wrapped(other.text))
        for left, right in itertools.zip_longest(*columns, fillvalue=""):
            mark = " " if left == right else "|"
            lines.append(f"    {left:<{COLUMN}} {mark} {right}")
    if (more := cluster.documents - len(cluster.members)) > 0:
        lines.append(f"  and {more:,} more")
    return "\n".join(lines)


def _wrapped(text: str) -> list[str]:
    lines = [part for line in text.splitlines() for part in textwrap.wrap(line, COLUMN) or [""]]
    return [line.expandtabs() for line in lines]
