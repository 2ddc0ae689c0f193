"""The manifest: the description of a dataset, and the hashes that prove it complete.

    URL/
      manifest.json                 the head: tokenizer, settings, generations; written last
      tables/<hash>.arrow           one per generation: its shards with their hashes
      shards/<hash>.<format>        tokens

The head takes a few KB at any dataset size: making a plan reads totals only. Shard tables are read
when shards are opened. A dataset grows by whole generations, which are only appended. A
generation's hash chains its predecessor's, so the hash after g generations identifies exactly their
tokens, in every mirror.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ...console.errors import IntegrityError, StorageError
from ...console.explain import path_hint
from ..arrays import arrow_column
from ..storage import storage
from ..storage.faults import AbsentError
from ..storage.sealed import check_version
from ..storage.verified import REBUILD, read_checked, read_named, write_named

VERSION = 1
NAME = "manifest.json"
MAX_SEARCHED = 32
"""Folder entries searched for datasets where there is no manifest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerInfo:
    """A dataset's tokenizer; `spec` holds the arguments to restore it."""

    kind: str
    fingerprint: str
    """Hash of the ids' meaning, equal for all datasets in a mixture."""
    vocab_size: int
    end_of_document: int | None
    """The id that ends every document; None if an indexed dataset has none."""
    spec: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A file with a dataset's tokens."""

    name: str
    """Relative to the dataset's URL."""
    size: int
    """Uncompressed bytes."""
    documents: int
    tokens: int
    hash: str
    """sha256 over the size and the chunk digests."""
    chunks: bytes = field(repr=False)
    """sha256 digests (32 bytes) of the uncompressed chunks, in order."""
    task: str = ""
    """Id of the build task that wrote the file and can write it again."""
    stored_name: str | None = None
    """The compressed file, if the dataset is compressed; `hash` covers the decompressed content."""
    stored_size: int | None = None
    stored_hash: str | None = None
    details: dict[str, Any] = field(default_factory=dict)
    """Further data that the shard format needs, such as the index of a Megatron file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """A complete build, appended to the dataset."""

    documents: int
    tokens: int
    size: int
    """Bytes in all shards."""
    shards: int
    table: str
    """Name of the shard table, relative to the dataset's URL."""
    table_hash: str
    provenance: dict[str, Any] = field(default_factory=dict)
    """Inputs with sizes, counts of dropped documents, program versions."""
    hash: str = ""
    """Hash over the previous generation's hash and this generation's content."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    format: str
    """A name in dataplane.shards.FORMATS."""
    dtype: str
    """uint16 or uint32."""
    tokenizer: TokenizerInfo
    weights: tuple[float, ...] | None = None
    """The loss-weight table that the shards' weight codes index, if there is one."""
    settings: dict[str, Any] = field(default_factory=dict)
    generations: tuple[Generation, ...] = ()
    version: int = VERSION

    @property
    def token_type(self) -> np.dtype[Any]:
        """The numpy type of stored ids."""
        return _little_endian(self.dtype)

    @property
    def documents(self) -> int:
        return sum(generation.documents for generation in self.generations)

    @property
    def tokens(self) -> int:
        return sum(generation.tokens for generation in self.generations)

    @property
    def hash(self) -> str:
        return self.generations[-1].hash if self.generations else self._root()

    @property
    def files(self) -> list[str]:
        """Names of the files that the manifest refers to, except shards. A name is a content
        hash."""
        names = [self.tokenizer.spec["file"]] if "file" in self.tokenizer.spec else []
        for generation in self.generations:
            provenance = generation.provenance
            names.append(generation.table)
            names += [provenance["inputs"]["name"]] if "inputs" in provenance else []
            names += provenance.get("digests", [])
        return names

    @property
    def kept_fields(self) -> dict[str, str]:
        """Types of the kept document fields, by name."""
        kept: list[dict[str, str]] = self.settings.get("source", {}).get("keep", [])
        return {field["name"]: field["type"] for field in kept}

    def append(self, generation: Generation) -> Manifest:
        """Return the manifest with one more generation, chained to its predecessors."""
        chained = _digest(self.hash, generation.table_hash, generation.tokens)
        return replace(self, generations=(*self.generations, replace(generation, hash=chained)))

    def _root(self) -> str:
        """Hash of what gives tokens their meaning, shared by all generations."""
        return _digest(self.format, self.dtype, self.tokenizer.fingerprint, self.weights)


