"""What builds leave behind, finished or killed: their own notes, half-written files, lost shards.

Every build ends by clearing it, also one that finds nothing to do: the build before it may have
been killed when all that it had left to do was this. And this may be killed as well: what says
that something is there goes before what it says.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Mapping

from ...dataplane.datasets import manifest
from ...dataplane.datasets.manifest import Manifest
from ...dataplane.storage import storage
from ...dataplane.storage.atomic import HALF_WRITTEN
from .settings import CLAIMS, DIGESTS, DROPS, SPILLS, TASKS, BuildJob, dataset_url, work_url

FOLDERS = ("", "shards", "tables", "tokenizers")
"""Of a dataset."""
NAMED_BY_CONTENT = re.compile(r"(shards|tables|tokenizers)/[0-9a-f]{32}\.\w+(\.zstd)?")


def clear(job: BuildJob, held: Mapping[str, Manifest]) -> None:
    """Leave nothing but the datasets, and the claim of the build that does this."""
    datasets = {dataset_url(job.url, name): found for name, found in held.items()}
    for notes in (TASKS, DIGESTS, DROPS, SPILLS):  # records first
        for url in {job.url, *datasets}:
            _remove(work_url(url, notes))
    for url, found in datasets.items():
        _sweep(url, found, job)
        with contextlib.suppress(OSError):  # the claim is in it, or it is not there
            if storage.is_local(url):
                storage.local_path(work_url(url)).rmdir()
    for name in storage.list_files(work_url(job.url, CLAIMS)):
        if HALF_WRITTEN.fullmatch(name):
            storage.delete(work_url(job.url, CLAIMS, name))


def _remove(folder: str) -> None:
    for name in storage.list_files(folder):
        storage.delete(storage.join(folder, name))
    if storage.is_local(folder):
        shutil.rmtree(storage.local_path(folder), ignore_errors=True)


def _sweep(url: str, held: Manifest, job: BuildJob) -> None:
    """Remove half-written files, and what is of no generation."""
    named = set(job.tokenizer_files)
    for generation in held.generations:
        made = generation.provenance
        named |= {generation.table, made["inputs"]["name"], *made.get("digests", ())}
        for shard in manifest.load_table(url, generation):
            named |= {shard.name, shard.stored_name or shard.name}
    for name in storage.list_files(url):
        folder, _, base = name.rpartition("/")
        orphan = NAMED_BY_CONTENT.fullmatch(name) and name not in named
        if orphan or (folder in FOLDERS and HALF_WRITTEN.fullmatch(base)):
            storage.delete(storage.join(url, name))
