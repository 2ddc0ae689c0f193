"""Tags and a note that a person gives a run: `notes.yaml` in its folder.

tags: [baseline, 1B]
note: The first run with the new tokenizer.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import yaml

from ...console import yaml_text
from ...console.errors import ConfigError, ConfigProblem, StorageError, UserError, file_fault
from ...dataplane.storage import storage
from ...trainer.folders.folder import NOTES

MAX_TAGS, MAX_TAG, MAX_NOTE = 20, 60, 20_000
"""Upper bounds: tags of a run, characters of a tag and of a note."""


@dataclass(frozen=True)
class Notes:
    tags: tuple[str, ...] = ()
    note: str = ""


def read_notes(run: str) -> Notes:
    """Read a run's notes; empty if it has none."""
    url = storage.join(run, NOTES)
    if not storage.exists(url):
        return Notes()
    return parse_notes(yaml_text.parse(storage.read(url).decode(), source=url)[0], url)


def parse_notes(content: Any, source: str) -> Notes:
    """Check notes that a person has written, in a file or on the page."""
    content = content if isinstance(content, dict) else {"": content}
    tags, note = content.get("tags", []), content.get("note", "")
    problems = [
        ConfigProblem(str(key), "is neither tags nor note")
        for key in content.keys() - {"tags", "note"}
    ]
    if not isinstance(tags, list) or any(
        not isinstance(tag, str | int | float) or not 0 < len(str(tag).strip()) <= MAX_TAG
        for tag in tags
    ):
        problems.append(ConfigProblem("tags", f"is no list of words of up to {MAX_TAG} characters"))
    elif len(tags) > MAX_TAGS:
        problems.append(ConfigProblem("tags", f"has {len(tags)} tags, at most {MAX_TAGS}"))
    if not isinstance(note, str) or len(note) > MAX_NOTE:
        problems.append(ConfigProblem("note", f"is no text of up to {MAX_NOTE:,} characters"))
    if problems:
        raise ConfigError(source, problems)
    return Notes(tuple(dict.fromkeys(str(tag).strip() for tag in tags)), note.strip())


def write_notes(run: str, notes: Notes) -> None:
    """Write a run's notes into its folder."""
    if not storage.is_local(run):
        raise UserError("this run is in a store, which the board only reads")
    path = storage.local_path(run) / NOTES
    if path.is_symlink():
        raise StorageError(f"{path} is a link, which the board does not follow")
    if not os.access(path.parent, os.W_OK):
        raise StorageError(f"{path.parent} is not writable for the user of this board")
    values = {"tags": list(notes.tags), "note": notes.note}
    try:
        storage.write(
            str(path), yaml.safe_dump(values, allow_unicode=True, sort_keys=False).encode()
        )
    except OSError as error:
        raise StorageError(f"cannot write {path}: {file_fault(error)[0]}") from None
