"""Remove the garbage of builds: work files, half-written files, unreferenced shards.

Every build ends with this, even if it has nothing else to do: the previous build may have been
killed just before. This step may be killed too, so references to a file are removed before the
file.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Mapping

from ...dataplane.datasets import fields, manifest
from ...dataplane.datasets.manifest import Manifest
from ...dataplane.storage import storage
from ...dataplane.storage.atomic import HALF_WRITTEN
from ..files.standard_input import FOLDER as STDIN
from .settings import DIGESTS, DROPS, FOLDERS, SPILLS, TASKS, BuildJob, dataset_url, work_url

NAMED_BY_CONTENT = re.compile(r"(shards|fields|tables|tokenizers)/[0-9a-f]{32}\.\w+(\.zstd)?")


def remove_garbage(job: BuildJob, manifests: Mapping[str, Manifest]) -> None:
    """Remove everything but the datasets and the running build's lock."""
    datasets = {dataset_url(job.url, name): committed for name, committed in manifests.items()}
    # Task states first: they refer to the rest.
    for folder in (TASKS, DIGESTS, DROPS, SPILLS, STDIN):
        for url in {job.url, *datasets}:
            _remove(work_url(url, folder))
    for url, committed in datasets.items():
        _remove_unreferenced(url, committed)
        with contextlib.suppress(OSError):  # the folder holds the lock, or does not exist
            if storage.is_local(url):
                storage.local_path(work_url(url)).rmdir()


def _remove(folder: str) -> None:
    for name in storage.list_files(folder):
        storage.delete(storage.join(folder, name))
    if storage.is_local(folder):
        shutil.rmtree(storage.local_path(folder), ignore_errors=True)


def _remove_unreferenced(url: str, dataset_manifest: Manifest) -> None:
    """Remove half-written files, and files to which no generation refers."""
    referenced = set(dataset_manifest.files)
    for generation in dataset_manifest.generations:
        for shard in manifest.load_table(url, generation):
            referenced |= {shard.name, shard.stored_name or shard.name}
            if (fields_file := fields.fields_file(shard)) is not None:
                referenced.add(fields_file.name)
    for name in storage.list_files(url):
        folder, _, base = name.rpartition("/")
        is_orphan = NAMED_BY_CONTENT.fullmatch(name) and name not in referenced
        if is_orphan or (folder in FOLDERS and HALF_WRITTEN.fullmatch(base)):
            storage.delete(storage.join(url, name))
