"""Where checkpoints lie, and what makes one whole.

    checkpoints/
      step-00000120/               exists only when it is whole
        tensors/                   torch's distributed checkpoint files
        state.json                 the scalars: step, row, plan, updates, ledger
        model.yaml                 the model, so that a checkpoint says what it is of
        manifest.json              every file with its size and sha256; written last
      .step-00000140.7c3f….tmp/    being written, or left by a run that was killed

A checkpoint is written into a fresh folder, and one rename makes it appear. It is never written
to again. Reading begins with the hashes.

With `checkpoints.url` its files move to a prefix of their own there, `URL/step-00000120.7c3f…/`,
the manifest last. What stays in the run's folder is its record: the small files, and the file
`remote`, which names the prefix. The record appears by the same rename, so that everything else
(what there is, what is newest, what may be deleted) is one and the same for both, and nothing at
the URL is ever touched but what a record names.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...console.errors import CheckpointError, StorageError
from ...console.log import get_logger
from ...dataplane.storage import storage
from ...dataplane.storage.atomic import sync
from .policy import CheckpointConfig

VERSION = 1
MANIFEST = "manifest.json"
STATE = "state.json"
MODEL = "model.yaml"
TENSORS = "tensors"
REMOTE = "remote"
NAME = re.compile(r"^step-(\d{8,})(\.[0-9a-f]+)?$")
BLOCK = 1 << 24
ABANDONED = "abandoned-"
ADOPTED = ".adopted"
"""Not a `.tmp`, whose files `clean` would delete where they are."""

log = get_logger(__name__)


@dataclass(frozen=True)
class StoredFile:
    """A file of a checkpoint and the hash of what was written to it."""

    name: str
    size: int
    sha256: str


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
    """Optimizer updates that the weights have seen."""
    ledger: str
    """The ledger's hash after the last step."""
    seed: int
    losses: tuple[float, ...] = ()
    """Of the latest steps, where the run looks out for spikes."""
    rollbacks: int = 0
    """How often the run has gone back to the checkpoint before this one."""
    run: str = ""
    """Names the run that saved it by what makes it that run and no other."""
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


def step_of(path: Path | str) -> int:
    match = NAME.match(str(path).rstrip("/").rpartition("/")[2])
    assert match, path
    return int(match[1])


def temporary(folder: Path, step: int, token: str) -> Path:
    return folder / f".{name(step)}.{token}.tmp"


def place(path: Path | str) -> str:
    """Where the files of a checkpoint are: its own folder, or what its record names."""
    note = storage.join(str(path), REMOTE)
    if not storage.is_local(note) or not storage.exists(note):
        return str(path)
    url = storage.read(note).decode()
    if storage.is_local(url):  # what is deleted there would be somebody's
        raise damaged(path, f"its {REMOTE} names no store")
    return url


def begin(path: Path, url: str | None) -> None:
    """Make the folder that a checkpoint is written into. It says at once where its files are to
    go, so that whoever has to clean up knows."""
    (path / TENSORS).mkdir(parents=True)
    if url is not None:
        storage.write(str(path / REMOTE), url.encode())


def send(path: Path, files: Sequence[StoredFile]) -> None:
    """Move files to where the checkpoint's are to be, if that is elsewhere."""
    target = place(path)
    if target != str(path):
        for file in files:
            storage.put(path / file.name, storage.join(target, file.name))


def commit(
    path: Path,
    target: Path,
    files: Sequence[StoredFile],
    state: RunState,
    texts: Mapping[str, str] | None = None,
) -> None:
    """Make the checkpoint in the temporary folder `path` appear as `target`."""
    small = {STATE: json.dumps(asdict(state), indent=1), **(texts or {})}
    written = [*files, *(_write(path, name, text) for name, text in small.items())]
    listed = sorted((asdict(file) for file in written), key=lambda file: str(file["name"]))
    content = {"version": VERSION, "step": state.step, "files": listed}
    _write(path, MANIFEST, json.dumps({**content, "seal": _seal(content)}, indent=1))
    elsewhere = place(path)
    if elsewhere != str(path):
        for file in (*small, MANIFEST):  # the manifest last: before, there is no checkpoint
            storage.write(storage.join(elsewhere, file), (path / file).read_bytes())
        shutil.rmtree(path / TENSORS)
    else:
        sync(path / TENSORS)
    sync(path)
    path.rename(target)
    sync(target.parent)


