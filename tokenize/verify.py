"""Check a dataset against its manifest: every byte, every count.

What is damaged is named with the task that made it: remove the file, run the build's command
again, and that task alone is run.
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
from . import executors as engines
from .executors import EngineConfig
from .read_shard import contents, hash_of, read_shard


@dataclass(frozen=True)
class Damage:
    name: str
    what: str
    task: str
    """That makes it again; empty for a dataset that was not built here."""


@dataclass(frozen=True)
class Checked:
    size: int
    damage: Damage | None = None


@dataclass(frozen=True)
class VerifyTask:
    """Checks the shards of a dataset."""

    url: str

    @cached_property
    def manifest(self) -> Manifest:
        return manifest.load(self.url)

    def __call__(self, shard: Shard) -> Iterator[Checked]:
        name = shard.stored_name or shard.name
        try:
            what = self._wrong(shard)
        except UserError as error:
            what = error.what
        yield Checked(shard.size, Damage(name, what, shard.task) if what else None)

    def _wrong(self, shard: Shard) -> str | None:
        found = self.manifest
        if shard.stored_name is not None:
            stored = storage.read(storage.join(self.url, shard.stored_name))
            if hashlib.sha256(stored).hexdigest() != shard.stored_hash:
                return f"its bytes are not the ones that were written ({len(stored):,} bytes)"
        data = read_shard(self.url, shard)
        if len(data) != shard.size:
            return f"it has {len(data):,} bytes, and should have {shard.size:,}"
        chunks, digest = hash_of(data)
        if digest != shard.hash:
            bad = [
                k for k in range(len(chunks) // 32) if _chunk(chunks, k) != _chunk(shard.chunks, k)
            ]
            places = ", ".join(f"{k * CHUNK_BYTES:,}" for k in bad[:5])
            return f"its bytes are not the ones that were written (in the chunks from {places})"
        held = contents(data, found.format, found.dtype, shard.details)
        if (held.documents, held.tokens) != (shard.documents, shard.tokens):
            return (
                f"it holds {held.documents:,} documents of {held.tokens:,} tokens; the manifest "
                f"says {shard.documents:,} of {shard.tokens:,}"
            )
        if held.largest_id >= found.tokenizer.vocab_size:
            return f"it holds the id {held.largest_id}, and the vocabulary ends before it"
        end = found.tokenizer.end_of_document
        if end is not None and held.ends - {end}:
            return f"a document ends with {min(held.ends - {end})}, not with {end}"
        return None


def verify(url: str, engine: EngineConfig | None = None) -> list[Damage]:
    """What is damaged in a dataset; nothing, if it is whole."""
    found = manifest.load(url)
    shards = []
    for number, generation in enumerate(found.generations):
        table = manifest.load_table(url, generation)
        shards += table
        sums = manifest.totals(table)
        if any(getattr(generation, name) != total for name, total in sums.items()):
            return [Damage(generation.table, f"generation {number} does not add up", "")]
    damage = []
    total = sum(shard.size for shard in shards)
    with Progress("verifying", total=total, unit="B") as progress:
        for checked in engines.run(engine or EngineConfig(), VerifyTask(url), shards):
            progress.advance(checked.size)
            if checked.damage:
                damage.append(checked.damage)
    format = shard_format(found.format)
    if format.index_name is not None and not damage and storage.is_local(url):
        what = format.index_problem(storage.local_path(url), shards)
        damage += [Damage(format.index_name, what, "")] if what else []
    return sorted(damage, key=lambda one: one.name)


def _chunk(chunks: bytes, number: int) -> bytes:
    return chunks[32 * number : 32 * number + 32]


def describe(url: str, damage: list[Damage]) -> str:
    lines = [f"{len(damage)} of the files of {url} are damaged"]
    for one in damage:
        lines.append(f"  {one.name}: {one.what}" + (f" (task {one.task})" if one.task else ""))
    return "\n".join(lines)
