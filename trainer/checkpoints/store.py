"""Where checkpoints lie, and what makes one whole.

    checkpoints/
      step-00000120/               exists only when it is whole
        tensors/                   torch's distributed checkpoint files
        state.json                 the scalars: step, row, plan, updates, ledger
        manifest.json              every file with its size and sha256; written last
      .step-00000140.7c3f….tmp/    being written, or left by a run that was killed

A checkpoint is written into a fresh folder, and one rename makes it appear. It is never written
to again. Reading begins with the hashes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...console.errors import CheckpointError
from ...console.log import get_logger
from .policy import CheckpointConfig
from .tensors import FOLDER, StoredFile

VERSION = 1
MANIFEST = "manifest.json"
STATE = "state.json"
NAME = re.compile(r"^step-(\d{8,})$")
BLOCK = 1 << 22

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The scalars of a checkpoint: where in the stream the run is, and what it was."""

    step: int
    """The next step to take: steps below it are in the weights."""
    row: int
    """The next row of the stream."""
    tokens: int
    """Tokens of all rows below `row`."""
    plan_hash: str
    updates: int
    """Optimizer updates applied: steps that were not skipped."""
    ledger: str
    """The ledger's hash after the last step."""
    seed: int
    layout: dict[str, Any] = field(default_factory=dict)
    """The engine and layout that saved it; any other may load it."""
    headrace: str = ""
    torch: str = ""


def name(step: int) -> str:
    return f"step-{step:08d}"


def committed(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if NAME.match(path.name)]
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    match = NAME.match(path.name)
    assert match, path
    return int(match[1])


def temporary(folder: Path, step: int, token: str) -> Path:
    return folder / f".{name(step)}.{token}.tmp"


def commit(path: Path, target: Path, files: Sequence[StoredFile], state: RunState) -> None:
    """Make the checkpoint in the temporary folder `path` appear as `target`."""
    written = [*files, _write_json(path, STATE, asdict(state))]
    listed = sorted((asdict(file) for file in written), key=lambda file: str(file["name"]))
    content = {"version": VERSION, "step": state.step, "files": listed}
    _write_json(path, MANIFEST, {**content, "seal": _seal(content)})
    sync(path / FOLDER)
    sync(path)
    path.rename(target)
    sync(target.parent)


def read_manifest(path: Path) -> list[StoredFile]:
    """The files that the checkpoint must hold."""
    try:
        content = json.loads((path / MANIFEST).read_text())
        seal = content.pop("seal")
        version = content["version"]
        files = [StoredFile(**item) for item in content["files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise damaged(path, f"its {MANIFEST} cannot be read ({error})") from None
    if seal != _seal(content):
        raise damaged(path, f"its {MANIFEST} was changed")
    if version != VERSION:
        raise CheckpointError(
            f"{path} has format version {version}; this headrace reads {VERSION}",
            mend="load it with the headrace that wrote it",
        )
    return files


def verify(path: Path, files: Sequence[StoredFile]) -> None:
    """Hash the files and compare with what was written."""
    for file in files:
        place = path / file.name
        try:
            size = place.stat().st_size
            if size != file.size:
                raise damaged(path, f"{file.name} has {size:,} of {file.size:,} bytes")
            digest = hashlib.sha256()
            with place.open("rb") as stream:
                while block := stream.read(BLOCK):
                    digest.update(block)
        except OSError as error:
            raise damaged(path, f"{file.name} cannot be read ({error.strerror})") from None
        if digest.hexdigest() != file.sha256:
            raise damaged(path, f"the bytes of {file.name} are not the ones that were written")


def read_state(path: Path) -> RunState:
    try:
        return RunState(**json.loads((path / STATE).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise damaged(path, f"its {STATE} cannot be read ({error})") from None


def damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint {path} is damaged: {what}",
        mend="restore it from a copy, or run again with --fallback to go on from the checkpoint "
        "before it",
    )


def prune(folder: Path, config: CheckpointConfig, keep: Collection[int] = ()) -> list[int]:
    """Delete what neither the policy nor `keep` keeps; returns the steps."""
    gone = []
    for path in committed(folder)[: -config.keep_last]:
        step = step_of(path)
        periodic = config.keep_every is not None and step % config.keep_every == 0
        if periodic or step in keep:
            continue
        # Hidden first: a folder half deleted must not look like a checkpoint.
        doomed = folder / f".{path.name}.deleted.tmp"
        path.rename(doomed)
        shutil.rmtree(doomed)
        gone.append(step)
    return gone


def clean(folder: Path) -> None:
    """Remove what runs that were killed left half written."""
    for path in folder.glob(".step-*.tmp"):
        log.info("removing %s, which was left half written", path.name)
        shutil.rmtree(path)


def set_aside(folder: Path, after: int) -> None:
    """Move checkpoints later than step `after` out of the way: the run goes on from there."""
    for path in committed(folder):
        if step_of(path) > after:
            place, number = folder / f"abandoned-{path.name}", 1
            while place.exists():
                place, number = folder / f"abandoned-{path.name}-{number}", number + 1
            log.warning("%s is set aside as %s", path.name, place.name)
            path.rename(place)


def sync(folder: Path) -> None:
    """Make names in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_json(folder: Path, file: str, content: dict[str, Any]) -> StoredFile:
    data = json.dumps(content, indent=1).encode()
    with (folder / file).open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    return StoredFile(file, len(data), hashlib.sha256(data).hexdigest())


def _seal(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
