"""Checkpoint folders: layout, atomic commit, verification, deletion.

    checkpoints/
      step-00000120/               exists only if it is complete
        tensors/                   torch's distributed checkpoint files
        state.json                 the scalars: step, row, plan, updates, ledger
        model.yaml                 the model, so that the checkpoint alone can be exported
        manifest.json              every file with its size and sha256; written last
      .step-00000140.7c3f….tmp/    being written, or left behind by a killed run

A checkpoint is written into a new folder, which one rename makes visible. It is never written to
again. Reading starts with the hashes.

With `checkpoints.url` the files move to a new prefix, `URL/step-00000120.7c3f…/`, the manifest
last. The run's folder keeps a record: the small files, and the file `remote`, which names the
prefix. The same rename makes the record visible, so listing, choosing the newest and deleting work
alike for both. At the URL, only prefixes that a record names are changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
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
"""Suffix for a record that is not visible yet. Not `.tmp`: `clean` would delete its files at the
URL."""

log = get_logger(__name__)


@dataclass(frozen=True)
class StoredFile:
    """A checkpoint's file and the hash of the written bytes."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class CheckpointManifest:
    """A checkpoint's files. The seal hashes their names, sizes and hashes: equal seals, equal
    files."""

    files: Sequence[StoredFile]
    seal: str


@dataclass(frozen=True, kw_only=True)
class RunState:
    """A checkpoint's scalars: the run's position in the stream, and what defined the run."""

    step: int
    """The next step to take: steps below it are in the weights."""
    row: int
    """The next row of the stream."""
    tokens: int
    """Tokens in all rows below `row`."""
    plan_hash: str
    updates: int
    """Optimizer steps applied to the weights."""
    ledger: str
    """The ledger's hash after the last step."""
    seed: int
    losses: tuple[float, ...] = ()
    """Losses in the latest steps, if the run watches for spikes."""
    rollbacks: int = 0
    """Rollbacks to the checkpoint before this one."""
    mixing: dict[str, Any] = field(default_factory=dict)
    """Number of decisions so far, and what a controller has observed since the last one; not
    saved if it is empty."""
    run: str = ""
    """Hash of everything that defines the run that saved it."""
    layout: dict[str, Any] = field(default_factory=dict)
    """Engine and layout that saved it; any other can load it."""
    headrace: str = ""
    torch: str = ""


def name(step: int) -> str:
    return f"step-{step:08d}"


def committed(folder: Path) -> list[Path]:
    """Return a run's checkpoints, oldest first."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if NAME.match(path.name)), key=parse_step)


def newest_complete(folder: Path) -> Path | None:
    """Return a run's newest checkpoint with a manifest. Its files are not verified."""
    saved = reversed(committed(folder))
    return next((path for path in saved if (path / MANIFEST).is_file()), None)


def reached(folder: Path, step: int) -> bool:
    """Return whether a run has a checkpoint at `step` or later."""
    saved = committed(folder)
    return bool(saved) and parse_step(saved[-1]) >= step


def parse_step(path: Path | str) -> int:
    match = NAME.match(str(path).rstrip("/").rpartition("/")[2])
    assert match, path
    return int(match[1])


def temporary(folder: Path, step: int, token: str) -> Path:
    return folder / f".{name(step)}.{token}.tmp"


def locate_files(path: Path | str) -> str:
    """Return the location of a checkpoint's files: its folder, or the prefix that its record
    names."""
    record = storage.join(str(path), REMOTE)
    if not storage.is_local(record) or not storage.exists(record):
        return str(path)
    url = storage.read(record).decode()
    if storage.is_local(url):  # deleting it would delete a user's files
        raise damage_error(path, f"its {REMOTE} names no store")
    return url


def begin(path: Path, url: str | None) -> None:
    """Create the folder into which a checkpoint is written. It names the files' prefix from the
    start, so that a later start can delete them."""
    (path / TENSORS).mkdir(parents=True)
    if url is not None:
        storage.write(str(path / REMOTE), url.encode())


