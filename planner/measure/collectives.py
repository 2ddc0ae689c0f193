"""Times of collectives by size and group, as nccl-tests measures them.

All groups with one shape run at once, as in training. The slowest rank decides, and the median over
several trials counts. It needs torch alone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from ...trainer.cluster.ranks import initialise
from ...trainer.layout.devices import local_device
from ..hardware.links import COLLECTIVES, bus_factor
from .clock import Clock

TIMEOUT = timedelta(minutes=10)
TRIALS = 5
MAX_RUNS = 50
"""Runs per trial."""
ITEM = 4
"""Bytes per element: fp32."""
UNSHARDED = ("all-reduce", "p2p")
"""Collectives in which a rank sends and receives the whole size; in others the ranks share it."""
HEADER = (
    "#       size         count      type   redop     ranks       time   algbw   busbw",
    "#        (B)    (elements)                                   (us)  (GB/s)  (GB/s)",
)


@dataclass(frozen=True)
class GroupShape:
    """Groups with `per_node` ranks on `nodes` nodes."""

    per_node: int
    nodes: int

    @property
    def ranks(self) -> int:
        return self.per_node * self.nodes

    @property
    def link(self) -> str:
        return "node" if self.nodes == 1 else "network"


@dataclass(frozen=True)
class World:
    """This run's ranks, equally many on all nodes."""

    rank: int
    size: int
    per_node: int
    device: torch.device

    @property
    def nodes(self) -> int:
        return self.size // self.per_node

    def shapes(self) -> list[GroupShape]:
        """List the measured shapes: within a node, then across nodes."""
        within = [GroupShape(ranks, 1) for ranks in _powers_between(2, self.per_node)]
        across = [
            GroupShape(per_node, nodes)
            for nodes in _powers_between(2, self.nodes)
            for per_node in sorted({1, self.per_node})
        ]
        return within + across

    def members(self, shape: GroupShape) -> list[list[int]]:
        """List the ranks in every group with this shape."""
        return [
            [(node + i) * self.per_node + local_rank + j
             for i in range(shape.nodes) for j in range(shape.per_node)]
            for node in range(0, self.nodes - shape.nodes + 1, shape.nodes)
            for local_rank in range(0, self.per_node - shape.per_node + 1, shape.per_node)
        ]  # fmt: skip

    def slowest(self, seconds: float) -> float:
        """Return the maximum over all ranks. Collective: the ranks wait here."""
        maximum = torch.tensor([seconds], device=self.device, dtype=torch.float64)
        dist.all_reduce(maximum, dist.ReduceOp.MAX)
        return float(maximum.item())


@dataclass(frozen=True)
class CollectiveTime:
    """A measured collective."""

    collective: str
    ranks: int
    per_node: int
    bytes: int
    seconds: float

    @property
    def count(self) -> int:
        """Elements per rank, as nccl-tests counts them: a shard where ranks hold shards."""
        num_shards = 1 if self.collective in UNSHARDED else self.ranks
        return self.bytes // ITEM // num_shards

    @property
    def algbw(self) -> float:
        """Size in bytes per second."""
        return self.bytes / self.seconds

    @property
    def busbw(self) -> float:
        """Bus bandwidth: bytes per second on the busiest link."""
        return bus_factor(self.collective, self.ranks) * self.algbw

    @property
    def row(self) -> dict[str, Any]:
        """Table columns."""
        return {
            "collective": self.collective,
            "ranks": self.ranks,
            "ranks on a node": self.per_node,
            "bytes": self.bytes,
            "count": self.count,
            "us": self.seconds * 1e6,
            "algbw GB/s": self.algbw / 1e9,
            "busbw GB/s": self.busbw / 1e9,
        }

    def line(self) -> str:
        """Format the line that nccl-tests prints."""
        redop = "sum" if "reduce" in self.collective else "none"
        return (
            f"{self.bytes:>12} {self.count:>13}     float {redop:>7}"
            f" {self.ranks:>4} ({self.per_node:>2}) {self.seconds * 1e6:>10.2f}"
            f" {self.algbw / 1e9:>7.2f} {self.busbw / 1e9:>7.2f}"
        )


