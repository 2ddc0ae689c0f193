"""Save in the background: the step waits for a copy to host memory, a thread writes it.

    step 119   step 120   step 121   step 122
               │ copy to host
               └─ thread: write, hash, agree, rename ─┘

The ranks' threads communicate over a separate process group, so that their messages never mix with
a step's. All ranks agree whether the save succeeded.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ...console.errors import StorageError, UserError
from ...console.log import get_logger
from ...console.progress import Progress
from ...dataplane.storage import storage
from ..cluster.agreement import read_agreed
from . import store, tensors
from .fragments import Fragment, averages, begin_averages
from .kinds import AVERAGE
from .policy import CheckpointConfig
from .store import RunState
from .weights import verify_together

log = get_logger(__name__)

QUIET_SECONDS = 2.0
"""Seconds that a run waits for a save before it shows progress."""
SHOWN_SECONDS = 0.2
"""Polling interval for a save's progress, in seconds."""


@dataclass
class Save:
    """A save that has begun."""

    step: int
    size: int
    """Bytes in the fragments that this rank writes."""
    thread: threading.Thread
    began: float
    blocked: float = 0.0
    """Seconds that the save blocked the step."""


class ReportSave(Protocol):
    """Receives a save's outcome in the training thread: sealed, or failed."""

    def __call__(self, step: int, blocked: float, error: Exception | None) -> None: ...


def _no_report(step: int, blocked: float, error: Exception | None) -> None:
    pass


