"""Rendezvous in rank 0's store, for ranks that a launcher starts and does not watch.

    rank 0   opens the store ─► its world size ─► waits for all ranks, or an error ─► the verdict
    rank n   compares the world size ─► "I have come" ─► waits for the verdict

A rank that fails before it arrives writes its error to the store at its exit, so that all ranks end
with that error at once. So does a rank with a different world size. If it arrives after the
verdict, rank 0 reads its error before the first step.
"""

from __future__ import annotations

import contextlib
import json
import time
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from ...console.errors import RunError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

KEY = "headrace/"
WORLD, ERROR, VERDICT = f"{KEY}world", f"{KEY}error", f"{KEY}verdict"
"""Keys in the store: rank 0's world size; the first error on any rank; what all ranks do."""
CAME, READ = f"{KEY}came/{{}}", f"{KEY}read/{{}}"
"""Keys by rank: it has arrived; it has read the verdict, or failed."""
POLL = 0.1
"""Rank 0's polling interval in seconds."""
ANSWERED = timedelta(seconds=30)
"""Time for rank 0 to write the verdict, and for all ranks to read it."""
FAILED = timedelta(seconds=60)
"""Time in which a failed rank tries to reach rank 0."""
MISSING_HINT = "these ranks failed, or did not start: see their logs"
FAILED_HINT = "mend what that rank says, and start all ranks again"
WORLD_HINT = (
    "start all ranks of a run with the same WORLD_SIZE, and no others with its MASTER_ADDR and "
    "MASTER_PORT"
)
SHOWN = 16
"""Maximum missing ranks in an error."""


class StartVerdict(NamedTuple):
    """Why the ranks do not start; empty if they do."""

    message: str
    hint: str = ""

    @classmethod
    def parse(cls, data: bytes) -> StartVerdict:
        return cls(*json.loads(data))

    def encode(self) -> str:
        return json.dumps(self)

    def check(self) -> None:
        if self.message:
            raise RunError(self.message, hint=self.hint)


class Meeting:
    """This process's state in the rendezvous."""

    begun = False
    """True once this rank has tried to reach the store."""
    failure: str | None = None
    """This rank's error."""
    store: Store | None = None
    """The store, which rank 0 keeps open."""
    readers = range(0)
    """Ranks that still read the verdict, before rank 0 ends and closes the store."""


def meet(host: str, port: int, rank: int, world: int, join: timedelta) -> Store:
    """Return rank 0's store once all ranks have arrived. Raise if any does not arrive within
    `join`, failed before it arrived, or has a different world size."""
    from torch.distributed import DistError

    Meeting.begun = True
    seconds = f"within {join.total_seconds():.0f} seconds (watch.join_seconds)"
    try:
        store = _open(host, port, rank, world, join)
        if rank == 0:
            store.set(WORLD, str(world))
        else:
            _check_world(store, rank, world)
        store.set(CAME.format(rank), "")
        if rank == 0:
            store.set(VERDICT, _judge(store, world, join, seconds).encode())
        store.wait([VERDICT], join + ANSWERED)
        verdict = StartVerdict.parse(store.get(VERDICT))
        if verdict.message:
            store.set(READ.format(rank), "")
    except DistError as error:
        raise RunError(
            f"rank {rank} did not reach rank 0 at {host}:{port} {seconds}",
            where=str(error).partition("\n")[0],
            hint="see the log of rank 0; check MASTER_ADDR and MASTER_PORT",
        ) from None
    if rank == 0:
        Meeting.store, Meeting.readers = store, range(world if verdict.message else 0)
    verdict.check()
    return store


def check_late_errors() -> None:
    """Raise the error that a rank wrote after the verdict."""
    store = Meeting.store
    if store is not None and store.check([ERROR]):
        StartVerdict.parse(store.get(ERROR)).check()


def report_absence(host: str, port: int, rank: int, world: int, error: str) -> None:
    """Report to all ranks why this rank does not arrive."""
    store = _open(host, port, rank, world, FAILED)
    verdict = StartVerdict(f"rank {rank} failed before it joined the others: {error}", FAILED_HINT)
    if rank == 0:
        store.set(WORLD, str(world))
        store.set(VERDICT, verdict.encode())
        Meeting.store, Meeting.readers = store, range(world)
    _fail(store, rank, verdict)


def _open(host: str, port: int, rank: int, world: int, timeout: timedelta) -> Store:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store: Store = TCPStore(
        host, port, world, is_master=rank == 0, timeout=timeout, wait_for_workers=False
    )
    return store


def _fail(store: Store, rank: int, verdict: StartVerdict) -> None:
    """Write this rank's error, unless the store already has an error."""
    store.compare_set(ERROR, "", verdict.encode())
    store.set(READ.format(rank), "")


def _check_world(store: Store, rank: int, world: int) -> None:
    """Raise if this rank's world size differs from rank 0's."""
    expected = int(store.get(WORLD))
    if expected != world:
        verdict = StartVerdict(
            f"rank {rank} has WORLD_SIZE={world}, rank 0 has {expected}", WORLD_HINT
        )
        _fail(store, rank, verdict)
        verdict.check()


def _judge(store: Store, world: int, join: timedelta, seconds: str) -> StartVerdict:
    """Wait on rank 0 for all ranks or for an error. Return the verdict for all ranks."""
    deadline = time.monotonic() + join.total_seconds()
    keys = [CAME.format(rank) for rank in range(world)]
    while not store.check([ERROR]):
        if store.check(keys):
            return StartVerdict("")
        if time.monotonic() > deadline:
            missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
            more = [f"and {len(missing) - SHOWN} more"] if len(missing) > SHOWN else []
            listed = ", ".join([*missing[:SHOWN], *more])
            return StartVerdict(
                f"ranks did not come {seconds}: rank {listed} of {world}", MISSING_HINT
            )
        time.sleep(POLL)
    return StartVerdict.parse(store.get(ERROR))


def wait_for_readers(timeout: timedelta = ANSWERED) -> None:
    """Wait on rank 0, whose end closes the store, until all ranks have read why they do not start.
    After an error, ranks may still arrive; after missing ranks, only those that arrived count."""
    from torch.distributed import DistError

    store = Meeting.store
    if store is None or not Meeting.readers:
        return
    failed = store.check([ERROR])
    ranks = [rank for rank in Meeting.readers if failed or store.check([CAME.format(rank)])]
    with contextlib.suppress(DistError):  # a rank was killed meanwhile, or never starts
        store.wait([READ.format(rank) for rank in ranks], timeout)
