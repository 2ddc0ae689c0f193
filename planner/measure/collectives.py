"""Times of collectives by size and group, as nccl-tests takes them.

All groups of a shape run at once, as in training. A time is that of the slowest rank, and the
median of several trials. It needs torch alone.
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
MOST = 50
"""Most runs of a trial."""
ITEM = 4
"""Bytes of an element: fp32."""
WHOLE = ("all-reduce", "p2p")
"""Collectives in which each rank sends and receives the whole size; the others share it."""
HEADER = (
    "#       size         count      type   redop     ranks       time   algbw   busbw",
    "#        (B)    (elements)                                   (us)  (GB/s)  (GB/s)",
)


@dataclass(frozen=True)
class Shape:
    """A kind of group: `per_node` ranks on each of `nodes` nodes."""

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
    """Ranks of this run, equally many on each node."""

    rank: int
    size: int
    per_node: int
    device: torch.device

    @property
    def nodes(self) -> int:
        return self.size // self.per_node

    def shapes(self) -> list[Shape]:
        """Return the measured kinds of groups: within a node and across nodes."""
        within = [Shape(ranks, 1) for ranks in _powers(2, self.per_node)]
        places = sorted({1, self.per_node})
        across = [Shape(each, nodes) for nodes in _powers(2, self.nodes) for each in places]
        return within + across

    def members(self, shape: Shape) -> list[list[int]]:
        """Return the ranks of each group of a shape."""
        return [
            [(node + i) * self.per_node + place + j
             for i in range(shape.nodes) for j in range(shape.per_node)]
            for node in range(0, self.nodes - shape.nodes + 1, shape.nodes)
            for place in range(0, self.per_node - shape.per_node + 1, shape.per_node)
        ]  # fmt: skip

    def slowest(self, seconds: float) -> float:
        """Return the greatest number of all ranks. Collective: the ranks wait for each other."""
        number = torch.tensor([seconds], device=self.device, dtype=torch.float64)
        dist.all_reduce(number, dist.ReduceOp.MAX)
        return float(number.item())


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
        """Elements of one rank, as nccl-tests counts them: its part where ranks hold parts."""
        shared = 1 if self.collective in WHOLE else self.ranks
        return self.bytes // ITEM // shared

    @property
    def algbw(self) -> float:
        """Bytes of the size by seconds."""
        return self.bytes / self.seconds

    @property
    def busbw(self) -> float:
        """Bus bandwidth: bytes by seconds on the busiest link."""
        return bus_factor(self.collective, self.ranks) * self.algbw

    @property
    def row(self) -> dict[str, Any]:
        """Columns of the table."""
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
        """Return the line of nccl-tests."""
        redop = "sum" if "reduce" in self.collective else "none"
        return (
            f"{self.bytes:>12} {self.count:>13}     float {redop:>7}"
            f" {self.ranks:>4} ({self.per_node:>2}) {self.seconds * 1e6:>10.2f}"
            f" {self.algbw / 1e9:>7.2f} {self.busbw / 1e9:>7.2f}"
        )


def join(kind: Literal["cpu", "cuda"], store: str | None = None) -> World:
    """Join the process group of the launcher, or of the file `store`."""
    device = local_device(kind)
    backend = "gloo"
    if kind == "cuda":
        torch.cuda.set_device(device)
        backend = "nccl"
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if store is None:
        initialise(backend, TIMEOUT)
    else:
        where = f"file://{store}"
        dist.init_process_group(
            backend, init_method=where, rank=rank, world_size=size, timeout=TIMEOUT
        )
    return World(rank, size, int(os.environ.get("LOCAL_WORLD_SIZE", size)), device)


@dataclass(frozen=True)
class Group:
    """This rank's group of a shape; a rank that no group needs has no ranks."""

    shape: Shape
    ranks: Sequence[int]
    handle: Any

    @property
    def idle(self) -> bool:
        return not self.ranks


@contextlib.contextmanager
def group_of(world: World, shape: Shape) -> Iterator[Group]:
    """Make the groups of a shape, on every rank of the world."""
    group = Group(shape, (), None)
    for ranks in world.members(shape):
        made = dist.new_group(ranks, timeout=TIMEOUT)
        if world.rank in ranks:
            group = Group(shape, ranks, made)
    yield group
    if not group.idle:
        dist.destroy_process_group(group.handle)


def sweep(
    world: World, group: Group, collective: str, sizes: Sequence[int], clock: Clock
) -> Iterator[CollectiveTime]:
    """Yield the time of each size, on every rank of the world."""
    shape = group.shape
    for size in sizes:
        whole = round_size(collective, size, shape.ranks)
        run = None if group.idle else work(collective, whole, group, world)
        seconds = _seconds(run, world, clock)
        yield CollectiveTime(collective, shape.ranks, shape.per_node, whole, seconds)


def work(collective: str, size: int, own: Group, world: World) -> Callable[[], object]:
    """Return a function that runs the collective once, asynchronously on a GPU."""
    ranks, group = own.ranks, own.handle
    whole = torch.ones(size // ITEM, device=world.device)
    part = whole[: len(whole) // len(ranks)].clone()
    other = torch.empty_like(whole)
    place = list(ranks).index(world.rank)
    after, before = ranks[(place + 1) % len(ranks)], ranks[place - 1]

    def send_receive() -> None:
        ends = [
            dist.P2POp(dist.isend, whole, after, group),
            dist.P2POp(dist.irecv, other, before, group),
        ]
        for request in dist.batch_isend_irecv(ends):
            request.wait()

    return {
        "all-reduce": lambda: dist.all_reduce(whole, group=group),
        "all-gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce-scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
        "all-to-all": lambda: dist.all_to_all_single(other, whole, group=group),
        "p2p": send_receive,
    }[collective]


def known(names: Sequence[str]) -> list[str]:
    """Return the collectives of these names; all without names."""
    return [name for name in COLLECTIVES if name in names] if names else list(COLLECTIVES)


def round_size(collective: str, size: int, ranks: int) -> int:
    """Return the size in whole elements, which the ranks share equally."""
    unit = ITEM if collective in WHOLE else ITEM * ranks
    return max(size // unit, 1) * unit


def _seconds(run: Callable[[], object] | None, world: World, clock: Clock) -> float:
    """Return the seconds of one run: the median of the trials, of the slowest rank."""

    def trial(runs: int) -> float:
        def several() -> None:
            for _ in range(runs):
                if run is not None:
                    run()

        world.slowest(0.0)
        return world.slowest(clock.once(several)) / runs

    trial(1)
    once = max(trial(1), 1e-7)  # a rank that waits needs almost no CPU time
    runs = max(1, min(MOST, int(clock.budget / TRIALS / once)))
    return sorted(trial(runs) for _ in range(TRIALS))[TRIALS // 2]


def _powers(first: int, last: int) -> list[int]:
    """Return the powers of two from `first` up to `last`, and `last`."""
    numbers = {last} if last >= first else set()
    while first < last:
        numbers.add(first)
        first *= 2
    return sorted(numbers)