class Saver:
    """Saves a run's checkpoints, never two at a time."""

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig,
        group: dist.ProcessGroup,
        keep: Collection[int] = (),
        texts: Mapping[str, str] | None = None,
        report: ReportSave = _no_report,
        quiet_seconds: float = QUIET_SECONDS,
    ) -> None:
        """`keep` are steps whose checkpoints the policy must not delete. `texts` are files that
        every checkpoint contains."""
        self.folder = folder
        self.keep = keep
        self.texts = texts
        self.config = config
        self.group = group
        self.rank = dist.get_rank(group)
        self.report = report
        self.quiet_seconds = quiet_seconds
        self._buffers: dict[str, torch.Tensor] = {}
        self._running: Save | None = None
        self._written = 0
        """Bytes that this rank has written in the running save."""
        self._failure: Exception | None = None

    def save(self, fragments: Sequence[Fragment], state: RunState) -> None:
        """Start a save. Wait for the previous one, if it still runs. Collective."""
        began = time.monotonic()
        self.wait()
        copies = [self._copy(fragment) for fragment in fragments if fragment.writes]
        thread = threading.Thread(
            target=self._attempt, args=(copies, state), name="checkpoint", daemon=False
        )
        size = sum(copy.data.nbytes for copy in copies)
        self._running, self._written = Save(state.step, size, thread, began), 0
        thread.start()
        if not self.config.background:
            self._join(self._running)
        self._running.blocked = time.monotonic() - began
        if not self.config.background:
            self.wait()

    def wait(self) -> None:
        """Wait for the running save and report its outcome. Raise its error."""
        if self._running is not None:
            self._join(self._running)
        self.poll()
        self.raise_failure()

    def _join(self, save: Save) -> None:
        """Wait for a save's thread. Rank 0 shows progress for its files.

        Uploads are not counted: the total, and the remaining time, are shown for disks alone.
        """
        save.thread.join(self.quiet_seconds if self.rank == 0 else None)
        if not save.thread.is_alive():
            return
        total = save.size if self.config.url is None else None
        with Progress(f"saving step {save.step}", total=total, unit="B") as progress:
            progress.started = save.began
            while save.thread.is_alive():
                save.thread.join(SHOWN_SECONDS)
                written = min(self._written, save.size)  # files have headers too
                progress.advance(written - progress.done)

    def poll(self) -> None:
        """Report the running save's outcome, if it has ended."""
        save = self._running
        if save is None or save.thread.is_alive():
            return
        self._running = None
        self.report(save.step, save.blocked, self._failure)

    @property
    def failed(self) -> bool:
        return self._failure is not None

    def raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _copy(self, fragment: Fragment) -> Fragment:
        """Copy the fragment to host memory, into a buffer that the next save reuses."""
        buffer = self._buffers.get(fragment.key)
        if buffer is None or buffer.shape != fragment.data.shape:
            pinned = fragment.data.is_cuda
            buffer = torch.empty(fragment.data.shape, dtype=torch.float32, pin_memory=pinned)
            self._buffers[fragment.key] = buffer
        buffer.copy_(fragment.data)
        return replace(fragment, data=buffer)

    def _count(self, size: int) -> None:
        self._written += size

    def _attempt(self, fragments: Sequence[Fragment], state: RunState) -> None:
        try:
            self._failure = self._write(fragments, state)
        except Exception as error:  # such as a lost rank: `wait` raises it
            self._failure = error

    def _write(self, fragments: Sequence[Fragment], state: RunState) -> UserError | None:
        """Write and commit. Return the error on which all ranks agree."""
        files: list[store.StoredFile] = []
        path, failure = self._begin(state)
        if failure is None:
            try:
                files = tensors.write(path / store.TENSORS, fragments, self.group, self._count)
                store.send(path, files)
            except (UserError, OSError) as error:
                failure = self._write_error(error, self.rank)
        gathered = [(files, failure)] * dist.get_world_size(self.group)
        dist.all_gather_object(gathered, (files, failure), group=self.group)
        failures = [rank_failure for _, rank_failure in gathered if rank_failure is not None]
        # The rank whose disk failed has the most precise error.
        failures.sort(key=lambda error: not isinstance(error, StorageError))
        verdict: list[UserError | None] = [failures[0] if failures else None]
        if self.rank == 0:
            if not failures:
                all_files = [file for rank_files, _ in gathered for file in rank_files]
                verdict = [self._commit(path, all_files, state)]
            if verdict[0] is not None and path.exists():
                store.remove(path)
        dist.broadcast_object_list(verdict, group=self.group, group_src=0)
        return verdict[0]

    def _write_error(self, error: Exception, rank: int = 0) -> UserError:
        target = f"a checkpoint in {self.config.url or self.folder}"
        return tensors.convert_error(error, "write", target, rank)

    def _begin(self, state: RunState) -> tuple[Path, UserError | None]:
        """Return the folder to write into, which rank 0 creates, or the error."""
        token = uuid.uuid4().hex[:8]
        outcome: list[Any] = [token, None]
        if self.rank == 0:
            url = self.config.url
            if url is not None:
                url = storage.join(url, f"{store.name(state.step)}.{token}")
            try:
                store.begin(store.temporary(self.folder, state.step, token), url)
            except OSError as error:
                outcome[1] = self._write_error(error)
        dist.broadcast_object_list(outcome, group=self.group, group_src=0)
        token, failure = outcome
        return store.temporary(self.folder, state.step, token), failure

    def _commit(
        self, path: Path, files: list[store.StoredFile], state: RunState
    ) -> UserError | None:
        try:
            store.commit(path, self.folder / store.name(state.step), files, state, self.texts)
            store.prune(self.folder, self.config, self.keep)
        except (UserError, OSError) as error:
            return self._write_error(error)
        return None


def load(path: Path | str, fragments: Sequence[Fragment], group: dist.ProcessGroup) -> RunState:
    """Verify a checkpoint and read it into the fragments, whatever layout wrote it. Collective.

    Moving averages that the checkpoint lacks begin at its weights. All ranks must see the same
    checkpoint. They share the hashing of its files, and none reads before all files are verified.
    """
    manifest, state = read_agreed(
        f"the checkpoint {store.name(store.parse_step(path))}",
        partial(store.read_checkpoint, path),
        lambda read: {"seal": read[0].seal, "state": asdict(read[1])},
        group,
        hint="check that all machines mount the same folder; where the file system of a machine "
        "lags behind, the same command works a little later",
    )
    verify_together(path, manifest.files, group)
    folder = storage.join(store.locate_files(path), store.TENSORS)
    if averages(fragments) and not tensors.StoredTensors(folder).shapes(AVERAGE):
        stored = [fragment for fragment in fragments if fragment.kind != AVERAGE]
        tensors.read(folder, stored, group)
        begin_averages(fragments)
    else:
        tensors.read(folder, fragments, group)
    return state