def send(path: Path, files: Sequence[StoredFile]) -> None:
    """Upload files to the checkpoint's prefix, if it has one."""
    target = locate_files(path)
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
    """Commit the checkpoint in the temporary folder `path` as `target`."""
    scalars = asdict(state)
    if not state.mixing:
        del scalars["mixing"]
    small_files = {STATE: json.dumps(scalars, indent=1), **(texts or {})}
    stored = [*files, *(_write(path, file, text) for file, text in small_files.items())]
    entries = sorted((asdict(file) for file in stored), key=lambda entry: str(entry["name"]))
    content = {"version": VERSION, "step": state.step, "files": entries}
    _write(path, MANIFEST, json.dumps({**content, "seal": _seal(content)}, indent=1))
    location = locate_files(path)
    if location != str(path):
        for file_name in (*small_files, MANIFEST):  # last: without it there is no checkpoint
            storage.write(storage.join(location, file_name), (path / file_name).read_bytes())
        shutil.rmtree(path / TENSORS)
    else:
        sync(path / TENSORS)
    sync(path)
    path.rename(target)
    sync(target.parent)


def read_manifest(path: Path | str) -> CheckpointManifest:
    try:
        content = json.loads(_read(path, MANIFEST))
        seal = content.pop("seal")
        version = content["version"]
        files = [StoredFile(**item) for item in content["files"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise damage_error(path, f"its {MANIFEST} cannot be read ({error})") from None
    if seal != _seal(content):
        raise damage_error(path, f"its {MANIFEST} was changed")
    if version != VERSION:
        raise CheckpointError(
            f"{path} has format version {version}; this headrace reads {VERSION}",
            hint="load it with the headrace that wrote it",
        )
    return CheckpointManifest(files, seal)


def check_sizes(path: Path | str, files: Sequence[StoredFile]) -> None:
    """Raise unless the files exist with the manifest's sizes."""
    for file in files:
        url = storage.join(locate_files(path), file.name)
        if not storage.exists(url):
            raise damage_error(path, f"{file.name} is missing")
        if (size := storage.size(url)) != file.size:
            raise damage_error(path, f"{file.name} has {size:,} of {file.size:,} bytes")


def verify(path: Path | str, files: Sequence[StoredFile]) -> None:
    """Raise unless the files have the manifest's sizes and hashes."""
    for file in files:
        url = storage.join(locate_files(path), file.name)
        digest = hashlib.sha256()
        try:
            check_sizes(path, [file])
            for start in range(0, file.size, BLOCK):
                digest.update(storage.read(url, start, min(start + BLOCK, file.size)))
        except StorageError as error:
            if not storage.is_local(url):
                raise  # an unavailable store: nothing is damaged
            raise damage_error(path, f"{file.name} cannot be read ({error.message})") from None
        if digest.hexdigest() != file.sha256:
            raise damage_error(path, f"the bytes of {file.name} are not the ones that were written")


def read_state(path: Path | str) -> RunState:
    try:
        data = json.loads(_read(path, STATE))
        state = RunState(**{**data, "losses": tuple(data["losses"])})
    except (ValueError, KeyError, TypeError) as error:
        raise damage_error(path, f"its {STATE} cannot be read ({error})") from None
    if (step := parse_step(path)) != state.step:
        raise CheckpointError(
            f"{path} holds the checkpoint of step {state.step}, not that of step {step}",
            hint=f"name it {name(state.step)}, or delete it if that exists; --fallback takes "
            "the checkpoint before it",
        )
    return state


def read_checkpoint(path: Path | str) -> tuple[CheckpointManifest, RunState]:
    """Read a checkpoint's manifest and state. Raise if there is none."""
    if storage.is_local(str(path)) and not Path(path).is_dir():
        raise CheckpointError(
            f"{path} is not there", hint="name a checkpoint that exists, or restore it from a copy"
        )
    return read_manifest(path), read_state(path)


def damage_error(path: Path | str, problem: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint {path} is damaged: {problem}",
        hint="restore it from a copy, or run again with --fallback to go on from the checkpoint "
        "before it",
    )


def find_outdated(folder: Path, config: CheckpointConfig, keep: Collection[int] = ()) -> list[Path]:
    """Find checkpoints outside the policy and `keep`, abandoned ones last."""
    saved = [
        path
        for path in committed(folder)[: -config.keep_last]
        if parse_step(path) not in keep
        and (config.keep_every is None or parse_step(path) % config.keep_every)
    ]
    abandoned = sorted(folder.glob(f"{ABANDONED}step-*"), key=lambda path: path.stat().st_ctime_ns)
    return saved + abandoned[: max(0, len(abandoned) - config.keep_abandoned)]


def prune(folder: Path, config: CheckpointConfig, keep: Collection[int] = ()) -> None:
    """Delete the outdated checkpoints."""
    for path in find_outdated(folder, config, keep):
        _delete(path)


def clean(folder: Path) -> None:
    """Delete folders that killed runs left half written or half deleted."""
    for path in folder.glob(".*.tmp"):
        log.info("removing %s, which was left half written", path.name)
        remove(path)


def remove(path: Path) -> None:
    """Delete a checkpoint's hidden folder and its files at the prefix. If the store does not
    answer, the folder stays and names the prefix, for the next `clean`."""
    location = locate_files(path)
    if location != str(path):
        try:
            # The manifest first: half a checkpoint must not look complete.
            storage.delete(storage.join(location, MANIFEST))
            for file in storage.list_files(location):
                storage.delete(storage.join(location, file))
        except StorageError as error:
            log.warning("%s is not removed yet: %s", location, error.message)
            return
    shutil.rmtree(path)


def set_aside(folder: Path, after: int) -> None:
    """Rename checkpoints later than step `after`, from which the run resumes."""
    for path in committed(folder):
        if parse_step(path) > after:
            target, number = folder / f"{ABANDONED}{path.name}", 1
            while target.exists():
                target, number = folder / f"{ABANDONED}{path.name}-{number}", number + 1
            log.warning("%s is set aside as %s", path.name, target.name)
            path.rename(target)
    sync(folder)


def list_complete(url: str) -> list[str]:
    """List the checkpoints below a URL, oldest first: prefixes with a manifest."""
    names = [file.rpartition("/")[0] for file in storage.list_files(url) if is_manifest(file)]
    return [storage.join(url, checkpoint) for checkpoint in sorted(names, key=parse_step)]


def is_manifest(file: str) -> bool:
    folder, _, file_name = file.rpartition("/")
    return file_name == MANIFEST and NAME.match(folder) is not None


def adopt(folder: Path, url: str, run: str, prepare: Callable[[RunState], None]) -> None:
    """Create records for a run's checkpoints at `url`, if the run's folder was lost. All records
    are created before the first becomes visible: a hidden record means that a start was killed in
    between. `prepare` receives the newest state before that."""
    if committed(folder) and not any(folder.glob(f".*{ADOPTED}")):
        return
    records: dict[Path, Path] = {}
    newest: RunState | None = None
    for checkpoint in list_complete(url):
        state = read_state(checkpoint)
        path, target = folder / f".{name(state.step)}{ADOPTED}", folder / name(state.step)
        if state.run != run or target.exists() or target in records:  # this step was saved twice
            continue
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        for file in (STATE, MODEL, MANIFEST):
            storage.write(str(path / file), storage.read(storage.join(checkpoint, file)))
        storage.write(str(path / REMOTE), checkpoint.encode())
        records[target], newest = path, state
    if newest is not None:
        prepare(newest)
    for target, path in records.items():
        path.rename(target)
        log.info("%s was saved by this run: going on with it", locate_files(target))
    sync(folder)


def _delete(path: Path) -> None:
    # Hidden first: half a folder must not look like a checkpoint.
    doomed = path.with_name(f".{path.name}.deleted.tmp")
    path.rename(doomed)
    remove(doomed)


def _read(path: Path | str, file: str) -> bytes:
    url = storage.join(locate_files(path), file)
    if not storage.exists(url):
        raise damage_error(path, f"its {file} cannot be read (it is missing)")
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
