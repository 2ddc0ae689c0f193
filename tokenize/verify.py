"""Check a dataset against its manifest: every byte, every count.

Every file that the manifest reaches is read and hashed: shards, shard tables, input lists, document
digests, the tokenizer's file and the shard format's index file. A damaged shard is reported with
the task that wrote it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from ..console.errors import IntegrityError, UserError
from ..console.progress import Progress, exact_count
from ..dataplane.datasets import fields, view
from ..dataplane.datasets import manifest as manifests
from ..dataplane.datasets.chunks import CHUNK_BYTES
from ..dataplane.datasets.dataset import Dataset
from ..dataplane.datasets.manifest import Manifest, Shard
from ..dataplane.datasets.open_shard import OpenShard
from ..dataplane.shards import shard_format
from ..dataplane.storage import storage
from ..dataplane.storage.verified import REBUILD, read_named
from . import executors
from .executors import ExecutorConfig
from .read_shard import Bytes, hash_chunks, read_contents, read_shard

REMOVE = "remove the damaged shards and run the build's command again: only their tasks are run"
RUN_AGAIN = "run the build's command again: it writes the tokenizer's file and index.json again"


@dataclass(frozen=True)
class Damage:
    """A damaged file in a dataset."""

    name: str
    what: str
    task: str = ""
    """Task that writes the shard again; empty for other files and for external datasets."""
    hint: str = REBUILD


@dataclass(frozen=True)
class ShardCheck:
    """Result of checking a shard with `size` bytes."""

    size: int
    damage: Damage | None = None


@dataclass(frozen=True)
class VerifyWorker:
    """Checks a dataset's shards."""

    url: str
    checked: bool = False
    """True for a view whose base has been checked: its shards and fields are not read again."""
    damaged: frozenset[str] = frozenset()
    """Damaged files in the view's base."""

    @cached_property
    def dataset(self) -> Dataset:
        return Dataset(self.url)

    @property
    def manifest(self) -> Manifest:
        return self.dataset.manifest

    def __call__(self, shard: Shard) -> Iterator[ShardCheck]:
        if self.checked:
            sound = (shard.stored_name or shard.name) not in self.damaged
            yield ShardCheck(shard.size, self._view_damage(shard, sound=sound))
            return
        try:
            problem = self._find_problem(shard)
        except UserError as error:
            problem = error.message
        name = self._place(shard.stored_name or shard.name)
        damage = Damage(name, problem, shard.task, self._hint(shard)) if problem else None
        yield ShardCheck(shard.size, damage)
        if (damage := self._view_damage(shard, sound=problem is None)) is not None:
            yield ShardCheck(0, damage)
        if (damage := self._fields_damage(shard)) is not None:
            yield ShardCheck(0, damage)

    def _find_problem(self, shard: Shard) -> str | None:
        manifest = self.manifest

        def check(data: Bytes) -> Bytes:
            if len(data) != shard.size:
                raise IntegrityError(f"it has {len(data):,} bytes instead of {shard.size:,}")
            chunks, digest = hash_chunks(data)
            if digest != shard.hash:
                numbers = range(len(chunks) // 32)
                damaged_chunks = [
                    k for k in numbers if _chunk_digest(chunks, k) != _chunk_digest(shard.chunks, k)
                ]
                places = ", ".join(f"{k * CHUNK_BYTES:,}" for k in damaged_chunks[:5])
                raise IntegrityError(
                    f"its bytes differ from those that were written (in the chunks from {places})"
                )
            return data

        data = read_shard(self.dataset.shards_url, shard, check)
        contents = read_contents(data, manifest.format, manifest.dtype, shard.details)
        totals = shard.details.get(view.KEY, vars(shard))
        if (contents.documents, contents.tokens) != (totals["documents"], totals["tokens"]):
            return (
                f"it has {exact_count(contents.documents, 'documents')} and "
                f"{contents.tokens:,} tokens; the "
                f"manifest says {totals['documents']:,} and {totals['tokens']:,}"
            )
        if contents.largest_id >= manifest.tokenizer.vocab_size:
            return (
                f"it has the id {contents.largest_id}, but the vocabulary has only "
                f"{manifest.tokenizer.vocab_size} ids"
            )
        end = manifest.tokenizer.end_of_document
        if end is not None and contents.ends - {end}:
            return f"a document ends with the id {min(contents.ends - {end})}, not with {end}"
        return None

    def _place(self, name: str) -> str:
        """Return a shard's file as a person finds it: for a view, with the base's URL."""
        return name if self.dataset.view is None else storage.join(self.dataset.shards_url, name)

    def _hint(self, shard: Shard) -> str:
        """Return the hint for repairing a shard's file."""
        if (base_view := self.dataset.view) is not None:
            return f"`tokenize verify {base_view.url}` says how to repair the dataset of the view"
        return REMOVE if shard.task else REBUILD

    def _view_damage(self, shard: Shard, *, sound: bool) -> Damage | None:
        """Check the file that says which of a shard's documents a view has; return its damage.

        Its totals can be compared only if the shard is sound.
        """
        if self.dataset.view is None:
            return None
        try:
            selection = view.read_selection(self.url, shard)
            if sound:  # opening compares the sums
                OpenShard(
                    0,
                    self.dataset.file(shard),
                    shard,
                    self.manifest,
                    self.dataset.padding,
                    selection,
                )
        except UserError as error:
            return Damage(view.selection_file(shard), error.message, hint=view.REMAKE_HINT)
        return None

    def _fields_damage(self, shard: Shard) -> Damage | None:
        """Check the file with a shard's kept fields; return its damage."""
        kept_fields = self.manifest.kept_fields
        file = fields.fields_file(shard)
        if file is None:
            problem = "it has no file of fields; the manifest names some" if kept_fields else None
            return Damage(self._place(shard.name), problem, shard.task) if problem else None
        try:
            documents = shard.details.get(view.KEY, vars(shard))["documents"]
            reader = fields.FieldsReader(self.dataset.shards_url, file)
            table = reader.rows(0, documents)
            problem = None
            if table.column_names != list(kept_fields):
                names = ", ".join(table.column_names)
                problem = f"it has the fields {names}, not {', '.join(kept_fields)}"
        except UserError as error:
            problem = error.message
        if problem is None:
            return None
        return Damage(self._place(file.name), problem, shard.task, self._hint(shard))


def verify(url: str, engine: ExecutorConfig | None = None, *, deep: bool = False) -> list[Damage]:
    """Return a dataset's damaged files; with `deep`, also a view's base files, even if the view
    does not use them."""
    manifest = manifests.load(url)
    base_view = view.parse_view(url, manifest)
    view.check_dataset(url, base_view)
    worker, base_damage = VerifyWorker(url), list[Damage]()
    if deep and base_view is not None:
        base_damage = verify(base_view.url, engine)
        worker = VerifyWorker(url, True, frozenset(item.name for item in base_damage))
    damage = [item for name in manifest.files if (item := _file_damage(url, name, manifest))]
    damaged = {item.name for item in damage}
    shards: list[Shard] = []
    for number, generation in enumerate(manifest.generations):
        if generation.table in damaged:
            continue
        table = manifests.load_table(url, generation)
        shards += table
        totals = manifests.totals(table)
        if any(getattr(generation, name) != total for name, total in totals.items()):
            message = f"the totals of generation {number} do not match its shards"
            damage.append(Damage(generation.table, message))
    total = sum(shard.size for shard in shards)
    with Progress("verifying", total=total, unit="B") as progress:
        for check in executors.run(engine or ExecutorConfig(), worker, shards):
            progress.advance(check.size)
            if check.damage:
                damage.append(check.damage)
    format = shard_format(manifest.format)
    if format.index_name is not None and base_view is None and not damage:
        problem = _index_problem(url, manifest, shards)
        damage += [Damage(format.index_name, problem, hint=RUN_AGAIN)] if problem else []
    if base_view is not None:
        damage += [
            replace(item, name=storage.join(base_view.url, item.name)) for item in base_damage
        ]
    return sorted(damage, key=lambda item: item.name)


def _file_damage(url: str, name: str, manifest: Manifest) -> Damage | None:
    """Check a file named by its content; return its damage."""
    try:
        read_named(url, name)
    except UserError as error:
        hint = REBUILD
        if view.KEY in manifest.settings:
            hint = view.REMAKE_HINT
        elif name == manifest.tokenizer.spec.get("file") and not manifest.settings.get("indexed"):
            hint = RUN_AGAIN
        return Damage(name, error.message, hint=hint)
    return None


def _index_problem(url: str, manifest: Manifest, shards: list[Shard]) -> str | None:
    """Return the problem with the shard format's index file, or None. Other programs write an
    external dataset's index: only its readers can judge it."""
    format = shard_format(manifest.format)
    assert format.index_name is not None
    if storage.is_local(url) and (problem := format.index_problem(storage.local_path(url), shards)):
        return problem
    if "compression" not in manifest.settings:  # no build wrote the dataset
        return None
    expected = format.index(
        shards,
        dtype=manifest.dtype,
        weighted=manifest.weights is not None,
        compression=manifest.settings["compression"],
    )
    if storage.read(storage.join(url, format.index_name)) != expected:
        return "its bytes differ from those that the build writes"
    return None


def _chunk_digest(chunks: bytes, number: int) -> bytes:
    return chunks[32 * number : 32 * number + 32]


def describe(url: str, damage: list[Damage]) -> str:
    lines = [f"{len(damage)} damaged files in {url}"]
    for item in damage:
        lines.append(f"  {item.name}: {item.what}" + (f" (task {item.task})" if item.task else ""))
    return "\n".join(lines)
