"""Check a dataset against its manifest: every byte, every count.

Damage is reported with the task that wrote the file: remove the file and run the build's command
again, and only that task is run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from ..console.errors import UserError
from ..console.progress import Progress
from ..dataplane.datasets import manifest
from ..dataplane.datasets.chunks import CHUNK_BYTES
from ..dataplane.datasets.manifest import Manifest, Shard
from ..dataplane.shards import shard_format
from ..dataplane.storage import storage
from . import executors
from .executors import ExecutorConfig
from .read_shard import hash_of, read_contents, read_shard


@dataclass(frozen=True)
class Damage:
    """A damaged file of a dataset."""

    name: str
    what: str
    task: str
    """Task that writes the file again; empty for an external dataset."""


@dataclass(frozen=True)
class ShardCheck:
    """Result of checking one shard of `size` bytes."""

    size: int
    damage: Damage | None = None


@dataclass(frozen=True)
class VerifyWorker:
    """Checks the shards of a dataset."""

    url: str

    @cached_property
    def manifest(self) -> Manifest:
        return manifest.load(self.url)

    def __call__(self, shard: Shard) -> Iterator[ShardCheck]:
        name = shard.stored_name or shard.name
        try:
            what = self._problem(shard)
        except UserError as error:
            what = error.what
        yield ShardCheck(shard.size, Damage(name, what, shard.task) if what else None)

    def _problem(self, shard: Shard) -> str | None:
        held = self.manifest
        if shard.stored_name is not None:
            stored = storage.read(storage.join(self.url, shard.stored_name))
            if hashlib.sha256(stored).hexdigest() != shard.stored_hash:
                return f"its bytes differ from those that were written ({len(stored):,} bytes)"
        data = read_shard(self.url, shard)
        if len(data) != shard.size:
            return f"it has {len(data):,} bytes instead of {shard.size:,}"
        chunks, digest = hash_of(data)
        if digest != shard.hash:
            bad = [
                k for k in range(len(chunks) // 32) if _chunk(chunks, k) != _chunk(shard.chunks, k)
            ]
            places = ", ".join(f"{k * CHUNK_BYTES:,}" for k in bad[:5])
            return f"its bytes differ from those that were written (in the chunks from {places})"
        contents = read_contents(data, held.format, held.dtype, shard.details)
        if (contents.documents, contents.tokens) != (shard.documents, shard.tokens):
            return (
                f"it has {contents.documents:,} documents and {contents.tokens:,} tokens; the "
                f"manifest says {shard.documents:,} and {shard.tokens:,}"
            )
        if contents.largest_id >= held.tokenizer.vocab_size:
            return (
                f"it has the id {contents.largest_id}, but the vocabulary has only "
                f"{held.tokenizer.vocab_size} ids"
            )
        end = held.tokenizer.end_of_document
        if end is not None and contents.ends - {end}:
            return f"a document ends with the id {min(contents.ends - {end})}, not with {end}"
        return None


def verify(url: str, engine: ExecutorConfig | None = None) -> list[Damage]:
    """Return the damaged files of a dataset."""
    held = manifest.load(url)
    shards = []
    for number, generation in enumerate(held.generations):
        table = manifest.load_table(url, generation)
        shards += table
        sums = manifest.totals(table)
        if any(getattr(generation, name) != total for name, total in sums.items()):
            return [
                Damage(
                    generation.table,
                    f"the totals of generation {number} do not match its shards",
                    "",
                )
            ]
    damage = []
    total = sum(shard.size for shard in shards)
    with Progress("verifying", total=total, unit="B") as progress:
        for checked in executors.run(engine or ExecutorConfig(), VerifyWorker(url), shards):
            progress.advance(checked.size)
            if checked.damage:
                damage.append(checked.damage)
    format = shard_format(held.format)
    if format.index_name is not None and not damage and storage.is_local(url):
        what = format.index_problem(storage.local_path(url), shards)
        damage += [Damage(format.index_name, what, "")] if what else []
    return sorted(damage, key=lambda item: item.name)


def _chunk(chunks: bytes, number: int) -> bytes:
    return chunks[32 * number : 32 * number + 32]


def describe(url: str, damage: list[Damage]) -> str:
    lines = [f"{len(damage)} damaged files in {url}"]
    for item in damage:
        lines.append(f"  {item.name}: {item.what}" + (f" (task {item.task})" if item.task else ""))
    return "\n".join(lines)
