"""Make a view: a dataset of the documents of another one that an expression chooses.

One task for each shard evaluates the expression and writes a file of bits, named by its content.
The manifest is written last. Run again after the other dataset has grown, the view grows by the new
generations.
"""

from __future__ import annotations

import posixpath
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from ..console.errors import InputError, MisuseError, StorageError
from ..console.progress import Progress
from ..dataplane.datasets import manifest as manifests
from ..dataplane.datasets import view
from ..dataplane.datasets.dataset import Dataset
from ..dataplane.datasets.manifest import Manifest, Shard
from ..dataplane.storage import storage
from ..dataplane.storage.verified import read_named, write_named
from . import executors
from .build.lock import BuildLock
from .build.settings import LOCKS, work_url
from .executors import ExecutorConfig
from .where import Where, parse


@dataclass(frozen=True, kw_only=True)
class SelectConfig:
    dataset: str
    """The URL of the dataset; it may be a view."""
    where: str
    """The expression."""
    out: str
    """The URL of the view."""
    engine: ExecutorConfig = field(default_factory=ExecutorConfig)
    """Executor of the tasks."""


@dataclass(frozen=True)
class ShardTask:
    """A shard of the dataset, by its number."""

    number: int
    size: int


@dataclass(frozen=True)
class Chosen:
    """The documents that an expression chooses of a shard."""

    number: int
    shard: Shard | None
    """The shard of the view; None if it has no document."""
    nulls: dict[str, int]
    """Documents without a value, by the fields of the expression."""
    size: int


@dataclass(frozen=True)
class SelectWorker:
    """Evaluates an expression over the documents of a shard."""

    dataset: str
    out: str
    where: str

    @cached_property
    def opened(self) -> Dataset:
        return Dataset(self.dataset)

    @cached_property
    def parsed(self) -> Where:
        return parse(self.where, self.opened.manifest.kept_fields)

    def __call__(self, task: ShardTask) -> Iterator[Chosen]:
        dataset, number = self.opened, task.number
        shard = dataset.shards[number]
        first = int(dataset.shard_documents[number])
        names = sorted(self.parsed.names)
        table = dataset.columns(first, first + shard.documents, names)
        nulls = {name: table.column(name).null_count for name in names}
        chosen = holds(table, self.parsed)
        if not chosen.any():
            yield Chosen(number, None, nulls, task.size)
            return
        opened = dataset.open_shard(number)
        tokens = int(np.diff(opened.layout.document_starts)[chosen].sum())
        entry = shard.details.get(view.KEY)
        whole, whole_first, whole_documents = chosen, first, shard.documents
        if opened.selection is not None:  # a view of a view has the bits of the whole shard
            assert entry is not None
            whole_first, whole_documents = opened.selection.first, entry["documents"]
            whole = np.zeros(whole_documents, bool)
            whole[opened.selection.documents[chosen]] = True
        details = {
            "first": whole_first,
            "documents": whole_documents,
            "tokens": shard.tokens if entry is None else entry["tokens"],
            "bits": write_named(self.out, view.FOLDER, "bits", view.bits_of(whole)),
        }
        made = replace(
            shard,
            documents=int(chosen.sum()),
            tokens=tokens,
            task="",
            details={**shard.details, view.KEY: details},
        )
        yield Chosen(number, made, nulls, task.size)


def holds(table: Any, where: Where) -> Any:
    """Return for each row of a table whether an expression holds."""
    import pyarrow as pa
    from pyarrow.acero import Declaration, ProjectNodeOptions, TableSourceNodeOptions

    if not len(table):
        return np.zeros(0, bool)
    source = Declaration("table_source", TableSourceNodeOptions(table))
    options = ProjectNodeOptions([where.expression], ["holds"])
    made = Declaration.from_sequence([source, Declaration("project", options)])
    column = made.to_table(use_threads=False).column("holds")
    assert column.type == pa.bool_()
    return column.fill_null(False).to_numpy().astype(bool)


def select(config: SelectConfig) -> Manifest:
    """Make a view, or add new generations to it; return its manifest."""
    base, out = config.dataset.rstrip("/"), config.out.rstrip("/")
    dataset = Dataset(base)
    where = parse(config.where, dataset.manifest.kept_fields)
    if base == out:
        raise MisuseError(
            "a view cannot lie where its dataset lies", hint="choose another --out for the view"
        )
    storage.check_writable(out)
    with BuildLock(work_url(out, LOCKS)):
        held = _existing(base, out, dataset, where)
        before = len(held.generations)
        for number, shards, nulls in _made(config, dataset, where, before):
            made = dataset.generations[number]
            counts = {f"documents without {name}": n for name, n in sorted(nulls.items()) if n}
            chosen = {"hash": made.hash, "documents": made.documents, "tokens": made.tokens}
            provenance = {"counts": counts, view.KEY: chosen}
            held = held.append(manifests.write_generation(out, shards, provenance))
        if not held.documents:
            if not before:
                _remove_unreferenced(out, replace(held, generations=()))
            raise _empty(base, where, held)
        if len(held.generations) > before:
            _copy_tokenizer(base, out, held)
            manifests.save(out, held)
        _remove_unreferenced(out, held)
    return held


