"""Entries of Triton's cache: which are whole, and which were damaged.

    FOLDER/headrace-programs.json    Triton's version, and a digest of each entry that was compiled
    FOLDER/XYZ…/                     an entry, named by everything that a program is compiled for

Triton writes an entry atomically, and reads it without a check: a damaged binary is an error of the
driver at the first launch. So entries are checked before, against their digests.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

FILE = "headrace-programs.json"
VERSION = 1
BINARY = (".json", ".cubin")
"""Files of an entry that a launch reads; the others are the stages before them."""
GROUP = "__grp__"
"""Prefix of the file that lists an entry's files, by absolute paths."""

State = Literal["whole", "absent", "damaged"]


def folder() -> Path:
    """Return the folder of Triton's cache."""
    from triton import knobs

    return Path(knobs.cache.dir)


@dataclass
class ProgramCache:
    """The entries of a folder, and what is known of them."""

    root: Path
    triton: str | None
    """Version of Triton that wrote the list; None if there is none."""
    digests: dict[str, str]
    """Digest of each entry, by its name."""
    damaged: bool
    """True if the list itself could not be read."""

    @classmethod
    def read(cls, root: Path) -> ProgramCache:
        try:
            text = (root / FILE).read_text()
        except FileNotFoundError:
            return cls(root, None, {}, False)
        except (OSError, UnicodeDecodeError):
            return cls(root, None, {}, True)
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            data = json.loads(text)
            content = {key: value for key, value in data.items() if key != "digest"}
            if data["digest"] == _digest_list(content) and data["version"] == VERSION:
                return cls(root, str(data["triton"]), dict(data["programs"]), False)
        return cls(root, None, {}, True)

    def examine(self, name: str, program: str) -> State:
        """Return the state of an entry. One that Triton compiled itself is whole if its files can
        be read; a cache that was moved gets the paths of its new place."""
        entry = self.root / name
        group = entry / f"{GROUP}{program}.json"
        if not group.exists():
            return "absent"
        try:
            digest = self._digest_entry(entry, program, group)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return "damaged"
        if self.digests.setdefault(name, digest) != digest:
            return "damaged"
        return "whole"

    def remove(self, name: str) -> None:
        shutil.rmtree(self.root / name, ignore_errors=True)
        self.digests.pop(name, None)

    def write(self, triton: str) -> None:
        """Write the list, with what other processes have added to it."""
        earlier = ProgramCache.read(self.root)
        kept = earlier.digests if earlier.triton == triton else {}
        content = {"version": VERSION, "triton": triton, "programs": {**kept, **self.digests}}
        text = json.dumps({**content, "digest": _digest_list(content)}, indent=1)
        with contextlib.suppress(OSError):  # without room or rights, the next start checks less
            self.root.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.root, delete=False) as temporary:
                temporary.write(text)
            path = Path(temporary.name)
            path.chmod(0o644)  # ranks of other users read it
            path.replace(self.root / FILE)

    def _digest_entry(self, entry: Path, program: str, group: Path) -> str:
        paths = json.loads(group.read_text())["child_paths"]
        digest = hashlib.sha256()
        for ending in BINARY:
            data = (entry / f"{program}{ending}").read_bytes()
            if ending == ".json":
                json.loads(data)
            elif not is_whole_elf(data):
                raise ValueError("the binary is cut short")
            digest.update(data)
        current_paths = {name: str(entry / name) for name in paths if (entry / name).exists()}
        if current_paths != paths:
            group.write_text(json.dumps({"child_paths": current_paths}))
        return digest.hexdigest()


def is_whole_elf(data: bytes) -> bool:
    """Return True if a binary has the header of an ELF file, and all the sections that it lists."""
    if len(data) < 64 or data[:4] != b"\x7fELF":
        return False
    offset = int.from_bytes(data[40:48], "little")
    size, count = (int.from_bytes(data[at : at + 2], "little") for at in (58, 60))
    return offset > 0 and offset + size * count <= len(data)


def _digest_list(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
