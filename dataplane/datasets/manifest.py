"""The manifest: what a dataset is, and the proof that it is whole.

    URL/
      manifest.json                 the head: tokenizer, settings, generations. Written last.
      tables/<hash>.arrow           one for each generation: its shards, with their hashes
      shards/<hash>.<format>        tokens

The head is small (a few KB however large the dataset is): a plan reads only totals. Shard tables
are read when shards are needed. A dataset grows by whole generations that are only ever appended;
each has a hash that chains the one before, so that `hash` after g generations names exactly the
tokens that those hold, wherever the dataset is mirrored.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ...console.errors import IntegrityError, StorageError
from ..storage import storage

VERSION = 1
NAME = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class TokenizerInfo:
    """What a reader must know of the tokenizer; `spec` is what builds it again."""

    kind: str
    fingerprint: str
    """Of what the ids mean; datasets of one mixture share it."""
    vocab_size: int
    end_of_document: int | None
    """The id that ends every document; None where an indexed dataset has none."""
    spec: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One file of a dataset."""

    name: str
    """Relative to the dataset's URL."""
    size: int
    """Bytes of the (uncompressed) file."""
    documents: int
    tokens: int
    hash: str
    """sha256 over the size and the digests of the file's chunks."""
    chunks: bytes = field(repr=False)
    """The sha256 digests (32 bytes each) of every CHUNK_BYTES of the (uncompressed) file."""
    task: str = ""
    """The build task that made it, and would make it again."""
    stored_name: str | None = None
    """The compressed file, where the dataset is compressed; `hash` is of what is inside."""
    stored_size: int | None = None
    stored_hash: str | None = None
    details: dict[str, Any] = field(default_factory=dict)
    """What the shard's format needs besides (the index of a Megatron file, for example)."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A whole build that was appended to the dataset."""

    documents: int
    tokens: int
    size: int
    """Bytes of all its shards."""
    shards: int
    table: str
    """The shard table's name, relative to the dataset's URL."""
    table_hash: str
    provenance: dict[str, Any] = field(default_factory=dict)
    """Where it came from: inputs with sizes, counts of what was dropped, versions."""
    hash: str = ""
    """Chains the previous generation's hash and this one's content."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    format: str
    """A name in dataplane.shards.FORMATS."""
    dtype: str
    """uint16 or uint32."""
    tokenizer: TokenizerInfo
    weights: tuple[float, ...] | None = None
    """The palette of loss weights that the shards' code column indexes, if there is one."""
    settings: dict[str, Any] = field(default_factory=dict)
    generations: tuple[Generation, ...] = ()
    version: int = VERSION

    @property
    def documents(self) -> int:
        return sum(generation.documents for generation in self.generations)

    @property
    def tokens(self) -> int:
        return sum(generation.tokens for generation in self.generations)

    @property
    def hash(self) -> str:
        return self.generations[-1].hash if self.generations else self._root()

    def append(self, generation: Generation) -> Manifest:
        """The manifest with one more generation, chained to those before."""
        chained = _digest(self.hash, generation.table_hash, generation.tokens)
        return replace(self, generations=(*self.generations, replace(generation, hash=chained)))

    def _root(self) -> str:
        """What all generations share and what decides their tokens' meaning."""
        return _digest(self.format, self.dtype, self.tokenizer.fingerprint, self.weights)


def load(url: str) -> Manifest:
    """Read a dataset's manifest, and check that it is the one that was written."""
    where = storage.join(url, NAME)
    try:
        text = storage.read(where)
    except StorageError as error:
        relative = storage.is_local(url) and not storage.local_path(url).is_absolute()
        raise StorageError(
            f"no dataset at {url}: {error.what}",
            where=f"below {Path.cwd()}, where this command was run" if relative else None,
            hint="build one there with `tokenize build`, or index an existing one with "
            "`tokenize index`",
        ) from None
    try:
        data = json.loads(text)
        seal = data.pop("seal")
        if data["version"] != VERSION:
            raise StorageError(
                f"{where} has format version {data['version']}; this headrace reads {VERSION}",
                hint="use the headrace that wrote it, or build the dataset again",
            )
        if seal != _digest(data):
            raise IntegrityError(f"{where} was changed after it was written", hint=_MEND)
        weights = data["weights"]
        manifest = Manifest(
            **{
                **data,
                "tokenizer": TokenizerInfo(**data["tokenizer"]),
                "weights": None if weights is None else tuple(weights),
                "generations": tuple(Generation(**item) for item in data["generations"]),
            }
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise IntegrityError(f"{where} is not a whole manifest: {error!r}", hint=_MEND) from None
    chained = replace(manifest, generations=())
    for generation in manifest.generations:
        chained = chained.append(replace(generation, hash=""))
    if chained != manifest:
        raise IntegrityError(f"the generations of {where} do not chain", hint=_MEND)
    return manifest


def save(url: str, manifest: Manifest) -> None:
    """Write the head atomically: from here on, the dataset is what `manifest` says."""
    data = asdict(manifest)
    data["weights"] = None if manifest.weights is None else list(manifest.weights)
    data["generations"] = [asdict(generation) for generation in manifest.generations]
    data = json.loads(json.dumps(data))
    text = json.dumps({**data, "seal": _digest(data)}, indent=1)
    storage.write(storage.join(url, NAME), text.encode())


def totals(shards: Sequence[Shard]) -> dict[str, Any]:
    """What a generation sums up of its shards."""
    return {
        "documents": sum(shard.documents for shard in shards),
        "tokens": sum(shard.tokens for shard in shards),
        "size": sum(shard.size for shard in shards),
        "shards": len(shards),
    }


def write_generation(
    url: str, shards: Sequence[Shard], provenance: dict[str, Any] | None = None
) -> Generation:
    """Write the shard table of a generation; returns what the head is to say of it."""
    import pyarrow as pa

    rows = [{**asdict(shard), "details": json.dumps(shard.details)} for shard in shards]
    table = pa.Table.from_pylist(rows, schema=_table_schema())
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    digest = hashlib.sha256(sink.getvalue()).hexdigest()
    name = f"tables/{digest[:32]}.arrow"
    storage.write(storage.join(url, name), sink.getvalue())
    return Generation(**totals(shards), table=name, table_hash=digest, provenance=provenance or {})


def load_table(url: str, generation: Generation) -> list[Shard]:
    """The shards of one generation, in order."""
    import pyarrow as pa

    where = storage.join(url, generation.table)
    data = storage.read(where)
    if hashlib.sha256(data).hexdigest() != generation.table_hash:
        raise IntegrityError(f"{where} is not the table that the manifest names", hint=_MEND)
    rows = pa.ipc.open_file(pa.BufferReader(data)).read_all().to_pylist()
    return [Shard(**{**row, "details": json.loads(row["details"])}) for row in rows]


def _digest(*parts: Any) -> str:
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _table_schema() -> Any:
    import pyarrow as pa

    return pa.schema(
        [
            ("name", pa.string()),
            ("size", pa.int64()),
            ("documents", pa.int64()),
            ("tokens", pa.int64()),
            ("hash", pa.string()),
            ("chunks", pa.binary()),
            ("task", pa.string()),
            ("stored_name", pa.string()),
            ("stored_size", pa.int64()),
            ("stored_hash", pa.string()),
            ("details", pa.string()),
        ]
    )


_MEND = "restore it from a copy, or build the dataset again: finished shards are reused"