def _existing(base: str, out: str, dataset: Dataset, where: Where) -> Manifest:
    """Return the manifest that new generations are added to."""
    over, chosen = dataset.view, where.text
    of = _from(out, over.url if over else base)
    if over is not None:
        chosen = f"({over.where}) and ({where.text})"
    kept = [{"name": name, "type": type} for name, type in dataset.manifest.kept_fields.items()]
    settings = {view.KEY: {"of": of, "where": chosen}, "source": {"keep": kept}}
    empty = replace(dataset.manifest, settings=settings, generations=())
    if not storage.exists(storage.join(out, manifests.NAME)):
        return empty
    old = manifests.load(out)
    known = [made.provenance.get(view.KEY, {}).get("hash") for made in old.generations]
    if replace(old, generations=()) != empty or known != [
        made.hash for made in dataset.generations[: len(known)]
    ]:
        was = view.view_of(out, old)
        what = f"a view of {was.url} where {was.where}" if was else "a dataset of another kind"
        raise StorageError(
            f"there is another dataset at {out}: {what}", hint="choose another --out for the view"
        )
    return old


def _made(
    config: SelectConfig, dataset: Dataset, where: Where, before: int
) -> Iterator[tuple[int, list[Shard], Counter[str]]]:
    """Yield the shards of each new generation, and the documents without a value of each field."""
    edges = np.cumsum([0, *(made.shards for made in dataset.generations)]).tolist()
    tasks = [ShardTask(n, dataset.shards[n].documents) for n in range(edges[before], edges[-1])]
    found: dict[int, Chosen] = {}
    worker = SelectWorker(config.dataset.rstrip("/"), config.out.rstrip("/"), where.text)
    with Progress("selecting", total=sum(task.size for task in tasks), unit="") as progress:
        for chosen in executors.run(config.engine, worker, tasks):
            found[chosen.number] = chosen
            progress.advance(chosen.size)
    for number in range(before, len(dataset.generations)):
        parts = [found[n] for n in range(edges[number], edges[number + 1])]
        nulls = sum((Counter(part.nulls) for part in parts), Counter[str]())
        yield number, [part.shard for part in parts if part.shard is not None], nulls


def _empty(base: str, where: Where, held: Manifest) -> InputError:
    total = sum(made.provenance[view.KEY]["documents"] for made in held.generations)
    nulls: Counter[str] = sum(
        (Counter(made.provenance["counts"]) for made in held.generations), Counter[str]()
    )
    listed = "".join(f"; {name}: {count:,}" for name, count in sorted(nulls.items()))
    return InputError(
        f"no document of {base} is chosen: 0 of {total:,}{listed}",
        where=f"--where {where.text}",
        hint="look at the fields of some documents with `tokenize inspect URL --documents 10`",
    )


def _from(out: str, base: str) -> str:
    """Return the URL of a dataset as a view stores it: relative to the view between local folders,
    so that both can be moved together."""
    if not (storage.is_local(out) and storage.is_local(base)):
        return base if not storage.is_local(base) else str(storage.local_path(base).absolute())
    one, other = (storage.local_path(url).absolute().as_posix() for url in (base, out))
    return posixpath.relpath(one, other)


def _copy_tokenizer(base: str, out: str, held: Manifest) -> None:
    if (name := held.tokenizer.spec.get("file")) is not None:
        storage.write(storage.join(out, name), read_named(base, name))


def _remove_unreferenced(out: str, held: Manifest) -> None:
    """Remove the bits and tables that a killed run left behind."""
    names = set(held.files)
    for made in held.generations:
        for shard in manifests.load_table(out, made):
            names.add(shard.details[view.KEY]["bits"])
    for folder in (view.FOLDER, "tables"):
        for name in storage.list_files(storage.join(out, folder)):
            if f"{folder}/{name}" not in names:
                storage.delete(storage.join(out, folder, name))


def share_of(held: Manifest) -> str:
    """Return how much of its dataset a view has."""
    of = [made.provenance[view.KEY] for made in held.generations]
    documents, tokens = (sum(each[name] for each in of) for name in ("documents", "tokens"))
    share = held.tokens / max(1, tokens)
    return f"{held.documents:,} of {documents:,} documents, {held.tokens:,} tokens ({share:.1%})"
