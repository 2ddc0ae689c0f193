"""Make a view: a dataset of documents of another one, shard by shard.

One task for each shard of the other dataset writes a small file, named by its content, that says
what the view has of the shard. The manifest is written last. Run again, lost and damaged files are
made again; after the other dataset has grown, the view grows by the new generations.
"""

from __future__ import annotations

import posixpath
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...console.errors import InputError, IntegrityError, MisuseError, StorageError
from ...console.log import get_logger
from ...console.progress import Progress
from ...dataplane.datasets import manifest as manifests
from ...dataplane.datasets import packing, view
from ...dataplane.datasets.dataset import Dataset
from ...dataplane.datasets.manifest import Manifest, Shard
from ...dataplane.storage import storage
from ...dataplane.storage.verified import lost_or_damaged, read_named, write_named
from .. import executors
from ..builder.lock import BuildLock
from ..builder.settings import LOCKS, work_url
from ..executors import ExecutorConfig

log = get_logger(__name__)


@dataclass(frozen=True)
class ShardTask:
    """A shard of the other dataset, by its number."""

    number: int
    size: int


@dataclass(frozen=True)
class MadeShard:
    """The part of a shard that a view has."""

    number: int
    shard: Shard | None
    """The shard of the view; None if it has no document."""
    counts: dict[str, int]
    size: int


@dataclass(frozen=True, kw_only=True)
class Making:
    """A view that is to be made."""

    verb: str
    """Names the work while it goes on."""
    dataset: Dataset
    out: str
    """The URL of the view."""
    entry: dict[str, Any]
    """How its documents are chosen and laid out, for the settings of its manifest."""
    weights: tuple[float, ...] | None
    """The loss-weight table of the view."""
    worker: Callable[[ShardTask], Iterator[MadeShard]]
    engine: ExecutorConfig
    provenance: Callable[[dict[str, int]], dict[str, Any]]
    """Returns the provenance of a generation, from the sums of its shards' counts."""
    nothing: Callable[[Counter[str]], InputError]
    """Returns the error of a view without documents, from the sums of all shards' counts."""


def make(making: Making) -> Manifest:
    """Make a view, or add new generations to it; return its manifest."""
    dataset, out = making.dataset, making.out
    if dataset.url == out:
        raise MisuseError(
            "a view cannot lie where its dataset lies", hint="choose another --out for the view"
        )
    storage.check_writable(out)
    with BuildLock(work_url(out, LOCKS)):
        held = _existing(making)
        before = len(held.generations)
        _restore(making, held)
        new = list(_made(making, range(before, len(dataset.generations))))
        if not before and not any(shards for _, shards, _ in new):
            _remove_unreferenced(out, held)
            raise making.nothing(sum((counts for _, _, counts in new), Counter[str]()))
        for number, shards, counts in new:
            made = dataset.generations[number]
            # A view of a view is one of the dataset that has the tokens: its totals are recorded.
            whole = made.provenance.get(view.KEY) or {
                "documents": made.documents,
                "tokens": made.tokens,
            }
            provenance = {**making.provenance(dict(counts)), view.KEY: whole | {"hash": made.hash}}
            held = held.append(manifests.write_generation(out, shards, provenance))
        if new:
            _copy_tokenizer(dataset.url, out, held)
            manifests.save(out, held)
        _remove_unreferenced(out, held)
    return held


def made_shard(
    dataset: Dataset,
    number: int,
    out: str,
    file: tuple[str, str, bytes],
    *,
    documents: int,
    tokens: int,
) -> Shard:
    """Return what a view has of a shard, and write the file that says so: the key of its name in
    `Shard.details`, the ending of the name, and the content."""
    shard = dataset.shards[number]
    selection = dataset.open_shard(number).selection
    entry = shard.details.get(view.KEY, vars(shard))
    key, ending, content = file
    details = {
        "first": int(dataset.shard_documents[number]) if selection is None else selection.first,
        "documents": entry["documents"],
        "tokens": entry["tokens"],
        key: write_named(out, view.FOLDER, ending, content),
    }
    details = {**shard.details, view.KEY: details}
    return replace(shard, documents=documents, tokens=tokens, task="", details=details)