def load(url: str) -> Manifest:
    """Read a dataset's manifest and verify its seal."""
    where = storage.join(url, NAME)
    try:
        return read_checked(where, lambda text: _parse(where, text))
    except AbsentError as error:
        relative = storage.is_local(url) and not storage.local_path(url).is_absolute()
        raise StorageError(
            f"no dataset at {url}: {error.message}",
            where=f"below {Path.cwd()}, where this command was run" if relative else None,
            hint=_hint_for_missing(url),
        ) from None


def list_splits(url: str) -> dict[str, str]:
    """Return the URLs of a build's splits by name, `train` first; without splits, the URL itself
    under an empty name."""
    unsplit = {"": url}
    if storage.exists(storage.join(url, NAME)):
        return unsplit
    splits = _datasets_below(url)
    if "train" not in splits:
        return unsplit
    return {"train": splits["train"], **splits}


def _datasets_below(url: str) -> dict[str, str]:
    """Return the URLs of datasets in a folder, by name."""
    candidates = {name: storage.join(url, name) for name in storage.names(url)[:MAX_SEARCHED]}
    return {
        name: dataset_url
        for name, dataset_url in candidates.items()
        if storage.exists(storage.join(dataset_url, NAME))
    }


def _parse(where: str, text: bytes) -> Manifest:
    """Parse a manifest file; raise if it is damaged."""
    try:
        data = json.loads(text)
        seal = data.pop("seal")
        check_version(
            where,
            data["version"],
            VERSION,
            hint="use the headrace that wrote it, or build the dataset again",
        )
        if seal != _digest(data):
            raise IntegrityError(f"{where} was changed after it was written", hint=REBUILD)
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
        raise IntegrityError(f"{where} is not a whole manifest: {error!r}", hint=REBUILD) from None
    chained = replace(manifest, generations=())
    for generation in manifest.generations:
        chained = chained.append(replace(generation, hash=""))
    if chained != manifest:
        raise IntegrityError(f"the generations of {where} do not chain", hint=REBUILD)
    return manifest


def _hint_for_missing(url: str) -> str:
    """Return a hint where there is no manifest: datasets below the URL, or the nearest path."""
    if datasets := _datasets_below(url):
        return f"the folder holds datasets (splits): {', '.join(datasets.values())}"
    otherwise = (
        "build one there with `tokenize build`, or index an existing one with `tokenize index`"
    )
    if storage.is_local(url) and not storage.local_path(url).exists():
        return path_hint(storage.local_path(url), otherwise)
    return otherwise


def save(url: str, manifest: Manifest) -> None:
    """Write the head atomically, which makes the manifest's generations part of the dataset."""
    data = asdict(manifest)
    data["weights"] = None if manifest.weights is None else list(manifest.weights)
    data["generations"] = [asdict(generation) for generation in manifest.generations]
    data = json.loads(json.dumps(data))
    text = json.dumps({**data, "seal": _digest(data)}, indent=1)
    storage.write(storage.join(url, NAME), text.encode())


def totals(shards: Sequence[Shard]) -> dict[str, Any]:
    """Return totals over a generation's shards."""
    return {
        "documents": sum(shard.documents for shard in shards),
        "tokens": sum(shard.tokens for shard in shards),
        "size": sum(shard.size for shard in shards),
        "shards": len(shards),
    }


def write_generation(
    url: str, shards: Sequence[Shard], provenance: dict[str, Any] | None = None
) -> Generation:
    """Write a generation's shard table; return the generation for the head."""
    import pyarrow as pa

    rows = [{**asdict(shard), "details": json.dumps(shard.details)} for shard in shards]
    schema = _table_schema()
    columns = [arrow_column([row[field.name] for row in rows], field.type) for field in schema]
    table = pa.Table.from_arrays(columns, schema=schema)
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    digest = hashlib.sha256(sink.getvalue()).hexdigest()
    name = write_named(url, "tables", "arrow", sink.getvalue())
    return Generation(**totals(shards), table=name, table_hash=digest, provenance=provenance or {})


def load_table(url: str, generation: Generation) -> list[Shard]:
    """Read a generation's shards, in order."""
    import pyarrow as pa

    data = read_named(url, generation.table)
    rows = pa.ipc.open_file(pa.BufferReader(data)).read_all().to_pylist()
    return [shard_from_row(row) for row in rows]


def shard_from_row(row: Mapping[str, Any]) -> Shard:
    """Decode a shard from its table row."""
    return Shard(**{**row, "details": json.loads(row["details"])})


def _digest(*values: Any) -> str:
    encoded = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(encoded.encode()).hexdigest()


@cache
def _little_endian(dtype: str) -> np.dtype[Any]:
    return np.dtype(dtype).newbyteorder("<")


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
