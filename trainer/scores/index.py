"""The harness's list of its own tasks, stored.

The harness reads the YAML of each of its tasks, 14,000 files, to learn their names: that is seven
seconds, also for a task of ten questions. The list holds the name, kind, file and tags of each; the
YAML of a task is read when it is built. It is stored under the names, sizes and times of all files.
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
    """Return the entries of all folders by name, as `TaskIndex.build` does: a later folder's task
    takes the place of an earlier one's. `harness` is the folder of the harness's own tasks."""
    index: Index = {}
    for path in paths:
        entries = stored_index(harness) if path == harness else read_index([path], **options)
        for name in entries.keys() & index.keys():
            places = entries[name].yaml_path, index[name].yaml_path
            log.warning("Task '%s' from %s overrides existing task from %s", name, *places)
        index |= entries
    return index


def stored_index(folder: Path) -> Index:
    """Return the entries of the harness's own folder."""
    question = f"tasks {folder} {_state(folder)}"
    return load_or_compute(question, lambda: read_index([folder]), _packed, _unpacked)


def _packed(index: Index) -> Any:
    return [
        [entry.name, entry.kind.name, str(entry.yaml_path or ""), sorted(entry.tags)]
        for entry in index.values()
    ]


def _unpacked(packed: Any) -> Index:
    return {
        name: Entry(name, Kind[kind], Path(file) if file else None, tags=set(tags))
        for name, kind, file, tags in packed
    }


def _state(folder: Path) -> str:
    """Return a digest of the names, sizes and times of all files below a folder."""
    digest = hashlib.sha256()
    folders = [str(folder)]
    while folders:
        with os.scandir(folders.pop()) as files:
            for file in sorted(files, key=lambda file: file.name):
                if file.is_dir():
                    folders.append(file.path)
                elif file.name.endswith(".yaml"):
                    state = file.stat()
                    digest.update(f"{file.path} {state.st_size} {state.st_mtime_ns}\n".encode())
    return digest.hexdigest()
