"""Whole tensors from the fragments of all ranks, and back.

Each tensor has an owner. Writers send their ranges to the owner, which computes with the whole
tensor and sends every holder its range. Ranges lie where ZeRO, FSDP2 and tensor parallelism put
them; of the copies and replicas of a range one sends it, and all receive it.

    rank 0   [a a a b]        owner of a: rank 0        one all-to-all there, one back:
    rank 1   [b b c c]        owner of b: rank 1        every element travels once each way
    rank 2   [c c c c]        owner of c: rank 2        (and to each copy and replica)

Elements are copied, never summed: the whole tensor has the same bits in every layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from ...checkpoints.fragments import Fragment


class Exchange:
    """Computes with whole tensors of which each rank holds ranges."""

    def __init__(
        self, fragments: Sequence[Fragment], costs: Mapping[str, float], device: torch.device
    ) -> None:
        """`fragments` are this rank's; `costs` estimates the work for each tensor, and is the same
        on every rank. Collective."""
        self.device = device
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        nothing = torch.empty(0, device="meta")
        mine = [(len(each.data), replace(each, data=nothing)) for each in fragments]
        self.held = [mine] * self.world
        dist.all_gather_object(self.held, mine)
        self.owners = owners(costs, self.world)

    def __call__(
        self, fragments: Sequence[Fragment], compute: Callable[[str, Tensor], Tensor]
    ) -> None:
        """Replace the elements of the fragments by those of `compute(parameter, whole tensor)`.

        The fragments are those of the constructor, in the same order. Collective.
        """
        going = [[f.data for f in self._owned_by(rank, fragments) if f.writes] for rank in self.all]
        sizes = [[n for n, f in self._ours(held) if f.writes] for held in self.held]
        arrived = self._send(going, sizes)
        whole: dict[str, Tensor] = {}
        for held, ranges in zip(self.held, arrived, strict=True):
            there = [f for _, f in self._ours(held) if f.writes]
            for fragment, data in zip(there, ranges, strict=True):
                if fragment.parameter not in whole:
                    whole[fragment.parameter] = data.new_empty(fragment.shape)
                replace(fragment, data=data).give(whole[fragment.parameter])
        for name in whole:
            whole[name] = compute(name, whole[name])
        answers: list[list[Tensor]] = [[] for _ in self.all]
        for rank, held in enumerate(self.held):
            for numel, fragment in self._ours(held):
                tensor = whole[fragment.parameter]
                answers[rank].append(tensor.new_empty(numel))
                replace(fragment, data=answers[rank][-1]).take(tensor)
        due = [self._owned_by(rank, fragments) for rank in self.all]
        back = self._send(answers, [[len(f.data) for f in there] for there in due])
        for there, ranges in zip(due, back, strict=True):
            for fragment, data in zip(there, ranges, strict=True):
                fragment.data.copy_(data)

    @property
    def all(self) -> range:
        return range(self.world)

    def _owned_by(self, rank: int, fragments: Sequence[Fragment]) -> list[Fragment]:
        return [each for each in fragments if self.owners[each.parameter] == rank]

    def _ours(self, held: Sequence[tuple[int, Fragment]]) -> list[tuple[int, Fragment]]:
        return [each for each in held if self.owners[each[1].parameter] == self.rank]

    def _send(
        self, pieces: Sequence[Sequence[Tensor]], sizes: Sequence[Sequence[int]]
    ) -> list[list[Tensor]]:
        """Send `pieces[r]` to rank r. Return what each rank sent, in pieces of `sizes[r]`."""
        nothing = torch.empty(0, device=self.device)
        flat = torch.cat([nothing, *(piece for there in pieces for piece in there)])
        received = flat.new_empty(sum(map(sum, sizes)))
        outgoing = [sum(map(len, there)) for there in pieces]
        dist.all_to_all_single(received, flat, [sum(there) for there in sizes], outgoing)
        ranges = iter(received.split([size for there in sizes for size in there]))
        return [[next(ranges) for _ in there] for there in sizes]


def owners(costs: Mapping[str, float], world: int) -> dict[str, int]:
    """Return the owner of each tensor: the dearest first, each to the rank with the least work."""
    work = [0.0] * world
    found = {}
    for name in sorted(costs, key=lambda name: (-costs[name], name)):
        rank = work.index(min(work))
        work[rank] += costs[name]
        found[name] = rank
    return found
