"""Make a view of a base dataset, shard by shard.

One task per base shard writes a small file, named by its content, that says which documents the
view has. The manifest is written last. A second run makes lost and damaged files again, and adds
the generations by which the base has grown.
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
from ...dataplane.storage.verified import find_damaged, read_named, write_named
from .. import executors
from ..builder.lock import BuildLock
from ..builder.settings import LOCKS, work_url
from ..executors import ExecutorConfig

log = get_logger(__name__)


@dataclass(frozen=True)
class ShardTask:
    """A base shard, by number; `size` counts documents."""

    number: int
    size: int


@dataclass(frozen=True)
class ShardResult:
    """A view's shard, made from one base shard."""

    number: int
    shard: Shard | None
    """None if the view has no document in the base shard."""
    counts: dict[str, int]
    size: int
    part: int = 0
    """The parts of a view follow one another, each with all base shards."""


@dataclass(frozen=True, kw_only=True)
class ViewRequest:
    """A view to make."""

    verb: str
    """Label for the progress line."""
    dataset: Dataset
    out: str
    """The URL of the view."""
    entry: dict[str, Any]
    """How documents are chosen and laid out, as the manifest's settings record it."""
    weights: tuple[float, ...] | None
    """The view's loss-weight table."""
    worker: Callable[[ShardTask], Iterator[ShardResult]]
    engine: ExecutorConfig
    provenance: Callable[[dict[str, int]], dict[str, Any]]
    """Returns a generation's provenance; takes the counts, summed over its shards."""
    no_documents: Callable[[Counter[str]], InputError]
    """Returns the error for a view without documents; takes the counts, summed over all shards."""


def make_view(request: ViewRequest) -> Manifest:
    """Make a view, or add new generations to it; return its manifest."""
    dataset, out = request.dataset, request.out
    if dataset.url == out:
        raise MisuseError(
            "a view cannot lie where its dataset lies", hint="choose another --out for the view"
        )
    storage.check_writable(out)
    with BuildLock(work_url(out, LOCKS)):
        manifest = _load_or_start(request)
        num_existing = len(manifest.generations)
        _restore(request, manifest)
        new_generations = list(
            _run_generations(request, range(num_existing, len(dataset.generations)))
        )
        if not num_existing and not any(shards for _, shards, _ in new_generations):
            _remove_unreferenced(out, manifest)
            raise request.no_documents(
                sum((counts for _, _, counts in new_generations), Counter[str]())
            )
        for number, shards, counts in new_generations:
            generation = dataset.generations[number]
            # The base of a view of a view is the dataset with the tokens: record its totals.
            base_totals = generation.provenance.get(view.KEY) or {
                "documents": generation.documents,
                "tokens": generation.tokens,
            }
            provenance = {
                **request.provenance(dict(counts)),
                view.KEY: base_totals | {"hash": generation.hash},
            }
            manifest = manifest.append(manifests.write_generation(out, shards, provenance))
        if new_generations:
            _copy_tokenizer(dataset.url, out, manifest)
            manifests.save(out, manifest)
        _remove_unreferenced(out, manifest)
    return manifest


def write_shard(
    dataset: Dataset,
    number: int,
    out: str,
    file: tuple[str, str, bytes],
    *,
    documents: int,
    tokens: int,
) -> Shard:
    """Write the file that says which documents a view has, and return the view's shard.

    `file` is the key of the file's name in `Shard.details`, the name's ending, and the content.
    """
    shard = dataset.shards[number]
    selection = dataset.open_shard(number).selection
    base_totals = shard.details.get(view.KEY, vars(shard))
    kind, ending, content = file
    details = {
        "first": int(dataset.shard_documents[number]) if selection is None else selection.first,
        "documents": base_totals["documents"],
        "tokens": base_totals["tokens"],
        kind: write_named(out, view.FOLDER, ending, content),
    }
    details = {**shard.details, view.KEY: details}
    return replace(shard, documents=documents, tokens=tokens, task="", details=details)


def _load_or_start(request: ViewRequest) -> Manifest:
    """Return the manifest to which new generations are added."""
    dataset, out = request.dataset, request.out
    kept = [{"name": name, "type": type} for name, type in dataset.manifest.kept_fields.items()]
    base_url = _relative_url(out, dataset.view.url if dataset.view else dataset.url)
    settings = {view.KEY: {"of": base_url, **request.entry}, "source": {"keep": kept}}
    new_manifest = replace(
        dataset.manifest, settings=settings, weights=request.weights, generations=()
    )
    if not storage.exists(storage.join(out, manifests.NAME)):
        return new_manifest
    manifest = manifests.load(out)
    view_hashes = [
        generation.provenance.get(view.KEY, {}).get("hash") for generation in manifest.generations
    ]
    base_hashes = [generation.hash for generation in dataset.generations[: len(view_hashes)]]
    if replace(manifest, generations=()) != new_manifest or view_hashes != base_hashes:
        raise _other_dataset_error(out, manifest)
    return manifest