def _existing(making: Making) -> Manifest:
    """Return the manifest that new generations are added to."""
    dataset, out = making.dataset, making.out
    kept = [{"name": name, "type": type} for name, type in dataset.manifest.kept_fields.items()]
    of = _from(out, dataset.view.url if dataset.view else dataset.url)
    settings = {view.KEY: {"of": of, **making.entry}, "source": {"keep": kept}}
    empty = replace(dataset.manifest, settings=settings, weights=making.weights, generations=())
    if not storage.exists(storage.join(out, manifests.NAME)):
        return empty
    old = manifests.load(out)
    known = [made.provenance.get(view.KEY, {}).get("hash") for made in old.generations]
    if replace(old, generations=()) != empty or known != [
        made.hash for made in dataset.generations[: len(known)]
    ]:
        raise _another(out, old)
    return old


def check_same(out: str, base: str, entry: dict[str, Any]) -> None:
    """Raise StorageError if there is another dataset where a view of `base` is to be made."""
    if not storage.exists(storage.join(out, manifests.NAME)):
        return
    old = manifests.load(out)
    if old.settings.get(view.KEY) != {"of": _from(out, base), **entry}:
        raise _another(out, old)


def _another(out: str, old: Manifest) -> StorageError:
    was = view.view_of(out, old)
    what = f"a view of {was.url} {was.text}" if was else "a dataset of another kind"
    if was and was.bins is not None:
        what += f" with --long {old.settings[view.KEY][packing.KEY]['long']}"
    return StorageError(
        f"there is another dataset at {out}: {what}",
        hint="remove it, or choose another --out",
    )


def _restore(making: Making, held: Manifest) -> None:
    """Make the generations of a view again that have lost or damaged files."""
    out = making.out
    damaged = lost_or_damaged(out, held.files)
    if damaged & {held.tokenizer.spec.get("file")}:
        _copy_tokenizer(making.dataset.url, out, held)
    again = [
        number
        for number, made in enumerate(held.generations)
        if made.table in damaged
        or lost_or_damaged(out, map(view.file_of, manifests.load_table(out, made)))
    ]
    for number, shards, _ in _made(making, again):
        table = manifests.write_generation(out, shards).table
        if table != held.generations[number].table:  # made by other versions of libraries
            raise IntegrityError(
                f"generation {number} of {out} has lost or damaged files, and this version of "
                "headrace makes others",
                hint="restore them from a copy, or remove the view and make it again; plans of "
                "it are then made again too",
            )
        log.warning("generation %d of %s had lost or damaged files: made again", number, out)


def _made(
    making: Making, numbers: Sequence[int]
) -> Iterator[tuple[int, list[Shard], Counter[str]]]:
    """Yield the shards of these generations, and the sums of their counts."""
    if not numbers:
        return
    dataset = making.dataset
    edges = np.cumsum([0, *(made.shards for made in dataset.generations)]).tolist()
    tasks = [
        ShardTask(n, dataset.shards[n].documents)
        for number in numbers
        for n in range(edges[number], edges[number + 1])
    ]
    found: dict[int, MadeShard] = {}
    with Progress(making.verb, total=sum(task.size for task in tasks), unit="") as progress:
        for made in executors.run(making.engine, making.worker, tasks):
            found[made.number] = made
            progress.advance(made.size)
    for number in numbers:
        parts = [found[n] for n in range(edges[number], edges[number + 1])]
        counts = sum((Counter(part.counts) for part in parts), Counter[str]())
        yield number, [part.shard for part in parts if part.shard is not None], counts


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
    """Remove the files and tables that a killed run left behind."""
    for folder in ("", "tokenizers"):
        storage.remove_half_written(storage.join(out, folder))
    names = set(held.files)
    for made in held.generations:
        names |= {view.file_of(shard) for shard in manifests.load_table(out, made)}
    for folder in (view.FOLDER, "tables"):
        for name in storage.list_files(storage.join(out, folder)):
            if f"{folder}/{name}" not in names:
                storage.delete(storage.join(out, folder, name))
