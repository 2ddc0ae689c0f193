"""Cached index of the harness's built-in tasks.

The harness reads 14,000 YAML files to learn its tasks' names: seven seconds, even for a task with
ten questions. The index holds a task's name, kind, file and tags; its YAML is read when it is
built. The cache key is the names, sizes and times of all files.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lm_eval.tasks
from lm_eval.tasks._index import Entry, Kind, TaskIndex, log

from ...models.accounting.stored import load_or_compute

FOLDER = Path(lm_eval.tasks.__file__).parent
Index = dict[str, Entry]
read_index = TaskIndex.build


def build_index(paths: Iterable[Path], harness: Path = FOLDER, **options: Any) -> Index:
    """Index the tasks in all folders by name, as `TaskIndex.build` does: a later folder's task
    replaces an earlier one with the same name. `harness` is the folder with the built-in tasks."""
    index: Index = {}
    for path in paths:
        entries = cached_index(harness) if path == harness else read_index([path], **options)
        for task in entries.keys() & index.keys():
            files = entries[task].yaml_path, index[task].yaml_path
            log.warning("Task '%s' from %s overrides existing task from %s", task, *files)
        index |= entries
    return index


def cached_index(folder: Path) -> Index:
    """Read a folder's tasks from the cache, or index the folder."""
    question = f"tasks {folder} {_hash_file_stats(folder)}"
    return load_or_compute(question, lambda: read_index([folder]), _pack_index, _unpack_index)


def _pack_index(index: Index) -> Any:
    return [
        [entry.name, entry.kind.name, str(entry.yaml_path or ""), sorted(entry.tags)]
        for entry in index.values()
    ]


def _unpack_index(packed: Any) -> Index:
    return {
        task: Entry(task, Kind[kind], Path(file) if file else None, tags=set(tags))
        for task, kind, file, tags in packed
    }


def _hash_file_stats(folder: Path) -> str:
    """Hash the names, sizes and times of all YAML files below a folder."""
    digest = hashlib.sha256()
    folders = [str(folder)]
    while folders:
        with os.scandir(folders.pop()) as files:
            for file in sorted(files, key=lambda file: file.name):
                if file.is_dir():
                    folders.append(file.path)
                elif file.name.endswith(".yaml"):
                    stat = file.stat()
                    digest.update(f"{file.path} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()
