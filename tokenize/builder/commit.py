"""Commit a build: append a generation with the finished shards to each dataset.

The shards exist already. The shard table and the files that the manifest refers to are written
next; the manifest is written after them and makes the generation visible. Last, formats that have
an index file for other readers (index.json of MDS) get it, made from the manifest, and a damaged
file of the tokenizer is written again.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

from ... import __version__
from ...console.errors import InputError
from ...console.log import get_logger
from ...dataplane.datasets import manifest
from ...dataplane.datasets.manifest import Manifest, Shard
from ...dataplane.shards import shard_format
from ...dataplane.storage import storage
from ...dataplane.storage.verified import write_named
from ...dataplane.tokenizers import Tokenizer, module_of
from ..corpus.read_stats import BAD
from ..corpus.screen import DROPPED
from ..files.input_file import File
from .settings import BuildJob, dataset_url
from .task_state import TaskState

log = get_logger(__name__)

EMPTY = ("duplicates", "empty documents", "files without documents")
"""Counts of inputs that give a dataset no document, besides bad and dropped documents."""


@dataclass(frozen=True)
class BuildResult:
    """States of the finished tasks of a build."""

    read: Sequence[TaskState]
    """States of the tasks that read the corpus: their counts go into the manifest."""
    written: Sequence[TaskState]
    """States of the tasks that wrote the shards."""
    digests: Sequence[bytes]
    """Digests of the documents that deduplication kept."""


def commit(
    job: BuildJob,
    tokenizer: Tokenizer,
    files: Sequence[File],
    made: BuildResult,
    before: dict[str, Manifest],
) -> dict[str, Manifest]:
    """Append a generation to each dataset, in reverse order of `job.outputs`; return the manifests
    by name."""
    assert all(state.done for state in [*made.read, *made.written])
    counts: Counter[str] = sum((state.stats.counts for state in made.read), Counter())
    problems = [line for state in made.read for line in state.stats.problems]
    for line in problems[:20]:
        log.warning("left out: %s", line)
    if (more := sum(state.stats.bad for state in made.read) - 20) > 0:
        log.warning("left out: %d more (`tokenize inspect` shows their count)", more)
    notes = [line for state in made.read for line in state.stats.notes]
    for line in notes[:5]:
        log.info("%s", line)
    shards = {
        name: [
            shard
            for state in made.written
            if name in state.outputs
            for shard in state.outputs[name].shards
        ]
        for name in job.outputs
    }
    for name in job.outputs:
        if not shards[name] and not before[name].generations:
            raise _no_documents(dataset_url(job.url, name), counts, any(shards.values()))
    results = {}
    for name in reversed(job.outputs):
        url = dataset_url(job.url, name)
        provenance: dict[str, Any] = {
            "inputs": _save_inputs(url, files),
            "counts": dict(sorted(counts.items())),
            "problems": problems[:100],
            "notes": notes[:100],
            "versions": _versions(job),
        }
        if job.evaluations is not None:
            provenance["evaluations"] = [asdict(each) for each in job.evaluations.read]
        if job.dedup:
            provenance["digests"] = [
                write_named(url, "tables", "digests", data) for data in made.digests
            ]
        results[name] = _append(job, name, tokenizer, before[name], shards[name], provenance)
    return results


def _no_documents(url: str, counts: Counter[str], others: bool) -> InputError:
    """Return the error of a dataset without documents, with the counts of those that were read;
    `others` says whether other splits of the build have documents."""
    without = {
        name: count
        for name, count in sorted(counts.items())
        if name.startswith((BAD, DROPPED)) or name in EMPTY
    }
    if others:
        hint = "choose other fractions of the splits, or name more inputs"
    elif without:
        hint = "correct what leaves the documents out, or name other inputs"
    else:
        hint = "check that the inputs have documents"
    shown = {"documents read": counts["documents read"], **without}
    listed = "; ".join(f"{name}: {count:,}" for name, count in shown.items())
    return InputError(f"no documents for {url} ({listed})", hint=hint)


def write_derived_files(job: BuildJob, manifests: Mapping[str, Manifest]) -> None:
    """Write the files that a build can always write again, where they are missing or damaged: the
    tokenizer's, and the index file that the shard format has for other readers."""
    format = shard_format(job.format)
    for name, held in manifests.items():
        url = dataset_url(job.url, name)
        for file, data in job.tokenizer_files.items():
            _write_if_different(storage.join(url, file), data)
        if format.index_name is None:
            continue
        shards = [
            shard
            for generation in held.generations
            for shard in manifest.load_table(url, generation)
        ]
        data = format.index(
            shards,
            dtype=held.dtype,
            weighted=held.weights is not None,
            compression=job.compression,
        )
        _write_if_different(storage.join(url, format.index_name), data)


def _write_if_different(where: str, data: bytes) -> None:
    if not storage.exists(where) or storage.read(where) != data:
        storage.write(where, data)


def _append(
    job: BuildJob,
    output: str,
    tokenizer: Tokenizer,
    old: Manifest,
    shards: Sequence[Shard],
    provenance: dict[str, Any],
) -> Manifest:
    url = dataset_url(job.url, output)
    inputs = provenance["inputs"]["hash"]
    if any(made.provenance["inputs"]["hash"] == inputs for made in old.generations):
        return old  # committed already, before the build was killed
    new = old.append(manifest.write_generation(url, shards, provenance))
    for name, data in tokenizer.files.items():
        storage.write(storage.join(url, name), data)
    manifest.save(url, new)
    return new


def _save_inputs(url: str, files: Sequence[File]) -> dict[str, Any]:
    data = json.dumps([[file.name, file.size, file.fingerprint] for file in files]).encode()
    digest = hashlib.sha256(data).hexdigest()
    return {
        "name": write_named(url, "tables", "inputs", data),
        "hash": digest,
        "files": len(files),
        "bytes": sum(file.size for file in files),
        "compressed": sum(file.size for file in files if file.compression),
    }


def _versions(job: BuildJob) -> dict[str, str]:
    names = ["pyarrow", *module_of(job.tokenizer.kind).PACKAGES]
    if job.source.chat is not None:
        names.append("jinja2")
    return {"headrace": __version__, **{name: version(name) for name in names}}
