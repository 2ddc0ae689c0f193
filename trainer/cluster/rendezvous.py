"""Rendezvous of ranks that a launcher starts and does not watch: a store of rank 0.

    rank 0   opens the store ─► its world size ─► waits for all ranks, or an error ─► the verdict
    rank n   compares the world size ─► "I have come" ─► waits for the verdict

A rank that fails before it comes writes its error to the store at its exit, so that the others end
with that error at once. A rank of another world size does the same. If it comes after the verdict,
rank 0 finds its error before the first step.
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
"""Keys of the store: rank 0's world size; the first error of a rank; what all ranks do."""
CAME, READ = f"{KEY}came/{{}}", f"{KEY}read/{{}}"
"""Keys of each rank: it has come; it has read the verdict, or failed."""
POLL = 0.1
"""Seconds between two looks of rank 0 at the store."""
ANSWERED = timedelta(seconds=30)
"""Time for rank 0 to write the verdict, and for the others to read it."""
FAILED = timedelta(seconds=60)
"""Time in which a rank that failed tries to reach rank 0."""
MISSING_HINT = "these ranks failed, or did not start: see their logs"
FAILED_HINT = "mend what that rank says, and start all ranks again"
WORLD_HINT = (
    "start all ranks of a run with the same WORLD_SIZE, and no others with its MASTER_ADDR and "
    "MASTER_PORT"
)
SHOWN = 16
"""Most missing ranks that an error lists."""


class Verdict(NamedTuple):
    """Why the ranks do not start; empty if they do."""

    what: str
    hint: str = ""

    @classmethod
    def of(cls, text: bytes) -> Verdict:
        return cls(*json.loads(text))

    def to_json(self) -> str:
        return json.dumps(self)

    def check(self) -> None:
        if self.what:
            raise RunError(self.what, hint=self.hint)


class Meeting:
    """The rendezvous of this process; rank 0 keeps its store."""

    begun = False
    """True once this rank has gone there."""
    failure: str | None = None
    """Error of this rank."""
    store: Store | None = None
    readers = range(0)
    """Ranks that read the verdict in the store of this one, which ends."""


def meet(host: str, port: int, rank: int, world: int, join: timedelta) -> Store:
    """Return the store of rank 0, once all ranks have come to it. Raise if some do not come within
    `join`, if one failed before it came, or if one has another world size."""
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
            store.set(VERDICT, _judge(store, world, join, seconds).to_json())
        store.wait([VERDICT], join + ANSWERED)
        verdict = Verdict.of(store.get(VERDICT))
        if verdict.what:
            store.set(READ.format(rank), "")
    except DistError as error:
        raise RunError(
            f"rank {rank} did not reach rank 0 at {host}:{port} {seconds}",
            where=str(error).partition("\n")[0],
            hint="see the log of rank 0; check MASTER_ADDR and MASTER_PORT",
        ) from None
    if rank == 0:
        Meeting.store, Meeting.readers = store, range(world if verdict.what else 0)
    verdict.check()
    return store


def check_late_errors() -> None:
    """Raise the error that a rank wrote after the ranks met."""
    store = Meeting.store
    if store is not None and store.check([ERROR]):
        Verdict.of(store.get(ERROR)).check()


def tell(host: str, port: int, rank: int, world: int, error: str) -> None:
    """Tell the other ranks why this rank does not come."""
    store = _open(host, port, rank, world, FAILED)
    verdict = Verdict(f"rank {rank} failed before it joined the others: {error}", FAILED_HINT)
    if rank == 0:
        store.set(WORLD, str(world))
        store.set(VERDICT, verdict.to_json())
        Meeting.store, Meeting.readers = store, range(world)
    _fail(store, rank, verdict)


def _open(host: str, port: int, rank: int, world: int, timeout: timedelta) -> Store:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store: Store = TCPStore(
        host, port, world, is_master=rank == 0, timeout=timeout, wait_for_workers=False
    )
    return store


def _fail(store: Store, rank: int, verdict: Verdict) -> None:
    """Write the error of this rank, unless another was first."""
    store.compare_set(ERROR, "", verdict.to_json())
    store.set(READ.format(rank), "")


def _check_world(store: Store, rank: int, world: int) -> None:
    """Raise if this rank has another world size than rank 0."""
    expected = int(store.get(WORLD))
    if expected != world:
        verdict = Verdict(f"rank {rank} has WORLD_SIZE={world}, rank 0 has {expected}", WORLD_HINT)
        _fail(store, rank, verdict)
        verdict.check()


def _judge(store: Store, world: int, join: timedelta, seconds: str) -> Verdict:
    """Wait on rank 0 for all ranks, or for the error of one. Return what all are to do."""
    deadline = time.monotonic() + join.total_seconds()
    names = [CAME.format(rank) for rank in range(world)]
    while not store.check([ERROR]):
        if store.check(names):
            return Verdict("")
        if time.monotonic() > deadline:
            missing = [str(rank) for rank, name in enumerate(names) if not store.check([name])]
            more = [f"and {len(missing) - SHOWN} more"] if len(missing) > SHOWN else []
            listed = ", ".join([*missing[:SHOWN], *more])
            return Verdict(f"ranks did not come {seconds}: rank {listed} of {world}", MISSING_HINT)
        time.sleep(POLL)
    return Verdict.of(store.get(ERROR))


def wait_for_readers(timeout: timedelta = ANSWERED) -> None:
    """Wait on rank 0, whose end closes the store, until the others have read why they do not start.
    After an error some may still be on their way; missing ranks are not waited for again."""
    from torch.distributed import DistError

    store = Meeting.store
    if store is None or not Meeting.readers:
        return
    failed = store.check([ERROR])
    ranks = [rank for rank in Meeting.readers if failed or store.check([CAME.format(rank)])]
    with contextlib.suppress(DistError):  # a rank was killed meanwhile, or does not start
        store.wait([READ.format(rank) for rank in ranks], timeout)