def join_world(kind: Literal["cpu", "cuda"], store: str | None = None) -> World:
    """Join the launcher's process group, or the one that meets in the file `store`."""
    device = local_device(kind)
    backend = "gloo"
    if kind == "cuda":
        torch.cuda.set_device(device)
        backend = "nccl"
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if store is None:
        initialise(backend, TIMEOUT)
    else:
        dist.init_process_group(
            backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=TIMEOUT
        )
    return World(rank, size, int(os.environ.get("LOCAL_WORLD_SIZE", size)), device)


@dataclass(frozen=True)
class RankGroup:
    """This rank's group; without ranks if no group needs this rank."""

    shape: GroupShape
    ranks: Sequence[int]
    handle: Any

    @property
    def idle(self) -> bool:
        return not self.ranks


@contextlib.contextmanager
def open_group(world: World, shape: GroupShape) -> Iterator[RankGroup]:
    """Make all groups with a shape. Collective: all ranks in the world call it."""
    group = RankGroup(shape, (), None)
    for ranks in world.members(shape):
        handle = dist.new_group(ranks, timeout=TIMEOUT)
        if world.rank in ranks:
            group = RankGroup(shape, ranks, handle)
    yield group
    if not group.idle:
        dist.destroy_process_group(group.handle)


def sweep(
    world: World, group: RankGroup, collective: str, sizes: Sequence[int], clock: Clock
) -> Iterator[CollectiveTime]:
    """Time a collective by size. Collective: all ranks in the world call it."""
    shape = group.shape
    for size in sizes:
        rounded_size = round_size(collective, size, shape.ranks)
        run = None if group.idle else make_collective(collective, rounded_size, group, world)
        seconds = _time_run(run, world, clock)
        yield CollectiveTime(collective, shape.ranks, shape.per_node, rounded_size, seconds)


def make_collective(
    collective: str, size: int, rank_group: RankGroup, world: World
) -> Callable[[], object]:
    """Return a function that runs the collective once, asynchronously on a GPU."""
    ranks, group = rank_group.ranks, rank_group.handle
    full = torch.ones(size // ITEM, device=world.device)
    shard = full[: len(full) // len(ranks)].clone()
    received = torch.empty_like(full)
    position = list(ranks).index(world.rank)
    next_rank, previous_rank = ranks[(position + 1) % len(ranks)], ranks[position - 1]

    def send_receive() -> None:
        transfers = [
            dist.P2POp(dist.isend, full, next_rank, group),
            dist.P2POp(dist.irecv, received, previous_rank, group),
        ]
        for request in dist.batch_isend_irecv(transfers):
            request.wait()

    return {
        "all-reduce": lambda: dist.all_reduce(full, group=group),
        "all-gather": lambda: dist.all_gather_into_tensor(full, shard, group=group),
        "reduce-scatter": lambda: dist.reduce_scatter_tensor(shard, full, group=group),
        "all-to-all": lambda: dist.all_to_all_single(received, full, group=group),
        "p2p": send_receive,
    }[collective]


def select_collectives(names: Sequence[str]) -> list[str]:
    """Return the named collectives, or all."""
    return [name for name in COLLECTIVES if name in names] if names else list(COLLECTIVES)


def round_size(collective: str, size: int, ranks: int) -> int:
    """Round down to elements that the ranks share equally, at least one."""
    unit = ITEM if collective in UNSHARDED else ITEM * ranks
    return max(size // unit, 1) * unit


def _time_run(run: Callable[[], object] | None, world: World, clock: Clock) -> float:
    """Return seconds per run on the slowest rank: the median over trials."""

    def time_trial(runs: int) -> float:
        def repeat() -> None:
            for _ in range(runs):
                if run is not None:
                    run()

        world.slowest(0.0)
        return world.slowest(clock.once(repeat)) / runs

    time_trial(1)
    once = max(time_trial(1), 1e-7)  # a rank that waits needs almost no CPU time
    runs = max(1, min(MAX_RUNS, int(clock.budget / TRIALS / once)))
    return sorted(time_trial(runs) for _ in range(TRIALS))[TRIALS // 2]


def _powers_between(first: int, last: int) -> list[int]:
    """List the powers of two from `first` up to `last`, and `last`."""
    numbers = {last} if last >= first else set()
    while first < last:
        numbers.add(first)
        first *= 2
    return sorted(numbers)
