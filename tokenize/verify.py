"""Check a dataset against its manifest: every byte, every count.

Every file that the manifest reaches is read and hashed: shards, shard tables, lists of inputs,
digests of documents, the tokenizer's file and the index file of the shard format. A damaged shard
is reported with the task that wrote it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from ..console.errors import IntegrityError, UserError
from ..console.progress import Progress
from ..dataplane.datasets import fields, manifest, view
from ..dataplane.datasets.chunks import CHUNK_BYTES
from ..dataplane.datasets.dataset import Dataset
from ..dataplane.datasets.manifest import Manifest, Shard
from ..dataplane.datasets.open_shard import OpenShard
from ..dataplane.shards import shard_format
from ..dataplane.storage import storage
from ..dataplane.storage.verified import REBUILD, read_named
from . import executors
from .executors import ExecutorConfig
from .read_shard import Bytes, hash_of, read_contents, read_shard

REMOVE = "remove the damaged shards and run the build's command again: only their tasks are run"
RUN_AGAIN = "run the build's command again: it writes the tokenizer's file and index.json again"


@dataclass(frozen=True)
class Damage:
    """A damaged file of a dataset."""

    name: str
    what: str
    task: str = ""
    """Task that writes the shard again; empty for other files and for external datasets."""
    hint: str = REBUILD


@dataclass(frozen=True)
class ShardCheck:
    """Result of checking one shard of `size` bytes."""

    size: int
    damage: Damage | None = None


@dataclass(frozen=True)
class VerifyWorker:
    """Checks the shards of a dataset."""

    url: str
    checked: bool = False
    """True for a view whose dataset has been checked: its shards and their fields are not read
    again."""
    damaged: frozenset[str] = frozenset()
    """Files of that dataset that are damaged."""

    @cached_property
    def opened(self) -> Dataset:
        return Dataset(self.url)

    @property
    def manifest(self) -> Manifest:
        return self.opened.manifest

    def __call__(self, shard: Shard) -> Iterator[ShardCheck]:
        if self.checked:
            sound = (shard.stored_name or shard.name) not in self.damaged
            yield ShardCheck(shard.size, self._view_damage(shard, sound=sound))
            return
        try:
            what = self._problem(shard)
        except UserError as error:
            what = error.what
        name = self._place(shard.stored_name or shard.name)
        damage = Damage(name, what, shard.task, self._hint(shard)) if what else None
        yield ShardCheck(shard.size, damage)
        if (damage := self._view_damage(shard, sound=what is None)) is not None:
            yield ShardCheck(0, damage)
        if (damage := self._fields_damage(shard)) is not None:
            yield ShardCheck(0, damage)

    def _problem(self, shard: Shard) -> str | None:
        held = self.manifest

        def check(data: Bytes) -> Bytes:
            if len(data) != shard.size:
                raise IntegrityError(f"it has {len(data):,} bytes instead of {shard.size:,}")
            chunks, digest = hash_of(data)
            if digest != shard.hash:
                numbers = range(len(chunks) // 32)
                bad = [k for k in numbers if _chunk(chunks, k) != _chunk(shard.chunks, k)]
                places = ", ".join(f"{k * CHUNK_BYTES:,}" for k in bad[:5])
                raise IntegrityError(
                    f"its bytes differ from those that were written (in the chunks from {places})"
                )
            return data

        data = read_shard(self.opened.shards_url, shard, check)
        contents = read_contents(data, held.format, held.dtype, shard.details)
        whole = shard.details.get(view.KEY, vars(shard))
        if (contents.documents, contents.tokens) != (whole["documents"], whole["tokens"]):
            return (
                f"it has {contents.documents:,} documents and {contents.tokens:,} tokens; the "
                f"manifest says {whole['documents']:,} and {whole['tokens']:,}"
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

    def _place(self, name: str) -> str:
        """Return a file of a shard as a person finds it: with the URL of its dataset, if that is
        another one."""
        return name if self.opened.view is None else storage.join(self.opened.shards_url, name)

    def _hint(self, shard: Shard) -> str:
        """Return how a file of a shard is repaired."""
        if (of := self.opened.view) is not None:
            return f"`tokenize verify {of.url}` says how to repair the dataset of the view"
        return REMOVE if shard.task else REBUILD

    def _view_damage(self, shard: Shard, *, sound: bool) -> Damage | None:
        """Return the damage of the file with a view's documents of a shard, or None.

        Its sums can be compared if the shard is sound.
        """
        if self.opened.view is None:
            return None
        try:
            chosen = view.selection_of(self.url, shard)
            if sound:  # opening compares the sums
                OpenShard(
                    0, self.opened.file(shard), shard, self.manifest, self.opened.padding, chosen
                )
        except UserError as error:
            return Damage(view.file_of(shard), error.what, hint=view.AGAIN)
        return None

    def _fields_damage(self, shard: Shard) -> Damage | None:
        """Return the damage of the file that holds the fields of a shard's documents, or None."""
        kept = self.manifest.kept_fields
        file = fields.file_of(shard)
        if file is None:
            what = "it has no file of fields; the manifest names some" if kept else None
            return Damage(self._place(shard.name), what, shard.task) if what else None
        try:
            documents = shard.details.get(view.KEY, vars(shard))["documents"]
            reader = fields.FieldsReader(self.opened.shards_url, file)
            table = reader.rows(0, documents)
            what = None
            if table.column_names != list(kept):
                what = f"it has the fields {', '.join(table.column_names)}, not {', '.join(kept)}"
        except UserError as error:
            what = error.what
        return Damage(self._place(file.name), what, shard.task, self._hint(shard)) if what else None


