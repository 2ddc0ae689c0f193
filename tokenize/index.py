"""A manifest for a dataset that others have written, which stays where it is and as it is.

Every byte is read once: to hash it, and to count documents, tokens and ids. The manifest goes into
the dataset's own folder; from then on it is read, checked and mixed like one that was built here.

What ends its documents is what a person says, and then each document is checked. What nobody says
is the tokenizer's usual end, if every document has it, and is otherwise not known; we tell which.
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
from ..dataplane.storage.faults import located
from ..dataplane.tokenizers import Tokenizer, bpe
from ..dataplane.tokenizers.bpe import BpeConfig
from ..dataplane.tokenizers.byte import ByteConfig, ByteTokenizer
from . import executors as engines
from .executors import EngineConfig
from .external import format_of, shards_of
from .read_shard import Contents, contents, hash_of, read_shard

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class IndexConfig:
    url: str
    """The folder of the dataset."""
    format: str = "auto"
    """A name in dataplane.shards.FORMATS; auto: by the files in the folder."""
    column: str | None = None
    """The column that holds the ids, in formats with columns (mds, arrow); None: `tokens`."""
    dtype: str | None = None
    """The type of the ids, where the format does not tell it (MDS columns of bytes)."""
    tokenizer: str | None = None
    """`byte` or a tokenizer.json, so that ids can be shown as text."""
    end_of_document: str | None = None
    """The token that ends every document, by its name in the tokenizer's JSON file."""
    end_id: int | Literal["none"] | None = None
    """The same by its id, for which no tokenizer is needed; `none`: documents have no end."""
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        if self.format not in ("auto", *FORMATS):
            raise ValueError(f"format is `{self.format}`, not auto, {', '.join(FORMATS)}")
        if self.end_of_document is not None and self.tokenizer in (None, "byte"):
            raise ValueError("end_of_document needs a tokenizer's JSON file")
        if self.end_of_document is not None and self.end_id is not None:
            raise ValueError("end_of_document and end_id say the same thing: give one of them")
        if isinstance(self.end_id, int) and self.end_id < 0:
            raise ValueError(f"end_id is {self.end_id}; ids begin at 0")

    @property
    def name(self) -> str:
        """Of the column."""
        return self.column or "tokens"


@dataclass(frozen=True)
class Found:
    """A shard, and what is in it."""

    number: int
    shard: Shard
    contents: Contents


@dataclass(frozen=True)
class IndexTask:
    url: str
    format: str
    dtype: str
    end: int | None
    """With which every document has to end, if a person says so."""

    def __call__(self, item: tuple[int, Shard]) -> Iterator[Found]:
        number, shard = item
        data = read_shard(self.url, shard)
        chunks, digest = hash_of(data)
        with located(storage.join(self.url, shard.name)):
            held = contents(data, self.format, self.dtype, shard.details)
        stored = shard.stored_name
        if self.end is not None and (others := held.ends - {self.end}):
            raise InputError(
                f"a document of {shard.name} ends with the id {min(others)}, not with {self.end}",
                where=self.url,
                hint="give the id that does end its documents, or --end-id none",
            )
        if stored is not None:
            packed = storage.read(storage.join(self.url, stored))
            shard = replace(shard, stored_hash=hashlib.sha256(packed).hexdigest())
        yield Found(
            number,
            replace(
                shard,
                size=len(data),
                documents=held.documents,
                tokens=held.tokens,
                hash=digest,
                chunks=chunks,
            ),
            held,
        )


def index(config: IndexConfig) -> Manifest:
    """Write the manifest of a dataset; returns it."""
    url = config.url.rstrip("/")
    if storage.exists(storage.join(url, manifest.NAME)):
        raise StorageError(
            f"{url} has a manifest already",
            hint="`tokenize inspect` shows it; remove manifest.json to index the folder again",
        )
    format = format_of(url) if config.format == "auto" else config.format
    for name in ("column", "dtype"):
        if getattr(config, name) is not None and name not in shard_format(format).index_options:
            formats = [known for known in FORMATS if name in shard_format(known).index_options]
            raise MisuseError(
                f"--{name} is for {' and '.join(formats)}, and {url} is {format}, which tells it",
                hint=f"leave --{name} out",
            )
    shards, dtype = shards_of(url, format, config.name, config.dtype)
    tokenizer = _tokenizer(config)
    said = _said_end(config, tokenizer)
    found = _read(IndexTask(url, format, dtype, said), shards, config)
    if tokenizer is not None:
        for name, data in tokenizer.files.items():
            storage.write(storage.join(url, name), data)
    made = Manifest(
        format=format,
        dtype=dtype,
        tokenizer=_info(config, tokenizer, said, found),
        settings={"indexed": True, "column": config.name},
    ).append(manifest.write_generation(url, [one.shard for one in found]))
    manifest.save(url, made)
    return made


def _read(task: IndexTask, shards: Sequence[Shard], config: IndexConfig) -> list[Found]:
    found = []
    total = sum(shard.stored_size or shard.size for shard in shards)
    with Progress("indexing", total=total, unit="B") as progress:
        for one in engines.run(config.engine, task, list(enumerate(shards))):
            found.append(one)
            progress.advance(one.shard.stored_size or one.shard.size, tokens=one.shard.tokens)
    return sorted(found, key=lambda one: one.number)


def _tokenizer(config: IndexConfig) -> Tokenizer | None:
    if config.tokenizer is None:
        return None
    if config.tokenizer == "byte":
        return ByteTokenizer(ByteConfig())
    return bpe.load(config.tokenizer, BpeConfig(end_of_document=config.end_of_document))


def _said_end(config: IndexConfig, tokenizer: Tokenizer | None) -> int | None:
    """The id with which documents end, if a person says so."""
    if config.end_of_document is not None:
        assert tokenizer is not None
        return tokenizer.info.end_of_document
    return config.end_id if isinstance(config.end_id, int) else None


def _info(
    config: IndexConfig, tokenizer: Tokenizer | None, said: int | None, found: Sequence[Found]
) -> TokenizerInfo:
    """What the manifest says of the tokenizer, and of the end of documents."""
    largest = max(one.contents.largest_id for one in found)
    if largest < 0:
        raise InputError(f"{config.url} holds no tokens")
    if tokenizer is not None and largest >= tokenizer.info.vocab_size:
        raise InputError(
            f"the dataset holds the id {largest}, and {config.tokenizer} has "
            f"{tokenizer.info.vocab_size} ids",
            hint="name the tokenizer that it was made with",
        )
    info = TokenizerInfo(
        kind="unknown",
        fingerprint=hashlib.sha256(b"unknown").hexdigest(),
        vocab_size=largest + 1,
        end_of_document=None,
    )
    if tokenizer is not None:
        info = tokenizer.info
    if said is not None or config.end_id == "none":
        return replace(info, end_of_document=said)
    ends = frozenset().union(*(one.contents.ends for one in found))
    if info.end_of_document is not None and ends == {info.end_of_document}:
        return info
    alike = f"all of them end with the id {min(ends)}" if len(ends) == 1 else "they end differently"
    log.warning(
        "whether documents have an end is not known: %s. If one id ends them say --end-id ID, if "
        "none does --end-id none",
        alike
        if info.end_of_document is None
        else f"{alike}, the tokenizer's is {info.end_of_document}",
    )
    return replace(info, end_of_document=None)
