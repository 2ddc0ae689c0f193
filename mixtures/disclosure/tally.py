"""The documents of a source that a run's weights hold: tokens by language and domain, newest date.

Shards are read one after another, for their tables of documents and their kept fields: never their
tokens. Only the counts are held.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...dataplane.arrays import Int64
from ...dataplane.datasets.dataset import Dataset
from .served_tokens import ServedTokens
from .statement import FieldNames

HOST = r"^[A-Za-z][A-Za-z0-9+.-]*://(?:[^/?#@]*@)?(?:[Ww]{3}\.)?(?P<host>[^/:?#@]+)"
"""The host name of a URL, without `www.`, in the syntax of RE2."""
SECOND_LEVELS = "ac|co|com|ed|edu|gen|go|gob|gov|gouv|govt|id|ltd|mil|ne|net|nom|or|org|plc|sch"
"""Names below a country's domain under which domains are registered: `co` in `mill.co.uk`."""
DOMAIN = rf"(?P<domain>[^.]+\.(?:(?:{SECOND_LEVELS})\.[a-z][a-z]|[^.]*[^.0-9][^.]*))\.?$"
"""The top- and second-level domain of a host name; an address of four numbers has none."""

DATE = r"^[0-9]{4}(-(0[1-9]|1[0-2])(-(0[1-9]|[12][0-9]|3[01])([T ].*)?)?)?$"
"""A year, a month, a day or a time."""


@dataclass
class FieldTally:
    """Tokens of documents by the value of a kept field, each time that they were served."""

    tokens: Counter[str] = field(default_factory=Counter)
    """A document with a list counts for each of its elements."""
    unknown: int = 0
    """Tokens of documents without a value."""


def merge_tallies(tallies: Sequence[FieldTally | None]) -> tuple[Counter[str], int]:
    """Add up tallies: tokens by value, and tokens without one."""
    total: Counter[str] = Counter()
    for tally in tallies:
        total.update(tally.tokens if tally else {})
    return total, sum(tally.unknown for tally in tallies if tally)


@dataclass
class SourceTally:
    """Counts over the documents of a source that the weights hold."""

    documents: int = 0
    tokens: int = 0
    """Each time that they were served."""
    distinct_tokens: int = 0
    languages: FieldTally | None = None
    """None if the dataset keeps no such field."""
    domains: FieldTally | None = None
    newest: str | None = None
    """Largest date of the documents; None if the dataset keeps no dates."""
    undated: int = 0
    """Tokens of documents without a date, where the dataset keeps dates."""


def tally_source(dataset: Dataset, served: ServedTokens, names: FieldNames) -> SourceTally:
    """Count the documents of a dataset, shard by shard."""
    kept = dataset.manifest.kept_fields
    tally = SourceTally(
        languages=FieldTally() if names.language in kept else None,
        domains=FieldTally() if names.url in kept else None,
    )
    columns = [name for name in (names.language, names.url, names.date) if name in kept]
    bounds = dataset.shard_tokens
    shards = np.flatnonzero(served.count_distinct(bounds[:-1], bounds[1:]))
    for shard in shards.tolist():
        layout = dataset.open_shard(shard).layout
        lengths = layout.document_tokens
        starts = bounds[shard] + layout.document_starts[: len(lengths)]
        tokens = served.count(starts, starts + lengths)
        is_held = tokens > 0
        tally.documents += int(is_held.sum())
        tally.tokens += int(tokens.sum())
        tally.distinct_tokens += int(served.count_distinct(starts, starts + lengths).sum())
        if not columns:
            continue
        first = int(dataset.shard_documents[shard])
        table = dataset.columns(first, first + len(lengths), columns).filter(is_held)
        values = {name: table.column(name).combine_chunks() for name in columns}
        if tally.languages is not None:
            _add_values(tally.languages, values[names.language], tokens[is_held])
        if tally.domains is not None:
            _add_values(tally.domains, _find_domains(values[names.url]), tokens[is_held])
        if names.date in kept:
            newest, is_dated = _newest(values[names.date])
            tally.newest = max(tally.newest or "", newest) or None
            tally.undated += int(tokens[is_held][~is_dated].sum())
    return tally


def _add_values(tally: FieldTally, column: Any, tokens: Int64) -> None:
    """Add the tokens of documents by their values; a value of several documents is added once."""
    import pyarrow as pa
    import pyarrow.compute as pc

    owners = np.arange(len(column))
    if pa.types.is_list(column.type):
        owners = pc.list_parent_indices(column).to_numpy()
        pairs = pa.table({"owner": owners, "value": pc.cast(pc.list_flatten(column), pa.string())})
        pairs = pairs.filter(pc.is_valid(pairs["value"])).group_by(["owner", "value"]).aggregate([])
        owners, column = pairs["owner"].to_numpy(), pairs["value"].combine_chunks()
    column = pc.cast(column, pa.string())
    is_known = pc.fill_null(pc.not_equal(column, ""), False).to_numpy(zero_copy_only=False)
    has_value = np.zeros(len(tokens), np.bool_)
    has_value[owners[is_known]] = True
    tally.unknown += int(tokens[~has_value].sum())
    encoded = pc.dictionary_encode(column.filter(is_known))
    sums = np.zeros(len(encoded.dictionary), np.int64)
    np.add.at(sums, encoded.indices.to_numpy(), tokens[owners[is_known]])
    for value, count in zip(encoded.dictionary.to_pylist(), sums.tolist(), strict=True):
        tally.tokens[value] += count


def _find_domains(column: Any) -> Any:
    """Return the domain names in a column of URLs, in lower case; null where there is none. A host
    without a top-level domain stands for itself."""
    import pyarrow as pa
    import pyarrow.compute as pc

    urls = pc.cast(column, pa.string())
    hosts = pc.utf8_lower(pc.struct_field(pc.extract_regex(urls, HOST), "host"))
    return pc.coalesce(pc.struct_field(pc.extract_regex(hosts, DOMAIN), "domain"), hosts)


def _newest(column: Any) -> tuple[str, Any]:
    """Return the largest date of a column, as text, empty if it has none; and which values are
    dates of ISO 8601: others have no order."""
    import pyarrow as pa
    import pyarrow.compute as pc

    texts = pc.cast(column, pa.string())
    is_date = pc.fill_null(pc.match_substring_regex(texts, DATE), False)
    newest = pc.max(texts.filter(is_date)).as_py()
    return newest or "", is_date.to_numpy(zero_copy_only=False)
