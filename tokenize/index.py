"""Write a manifest for an external dataset, without moving or changing its files.

Every byte is read once: to hash it, and to count documents, tokens and ids. The manifest is written
into the dataset's folder; afterwards the dataset can be read, verified and mixed like any other.

If the user names the end-of-document id, every document is checked. Otherwise it is the tokenizer's
usual id, if every document ends with that; if not, the manifest has none, and a warning says how
documents end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ..console.errors import InputError, MisuseError, StorageError
from ..console.log import get_logger
from ..console.progress import Progress
from ..dataplane.datasets import manifest
from ..dataplane.datasets.manifest import Manifest, Shard, TokenizerInfo
from ..dataplane.shards import FORMATS, shard_format
from ..dataplane.storage import storage
from ..dataplane.storage.faults import add_location
from ..dataplane.tokenizers import Tokenizer, bpe
from ..dataplane.tokenizers.bpe import BpeConfig
from ..dataplane.tokenizers.byte import ByteConfig, ByteTokenizer
from . import executors
from .executors import ExecutorConfig
from .external import detect_format, list_shards
from .read_shard import ShardContents, hash_chunks, read_contents, read_shard

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class IndexConfig:
    url: str
    """Dataset folder."""
    format: str = "auto"
    """A name in dataplane.shards.FORMATS; auto: by the files in the folder."""
    column: str | None = None
    """The ids' column, in formats with columns (mds, arrow); None: `tokens`."""
    dtype: str | None = None
    """The ids' type, if the format does not define it (MDS byte columns)."""
    tokenizer: str | None = None
    """`byte` or a tokenizer.json, to decode the ids."""
    end_of_document: str | None = None
    """Token that ends every document, by its name in the tokenizer's JSON file."""
    end_id: int | Literal["none"] | None = None
    """Id that ends every document (no tokenizer is needed); `none`: documents have no end id."""
    engine: ExecutorConfig = field(default_factory=ExecutorConfig)

    def __post_init__(self) -> None:
        if self.format not in ("auto", *FORMATS):
            raise ValueError(f"format is `{self.format}`, not auto, {', '.join(FORMATS)}")
        if self.end_of_document is not None and self.tokenizer in (None, "byte"):
            raise ValueError("end_of_document needs a tokenizer's JSON file")
        if self.end_of_document is not None and self.end_id is not None:
            raise ValueError("end_of_document and end_id set the same value: give only one of them")
        if isinstance(self.end_id, int) and self.end_id < 0:
            raise ValueError(f"end_id is {self.end_id}; ids start at 0")

    @property
    def column_name(self) -> str:
        """Return the ids' column name."""
        return self.column or "tokens"


@dataclass(frozen=True)
class IndexedShard:
    """A shard with counts, and its number in the dataset."""

    number: int
    shard: Shard
    contents: ShardContents


@dataclass(frozen=True)
class IndexWorker:
    """Hashes and counts shards."""

    url: str
    format: str
    dtype: str
    end: int | None
    """Id that must end every document; None: do not check."""

    def __call__(self, item: tuple[int, Shard]) -> Iterator[IndexedShard]:
        number, shard = item
        data = read_shard(self.url, shard)
        chunks, digest = hash_chunks(data)
        with add_location(storage.join(self.url, shard.name)):
            contents = read_contents(data, self.format, self.dtype, shard.details)
        stored = shard.stored_name
        if self.end is not None and (wrong := contents.ends - {self.end}):
            raise InputError(
                f"a document of {shard.name} ends with the id {min(wrong)}, not with {self.end}",
                where=self.url,
                hint="give the id that ends all its documents, or --end-id none",
            )
        if stored is not None:
            stored_bytes = storage.read(storage.join(self.url, stored))
            shard = replace(shard, stored_hash=hashlib.sha256(stored_bytes).hexdigest())
        yield IndexedShard(
            number,
            replace(
                shard,
                size=len(data),
                documents=contents.documents,
                tokens=contents.tokens,
                hash=digest,
                chunks=chunks,
            ),
            contents,
        )