def read_manifest(path: Path | str) -> list[StoredFile]:
    """The files that the checkpoint must hold."""
    try:
        content = json.loads(_read(path, MANIFEST))
        seal = content.pop("seal")
        version = content["version"]
        files = [StoredFile(**item) for item in content["files"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(path, f"its {MANIFEST} cannot be read ({error})") from None
    if seal != _seal(content):
        raise damaged(path, f"its {MANIFEST} was changed")
    if version != VERSION:
        raise CheckpointError(
            f"{path} has format version {version}; this headrace reads {VERSION}",
            hint="load it with the headrace that wrote it",
        )
    return files


def verify(path: Path | str, files: Sequence[StoredFile]) -> None:
    """Hash the files and compare with what was written."""
    for file in files:
        url = storage.join(place(path), file.name)
        if not storage.exists(url):
            raise damaged(path, f"{file.name} is missing")
        digest = hashlib.sha256()
        try:
            size = storage.size(url)
            if size != file.size:
                raise damaged(path, f"{file.name} has {size:,} of {file.size:,} bytes")
            for start in range(0, size, BLOCK):
                digest.update(storage.read(url, start, min(start + BLOCK, size)))
        except StorageError as error:
            if not storage.is_local(url):
                raise  # a store that does not answer has damaged nothing
            raise damaged(path, f"{file.name} cannot be read ({error.what})") from None
        if digest.hexdigest() != file.sha256:
            raise damaged(path, f"the bytes of {file.name} are not the ones that were written")


def read_state(path: Path | str) -> RunState:
    try:
        data = json.loads(_read(path, STATE))
        return RunState(**{**data, "losses": tuple(data.get("losses", ()))})
    except (ValueError, TypeError) as error:
        raise damaged(path, f"its {STATE} cannot be read ({error})") from None


def damaged(path: Path | str, what: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint {path} is damaged: {what}",
        hint="restore it from a copy, or run again with --fallback to go on from the checkpoint "
        "before it",
    )


def prune(folder: Path, config: CheckpointConfig, keep: Collection[int] = ()) -> list[int]:
    """Delete what neither the policy nor `keep` keeps; returns the steps."""
    gone = []
    for path in committed(folder)[: -config.keep_last]:
        step = step_of(path)
        periodic = config.keep_every is not None and step % config.keep_every == 0
        if not periodic and step not in keep:
            _delete(path)
            gone.append(step)
    aside = sorted(folder.glob(f"{ABANDONED}step-*"), key=lambda path: path.stat().st_ctime_ns)
    for path in aside[: len(aside) - config.keep_abandoned]:
        _delete(path)
    return gone


def clean(folder: Path) -> None:
    """Remove what runs that were killed left half written or half deleted."""
    for path in folder.glob(".*.tmp"):
        log.info("removing %s, which was left half written", path.name)
        remove(path)


def remove(path: Path) -> None:
    """Delete a checkpoint's hidden folder and its files, wherever they are. A store that does not
    answer keeps nobody waiting: what it keeps is named here, for the next `clean`."""
    elsewhere = place(path)
    if elsewhere != str(path):
        try:
            # The manifest first: what is half deleted must not look whole.
            storage.delete(storage.join(elsewhere, MANIFEST))
            for file in storage.list_files(elsewhere):
                storage.delete(storage.join(elsewhere, file))
        except StorageError as error:
            log.warning("%s is not removed yet: %s", elsewhere, error.what)
            return
    shutil.rmtree(path)


def set_aside(folder: Path, after: int) -> None:
    """Move checkpoints later than step `after` out of the way: the run goes on from there."""
    for path in committed(folder):
        if step_of(path) > after:
            place, number = folder / f"{ABANDONED}{path.name}", 1
            while place.exists():
                place, number = folder / f"{ABANDONED}{path.name}-{number}", number + 1
            log.warning("%s is set aside as %s", path.name, place.name)
            path.rename(place)


def whole(url: str) -> list[str]:
    """The checkpoints below a URL, oldest first: those that have a manifest."""
    names = [file.rpartition("/")[0] for file in storage.list_files(url) if is_manifest(file)]
    return [storage.join(url, each) for each in sorted(names, key=step_of)]


def is_manifest(file: str) -> bool:
    folder, _, last = file.rpartition("/")
    return last == MANIFEST and NAME.match(folder) is not None


def adopt(folder: Path, url: str, run: str) -> None:
    """Make records of the checkpoints at `url` that a run has saved whose folder is lost. Before
    one appears all are made: what is hidden says that a start was killed while they appeared."""
    if committed(folder) and not any(folder.glob(f".*{ADOPTED}")):
        return
    made: dict[Path, Path] = {}
    for there in whole(url):
        state = read_state(there)
        path, target = folder / f".{name(state.step)}{ADOPTED}", folder / name(state.step)
        if state.run != run or target.exists() or target in made:  # it has saved this step twice
            continue
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        for file in (STATE, MODEL, MANIFEST):
            (path / file).write_bytes(storage.read(storage.join(there, file)))
        storage.write(str(path / REMOTE), there.encode())
        made[target] = path
    for target, path in made.items():
        path.rename(target)
        log.info("%s was saved by this run: going on with it", place(target))


def _delete(path: Path) -> None:
    # Hidden first: a folder half deleted must not look like a checkpoint.
    doomed = path.with_name(f".{path.name}.deleted.tmp")
    path.rename(doomed)
    remove(doomed)


def _read(path: Path | str, file: str) -> bytes:
    url = storage.join(place(path), file)
    if not storage.exists(url):
        raise damaged(path, f"its {file} cannot be read (it is missing)")
    return storage.read(url)


def _write(folder: Path, file: str, text: str) -> StoredFile:
    data = text.encode()
    with (folder / file).open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    return StoredFile(file, len(data), hashlib.sha256(data).hexdigest())


def _seal(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
