"""What builds leave behind, finished or killed: their own notes, half-written files, lost shards.

Every build ends by clearing it, also one that finds nothing to do: the build before it may have
been killed when all that it had left to do was this.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Mapping

from ..dataplane import manifest, storage
from ..dataplane.manifest import Manifest
from .job import CLAIMS, WORK, Job, dataset_url
from .records import TASKS

FOLDERS = ("", "shards", "tables", "tokenizers")
"""Of a dataset."""
SHARD = re.compile(r"[0-9a-f]{32}\.(arrow|mds|mds\.zstd)")
HALF_WRITTEN = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")


def clear(job: Job, held: Mapping[str, Manifest]) -> None:
    """Leave nothing but the datasets, and the claim of the build that does this."""
    datasets = {dataset_url(job.url, name): found for name, found in held.items()}
    for url, found in datasets.items():
        _sweep(url, found)
    for url in {job.url, *datasets}:
        _clear_work(storage.join(url, WORK))


def _sweep(url: str, held: Manifest) -> None:
    """Remove half-written files, and shards of no generation."""
    named = {
        name
        for generation in held.generations
        for shard in manifest.load_table(url, generation)
        for name in (shard.name, shard.stored_name)
    }
    for name in storage.list_files(url):
        folder, _, base = name.rpartition("/")
        orphan = folder == "shards" and SHARD.fullmatch(base) and name not in named
        if orphan or (folder in FOLDERS and HALF_WRITTEN.fullmatch(base)):
            storage.delete(storage.join(url, name))


def _clear_work(url: str) -> None:
    """Records go before what they say is there: a build killed on the way leaves none that lies."""
    names = storage.list_files(url)
    for name in sorted(names, key=lambda name: not name.startswith(f"{TASKS}/")):
        folder, _, base = name.rpartition("/")
        if folder != CLAIMS or HALF_WRITTEN.fullmatch(base):
            storage.delete(storage.join(url, name))
    if storage.is_local(url):
        for path in storage.local_path(url).glob("*"):
            if path.name != CLAIMS:
                shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):  # the claim is in it, or it is not there
            storage.local_path(url).rmdir()
