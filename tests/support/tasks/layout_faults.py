"""Faults of a layout, which the comparison with one rank must find (see layouts.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from headrace.models.parallel.local_shard import LocalShard
from headrace.trainer.checkpoints.fragments import Fragment
from headrace.trainer.engines import update as steps_of
from headrace.trainer.engines.fsdp.one_rank_engine import OneRank
from headrace.trainer.engines.fsdp.whole_weights import WholeWeights
from headrace.trainer.engines.optimizers.exchange import Exchange
from headrace.trainer.layout.groups import Parallel

sum_copies = steps_of.sum_copies


@contextmanager
def unsummed(parallel: Parallel) -> Iterator[None]:
    """Gradients are not summed over copies."""
    with mock.patch.object(steps_of, "sum_copies", lambda gradients: None):
        yield


@contextmanager
def mixed(parallel: Parallel) -> Iterator[None]:
    """Gradients of different experts are summed."""

    def faulty(gradients: Sequence[Fragment]) -> None:
        for gradient in gradients:
            if gradient.shard.experts:
                dist.all_reduce(gradient.data, group=parallel.axes.experts.group)
        sum_copies(gradients)

    with mock.patch.object(steps_of, "sum_copies", faulty):
        yield


@contextmanager
def wide(parallel: Parallel) -> Iterator[None]:
    """FSDP2 gathers no matrix in FP8."""
    with mock.patch("headrace.models.layers.fp8_gather.gather_matrices", lambda *_: None):
        yield


@contextmanager
def counted_twice(parallel: Parallel) -> Iterator[None]:
    """Every holder of a copy counts it in the norm."""
    with mock.patch.object(LocalShard, "stored", property(lambda self: True)):
        yield


@contextmanager
def other_rows(parallel: Parallel) -> Iterator[None]:
    """The first stage reads the rows of the next data-parallel rank."""

    def faulty(self: Parallel) -> int:
        return (self.batch.rank + (self.pipe.stage == 0)) % self.batch.size

    with mock.patch.object(Parallel, "dp_rank", property(faulty)):
        yield


@contextmanager
def own_ranges(parallel: Parallel) -> Iterator[None]:
    """Each rank orthogonalizes its own range of a matrix, zeros elsewhere."""

    def faulty(self: Exchange, fragments: Any, compute: Any) -> None:
        for fragment in fragments:
            whole = torch.zeros(fragment.shape)
            fragment.give(whole)
            fragment.take(compute(fragment.parameter, whole))

    with mock.patch.object(Exchange, "__call__", faulty):
        yield


@contextmanager
def late_weights(parallel: Parallel) -> Iterator[None]:
    """Masters are rounded into the weights before an update, not after it."""
    step = OneRank.step

    def faulty(self: OneRank, lr: float, finite: torch.Tensor) -> None:
        self.weights.refresh()
        with mock.patch.object(self.weights, "refresh"):
            step(self, lr, finite)

    with mock.patch.object(OneRank, "step", faulty):
        yield


@contextmanager
def half_sums(parallel: Parallel) -> Iterator[None]:
    """Gradients of micro-batches are summed in half precision."""
    add = WholeWeights.add_pending

    def faulty(self: WholeWeights) -> None:
        add(self)
        for master in self.masters.values():
            if master.grad is not None:
                master.grad.copy_(master.grad.bfloat16())

    with mock.patch.object(WholeWeights, "add_pending", faulty):
        yield


FAULTS: dict[str, Callable[[Parallel], Any]] = {
    "unsummed": unsummed,
    "mixed": mixed,
    "counted twice": counted_twice,
    "other rows": other_rows,
    "own ranges": own_ranges,
    "wide": wide,
    "late weights": late_weights,
    "half sums": half_sums,
}