def verify(url: str, engine: ExecutorConfig | None = None, *, deep: bool = False) -> list[Damage]:
    """Return the damaged files of a dataset; `deep`: also those of the dataset that a view is of,
    which the view may not use."""
    held = manifest.load(url)
    of = view.view_of(url, held)
    view.check_dataset(url, of)
    worker, below = VerifyWorker(url), list[Damage]()
    if deep and of is not None:
        below = verify(of.url, engine)
        worker = VerifyWorker(url, True, frozenset(item.name for item in below))
    damage = [found for name in held.files if (found := _file_damage(url, name, held))]
    damaged = {item.name for item in damage}
    shards: list[Shard] = []
    for number, generation in enumerate(held.generations):
        if generation.table in damaged:
            continue
        table = manifest.load_table(url, generation)
        shards += table
        sums = manifest.totals(table)
        if any(getattr(generation, name) != total for name, total in sums.items()):
            what = f"the totals of generation {number} do not match its shards"
            damage.append(Damage(generation.table, what))
    total = sum(shard.size for shard in shards)
    with Progress("verifying", total=total, unit="B") as progress:
        for checked in executors.run(engine or ExecutorConfig(), worker, shards):
            progress.advance(checked.size)
            if checked.damage:
                damage.append(checked.damage)
    format = shard_format(held.format)
    if format.index_name is not None and of is None and not damage:
        problem = _index_problem(url, held, shards)
        damage += [Damage(format.index_name, problem, hint=RUN_AGAIN)] if problem else []
    if of is not None:
        damage += [replace(item, name=storage.join(of.url, item.name)) for item in below]
    return sorted(damage, key=lambda item: item.name)


def _file_damage(url: str, name: str, held: Manifest) -> Damage | None:
    """Return the damage of a file that is named by its content, or None."""
    try:
        read_named(url, name)
    except UserError as error:
        hint = REBUILD
        if view.KEY in held.settings:
            hint = view.AGAIN
        elif name == held.tokenizer.spec.get("file") and not held.settings.get("indexed"):
            hint = RUN_AGAIN
        return Damage(name, error.what, hint=hint)
    return None


def _index_problem(url: str, held: Manifest, shards: list[Shard]) -> str | None:
    """Return what is wrong with the index file of the shard format, or None. The index of an
    external dataset is not of our making: only its readers can judge it."""
    format = shard_format(held.format)
    assert format.index_name is not None
    if storage.is_local(url) and (what := format.index_problem(storage.local_path(url), shards)):
        return what
    if "compression" not in held.settings:  # no build wrote the dataset
        return None
    made = format.index(
        shards,
        dtype=held.dtype,
        weighted=held.weights is not None,
        compression=held.settings["compression"],
    )
    if storage.read(storage.join(url, format.index_name)) != made:
        return "its bytes differ from those that the build writes"
    return None


def _chunk(chunks: bytes, number: int) -> bytes:
    return chunks[32 * number : 32 * number + 32]


def describe(url: str, damage: list[Damage]) -> str:
    lines = [f"{len(damage)} damaged files in {url}"]
    for item in damage:
        lines.append(f"  {item.name}: {item.what}" + (f" (task {item.task})" if item.task else ""))
    return "\n".join(lines)