def check_same(out: str, base: str, entry: dict[str, Any]) -> None:
    """Raise StorageError if `out` already holds anything but this view of `base`."""
    if not storage.exists(storage.join(out, manifests.NAME)):
        return
    manifest = manifests.load(out)
    if manifest.settings.get(view.KEY) != {"of": _relative_url(out, base), **entry}:
        raise _other_dataset_error(out, manifest)


def _other_dataset_error(out: str, manifest: Manifest) -> StorageError:
    existing = view.parse_view(out, manifest)
    description = (
        f"a view of {existing.url} {existing.text}" if existing else "a dataset of another kind"
    )
    if existing and existing.bins is not None:
        description += f" with --long {manifest.settings[view.KEY][packing.KEY]['long']}"
    return StorageError(
        f"there is another dataset at {out}: {description}",
        hint="remove it, or choose another --out",
    )


def _restore(request: ViewRequest, manifest: Manifest) -> None:
    """Make generations with lost or damaged files again."""
    out = request.out
    damaged = find_damaged(out, manifest.files)
    if damaged & {manifest.tokenizer.spec.get("file")}:
        _copy_tokenizer(request.dataset.url, out, manifest)
    damaged_generations = [
        number
        for number, generation in enumerate(manifest.generations)
        if generation.table in damaged
        or find_damaged(out, map(view.selection_file, manifests.load_table(out, generation)))
    ]
    for number, shards, _ in _run_generations(request, damaged_generations):
        table = manifests.write_generation(out, shards).table
        if table != manifest.generations[number].table:  # made by other versions of libraries
            raise IntegrityError(
                f"generation {number} of {out} has lost or damaged files, and this version of "
                "headrace makes others",
                hint="restore them from a copy, or remove the view and make it again; plans of "
                "it are then made again too",
            )
        log.warning("generation %d of %s had lost or damaged files: made again", number, out)


def _run_generations(
    request: ViewRequest, numbers: Sequence[int]
) -> Iterator[tuple[int, list[Shard], Counter[str]]]:
    """Run the tasks for these generations; yield (number, shards, summed counts)."""
    if not numbers:
        return
    dataset = request.dataset
    first_shards = np.cumsum([0, *(generation.shards for generation in dataset.generations)])
    shard_ranges = [range(*first_shards[number : number + 2]) for number in numbers]
    tasks = [
        ShardTask(n, dataset.shards[n].documents)
        for shard_range in shard_ranges
        for n in shard_range
    ]
    results: dict[int, list[ShardResult]] = {task.number: [] for task in tasks}
    with Progress(request.verb, total=sum(task.size for task in tasks), unit="") as progress:
        for result in executors.run(request.engine, request.worker, tasks):
            results[result.number].append(result)
            progress.advance(result.size)
    for number, shard_range in zip(numbers, shard_ranges, strict=True):
        parts = [result for n in shard_range for result in results[n]]
        parts.sort(key=lambda result: (result.part, result.number))
        shards = [result.shard for result in parts if result.shard is not None]
        yield (
            number,
            shards,
            sum((Counter(result.counts) for result in parts), Counter[str]()),
        )


def _relative_url(out: str, base: str) -> str:
    """Return the base's URL as a view stores it. Between local folders it is relative, so that both
    can be moved together."""
    if not (storage.is_local(out) and storage.is_local(base)):
        return base if not storage.is_local(base) else str(storage.local_path(base).absolute())
    base_path, view_path = (storage.local_path(url).absolute().as_posix() for url in (base, out))
    return posixpath.relpath(base_path, view_path)


def _copy_tokenizer(base: str, out: str, manifest: Manifest) -> None:
    if (name := manifest.tokenizer.spec.get("file")) is not None:
        storage.write(storage.join(out, name), read_named(base, name))


def _remove_unreferenced(out: str, manifest: Manifest) -> None:
    """Remove files and tables left behind by a killed run."""
    for folder in ("", "tokenizers"):
        storage.remove_half_written(storage.join(out, folder))
    referenced = set(manifest.files)
    for generation in manifest.generations:
        referenced |= {
            view.selection_file(shard) for shard in manifests.load_table(out, generation)
        }
    for folder in (view.FOLDER, "tables"):
        for name in storage.list_files(storage.join(out, folder)):
            if f"{folder}/{name}" not in referenced:
                storage.delete(storage.join(out, folder, name))