def index(config: IndexConfig) -> Manifest:
    """Write an external dataset's manifest, and return it."""
    url = config.url.rstrip("/")
    if storage.exists(storage.join(url, manifest.NAME)):
        raise StorageError(
            f"{url} already has a manifest",
            hint="`tokenize inspect` shows it; remove manifest.json to index the folder again",
        )
    format = detect_format(url) if config.format == "auto" else config.format
    for name in ("column", "dtype"):
        if getattr(config, name) is not None and name not in shard_format(format).index_options:
            formats = [
                format_name
                for format_name in FORMATS
                if name in shard_format(format_name).index_options
            ]
            raise MisuseError(
                f"--{name} is for {' and '.join(formats)}; {url} is {format}, which defines it",
                hint=f"leave --{name} out",
            )
    shards, dtype = list_shards(url, format, config.column_name, config.dtype)
    tokenizer = _tokenizer(config)
    named_end = _named_end(config, tokenizer)
    indexed = _index_shards(IndexWorker(url, format, dtype, named_end), shards, config)
    if tokenizer is not None:
        for name, data in tokenizer.files.items():
            storage.write(storage.join(url, name), data)
    result = Manifest(
        format=format,
        dtype=dtype,
        tokenizer=_tokenizer_info(config, tokenizer, named_end, indexed),
        settings={"indexed": True, "column": config.column_name},
    ).append(manifest.write_generation(url, [item.shard for item in indexed]))
    manifest.save(url, result)
    return result


def _index_shards(
    worker: IndexWorker, shards: Sequence[Shard], config: IndexConfig
) -> list[IndexedShard]:
    indexed = []
    total = sum(shard.stored_size or shard.size for shard in shards)
    with Progress("indexing", total=total, unit="B") as progress:
        for item in executors.run(config.engine, worker, list(enumerate(shards))):
            indexed.append(item)
            progress.advance(item.shard.stored_size or item.shard.size, tokens=item.shard.tokens)
    return sorted(indexed, key=lambda item: item.number)


def _tokenizer(config: IndexConfig) -> Tokenizer | None:
    if config.tokenizer is None:
        return None
    if config.tokenizer == "byte":
        return ByteTokenizer(ByteConfig())
    return bpe.load(config.tokenizer, BpeConfig(end_of_document=config.end_of_document))


def _named_end(config: IndexConfig, tokenizer: Tokenizer | None) -> int | None:
    """Return the end-of-document id that the user named, or None."""
    if config.end_of_document is not None:
        assert tokenizer is not None
        return tokenizer.info.end_of_document
    return config.end_id if isinstance(config.end_id, int) else None


def _tokenizer_info(
    config: IndexConfig,
    tokenizer: Tokenizer | None,
    named_end: int | None,
    indexed: Sequence[IndexedShard],
) -> TokenizerInfo:
    """Return the manifest's entry for the tokenizer and the end-of-document id."""
    max_id = max(item.contents.largest_id for item in indexed)
    if max_id < 0:
        raise InputError(f"{config.url} has no tokens")
    if tokenizer is not None and max_id >= tokenizer.info.vocab_size:
        raise InputError(
            f"the dataset has the id {max_id}, but {config.tokenizer} has only "
            f"{tokenizer.info.vocab_size} ids",
            hint="name the tokenizer that the dataset was built with",
        )
    info = TokenizerInfo(
        kind="unknown",
        fingerprint=hashlib.sha256(b"unknown").hexdigest(),
        vocab_size=max_id + 1,
        end_of_document=None,
    )
    if tokenizer is not None:
        info = tokenizer.info
    if named_end is not None or config.end_id == "none":
        return replace(info, end_of_document=named_end)
    ends = frozenset().union(*(item.contents.ends for item in indexed))
    if info.end_of_document is not None and ends == {info.end_of_document}:
        return info
    ending = f"all end with the id {min(ends)}" if len(ends) == 1 else "they end with different ids"
    log.warning(
        "the end-of-document id is unknown: %s. If an id ends the documents, pass --end-id ID; "
        "otherwise pass --end-id none",
        ending
        if info.end_of_document is None
        else f"{ending}, the tokenizer's end is {info.end_of_document}",
    )
    return replace(info, end_of_document=None)
