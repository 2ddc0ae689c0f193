"""Commit a build: append a generation with the finished shards to every dataset.

The shards exist already. Next come the shard table and the files to which the manifest refers; then
the manifest, which makes the generation visible. Last, formats with an index file for other readers
(index.json of MDS) get it from the manifest, and a damaged tokenizer file is written again.
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
from ...dataplane.tokenizers import Tokenizer, tokenizer_module
from ..corpus.genome import UNTAGGED_COUNT
from ..corpus.read_stats import BAD
from ..corpus.screen import DROPPED
from ..files.input_file import File
from .settings import BuildJob, dataset_url
from .task_state import TaskState

log = get_logger(__name__)

EMPTY = ("duplicates", "empty documents", "files without documents")
"""Counts that explain an empty dataset, besides bad and dropped documents."""


@dataclass(frozen=True)
class BuildResult:
    """A build's finished tasks."""

    read: Sequence[TaskState]
    """Tasks that read the corpus: their counts go into the manifest."""
    written: Sequence[TaskState]
    """Tasks that wrote the shards."""
    digests: Sequence[bytes]
    """Document digests that deduplication kept."""


def commit(
    job: BuildJob,
    tokenizer: Tokenizer,
    files: Sequence[File],
    result: BuildResult,
    manifests: dict[str, Manifest],
) -> dict[str, Manifest]:
    """Append a generation to every dataset, in reverse order of `job.outputs`; return manifests by
    output."""
    assert all(state.done for state in [*result.read, *result.written])
    counts: Counter[str] = sum((state.stats.counts for state in result.read), Counter())
    problems = [line for state in result.read for line in state.stats.problems]
    for line in problems[:20]:
        log.warning("left out: %s", line)
    if (num_hidden := sum(state.stats.bad for state in result.read) - 20) > 0:
        log.warning("left out: %d more (`tokenize inspect` shows their count)", num_hidden)
    notes = [line for state in result.read for line in state.stats.notes]
    for line in notes[:5]:
        log.info("%s", line)
    if num_untagged := counts[UNTAGGED_COUNT]:
        log.warning(
            "%s: %d; the ids of their sequences are not in the file of --lineages",
            UNTAGGED_COUNT,
            num_untagged,
        )
    shards = {
        name: [
            shard
            for state in result.written
            if name in state.outputs
            for shard in state.outputs[name].shards
        ]
        for name in job.outputs
    }
    for name in job.outputs:
        if not shards[name] and not manifests[name].generations:
            raise _no_documents_error(dataset_url(job.url, name), counts, any(shards.values()))
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
            provenance["evaluations"] = [asdict(summary) for summary in job.evaluations.read]
        if job.dedup:
            provenance["digests"] = [
                write_named(url, "tables", "digests", data) for data in result.digests
            ]
        results[name] = _append(job, name, tokenizer, manifests[name], shards[name], provenance)
    return results


def _no_documents_error(url: str, counts: Counter[str], other_splits: bool) -> InputError:
    """Return the error for a dataset without documents, with counts of documents read.
    `other_splits`: other splits of the build have documents."""
    drop_counts = {
        name: count
        for name, count in sorted(counts.items())
        if name.startswith((BAD, DROPPED)) or name in EMPTY
    }
    if other_splits:
        hint = "choose other fractions of the splits, or name more inputs"
    elif drop_counts:
        hint = "correct what leaves the documents out, or name other inputs"
    else:
        hint = "check that the inputs have documents"
    counts_shown = {"documents read": counts["documents read"], **drop_counts}
    count_list = "; ".join(f"{name}: {count:,}" for name, count in counts_shown.items())
    return InputError(f"no documents for {url} ({count_list})", hint=hint)


def write_derived_files(job: BuildJob, manifests: Mapping[str, Manifest]) -> None:
    """Write missing or damaged files that a build can always derive: the tokenizer's, and the index
    file that some shard formats have for other readers."""
    format = shard_format(job.format)
    for name, dataset_manifest in manifests.items():
        url = dataset_url(job.url, name)
        for file, data in job.tokenizer_files.items():
            _write_if_different(storage.join(url, file), data)
        if format.index_name is None:
            continue
        shards = [
            shard
            for generation in dataset_manifest.generations
            for shard in manifest.load_table(url, generation)
        ]
        data = format.index(
            shards,
            dtype=dataset_manifest.dtype,
            weighted=dataset_manifest.weights is not None,
            compression=job.compression,
        )
        _write_if_different(storage.join(url, format.index_name), data)


def _write_if_different(url: str, data: bytes) -> None:
    if not storage.exists(url) or storage.read(url) != data:
        storage.write(url, data)


def _append(
    job: BuildJob,
    output: str,
    tokenizer: Tokenizer,
    previous: Manifest,
    shards: Sequence[Shard],
    provenance: dict[str, Any],
) -> Manifest:
    url = dataset_url(job.url, output)
    inputs = provenance["inputs"]["hash"]
    if any(
        generation.provenance["inputs"]["hash"] == inputs for generation in previous.generations
    ):
        return previous  # committed already, before the build was killed
    appended = previous.append(manifest.write_generation(url, shards, provenance))
    for name, data in tokenizer.files.items():
        storage.write(storage.join(url, name), data)
    manifest.save(url, appended)
    return appended


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
    names = ["pyarrow", *tokenizer_module(job.tokenizer.kind).PACKAGES]
    if job.source.chat is not None:
        names.append("jinja2")
    return {"headrace": __version__, **{name: version(name) for name in names}}
