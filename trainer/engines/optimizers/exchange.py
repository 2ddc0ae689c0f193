"""Gather whole tensors from the fragments of all ranks, compute with them, and scatter the results.

A tensor has an owner. Writers send their ranges to the owner, which computes with the whole tensor
and returns the ranges to all ranks that hold them. ZeRO, FSDP2 and tensor parallelism decide the
ranges; a single copy or replica of a range sends it, and all receive it.

    rank 0   [a a a b]        owner of a: rank 0        an all-to-all to the owners, and back:
    rank 1   [b b c c]        owner of b: rank 1        an element travels once in each direction
    rank 2   [c c c c]        owner of c: rank 2        (and to all copies and replicas)

Elements are copied, never summed: the whole tensor has the same bits in all layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from ...checkpoints.fragments import Fragment


class Exchange:
    """Computes with whole tensors of which ranks hold ranges."""

    def __init__(
        self, fragments: Sequence[Fragment], costs: Mapping[str, float], device: torch.device
    ) -> None:
        """`fragments` are this rank's; `costs` estimates the work by tensor, equally on all ranks.
        Collective."""
        self.device = device
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        no_data = torch.empty(0, device="meta")
        ranges = [(len(fragment.data), replace(fragment, data=no_data)) for fragment in fragments]
        self.ranges_by_rank = [ranges] * self.world_size
        """Length and fragment, without data."""
        dist.all_gather_object(self.ranges_by_rank, ranges)
        self.owners = assign_owners(costs, self.world_size)

    def __call__(
        self, fragments: Sequence[Fragment], compute: Callable[[str, Tensor], Tensor]
    ) -> None:
        """Replace the fragments' elements by those of `compute(parameter, whole tensor)`.

        The fragments are those of the constructor, in the same order. Collective.
        """
        by_owner = [self._owned_by(rank, fragments) for rank in range(self.world_size)]
        tensors = self._gather(by_owner)
        for name in tensors:
            tensors[name] = compute(name, tensors[name])
        self._scatter(tensors, by_owner)

    def _gather(self, by_owner: Sequence[Sequence[Fragment]]) -> dict[str, Tensor]:
        """Send this rank's ranges to their owners. Return the whole tensors that this rank owns."""
        outgoing = [[f.data for f in fragments if f.writes] for fragments in by_owner]
        incoming = [
            [(numel, fragment) for numel, fragment in self._own_ranges(rank) if fragment.writes]
            for rank in range(self.world_size)
        ]
        received = self._all_to_all(outgoing, [[n for n, _ in ranges] for ranges in incoming])
        tensors: dict[str, Tensor] = {}
        for ranges, data_of_rank in zip(incoming, received, strict=True):
            for (_, fragment), data in zip(ranges, data_of_rank, strict=True):
                if fragment.parameter not in tensors:
                    tensors[fragment.parameter] = data.new_empty(fragment.shape)
                replace(fragment, data=data).give(tensors[fragment.parameter])
        return tensors

    def _scatter(
        self, tensors: Mapping[str, Tensor], by_owner: Sequence[Sequence[Fragment]]
    ) -> None:
        """Send the ranges of this rank's tensors to all ranks that hold them. Overwrite this rank's
        fragments with the ranges from their owners."""
        outgoing: list[list[Tensor]] = [[] for _ in range(self.world_size)]
        for rank, ranges in enumerate(outgoing):
            for numel, fragment in self._own_ranges(rank):
                tensor = tensors[fragment.parameter]
                ranges.append(tensor.new_empty(numel))
                replace(fragment, data=ranges[-1]).take(tensor)
        sizes = [[len(fragment.data) for fragment in fragments] for fragments in by_owner]
        received = self._all_to_all(outgoing, sizes)
        for fragments, ranges in zip(by_owner, received, strict=True):
            for fragment, data in zip(fragments, ranges, strict=True):
                fragment.data.copy_(data)

    def _owned_by(self, rank: int, fragments: Sequence[Fragment]) -> list[Fragment]:
        return [fragment for fragment in fragments if self.owners[fragment.parameter] == rank]

    def _own_ranges(self, rank: int) -> list[tuple[int, Fragment]]:
        """Return the ranges on `rank` whose tensors this rank owns."""
        return [
            (numel, fragment)
            for numel, fragment in self.ranges_by_rank[rank]
            if self.owners[fragment.parameter] == self.rank
        ]

    def _all_to_all(
        self, outgoing: Sequence[Sequence[Tensor]], sizes: Sequence[Sequence[int]]
    ) -> list[list[Tensor]]:
        """Send `outgoing[r]` to rank r. Return the ranges from rank r, of lengths `sizes[r]`."""
        no_data = torch.empty(0, device=self.device)
        sent = torch.cat([no_data, *(data for ranges in outgoing for data in ranges)])
        received = sent.new_empty(sum(map(sum, sizes)))
        sent_sizes = [sum(map(len, ranges)) for ranges in outgoing]
        dist.all_to_all_single(received, sent, [sum(numels) for numels in sizes], sent_sizes)
        data = iter(received.split([numel for numels in sizes for numel in numels]))
        return [[next(data) for _ in numels] for numels in sizes]


def assign_owners(costs: Mapping[str, float], world_size: int) -> dict[str, int]:
    """Return the owner's rank by tensor: the costliest tensor first, to the rank with the lowest
    load."""
    load = [0.0] * world_size
    owners = {}
    for name in sorted(costs, key=lambda name: (-costs[name], name)):
        rank = load.index(min(load))
        load[rank] += costs[name]
        owners[name] = rank
    return owners
