"""A torch dataset of a rank's micro-batches, in the plan's order, for any training loop.

    micro-batch i  ──►  torch worker i mod W  ──►  DataLoader, which asks its workers in turn

So a DataLoader gives the same micro-batches in the same order with any number of workers. A state
is a position in the plan: where a step begins, it holds for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, Literal, get_args

import torch
from torch.utils.data import IterableDataset, get_worker_info

from ...console.errors import ConfigError, ConfigProblem, PlanError
from ..datasets.cache import Cache
from ..loader.batch import Batch, Batcher
from ..loader.rank_rows import RankReader, RankRows, StepGroup
from ..order.plan import Phase, Plan

Item = Any
"""A dictionary of tensors; for torchtitan, a pair of a dictionary and the labels."""
Names = Literal["headrace", "transformers", "torchtitan", "megatron"]
IGNORED = -100
"""Label without loss, for transformers and torchtitan."""


@dataclass(frozen=True)
class Place:
    """A micro-batch in the plan: its step, and its index in the step."""

    step: int
    index: int = 0


class StreamDataset(IterableDataset[Item]):
    """A rank's micro-batches, from a step on. Use it with `DataLoader(dataset, batch_size=None)`.

    An item is a dictionary. `names="headrace"`: `tokens`, `targets`, `weights`, `positions` and
    `cu_seqlens` as in a `Batch`, `step`, and `rows`, the row numbers in the stream (-1 in padding
    rows). `names="transformers"`: `input_ids`, `labels`, `position_ids`. `names="torchtitan"`: the
    pair of `input` and `positions`, and the labels. `names="megatron"`: `tokens`, `labels`,
    `loss_mask`, `position_ids`, `attention_mask`. A second pass begins where the first one did,
    with and without workers; after a pass that resumed from the states of torch workers, where the
    dataset itself begins.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        micro_batch: int = 1,
        rank: int = 0,
        world: int = 1,
        names: Names = "headrace",
        cache: Cache | None = None,
    ) -> None:
        if not 0 <= rank < world or micro_batch < 1:
            problem = (
                f"rank {rank} of {world}, {micro_batch} rows a micro-batch: ranks count from 0, "
                "and a micro-batch has a row or more"
            )
            raise ConfigError("the dataset", [ConfigProblem("", problem)])
        if names not in get_args(Names):
            problem = (
                f"names are {', '.join(get_args(Names)[:-1])} or {get_args(Names)[-1]}, not {names}"
            )
            raise ConfigError("the dataset", [ConfigProblem("names", problem)])
        self.plan, self.micro_batch = plan, micro_batch
        self.rank, self.world = rank, world
        self.names, self.cache = names, cache
        self.start = self.next = Place(plan.first_step)
        """Where every pass begins, and the next micro-batch of this process."""
        self._is_worker_place = False
        """True if `next` counts the micro-batches of this torch worker alone: from its first one in
        a pass on."""
        self._resumes = False
        """True if the next pass, and none after it, begins at `next`."""

    def __len__(self) -> int:
        """Count the micro-batches of a pass, over all workers."""
        remaining = -self.start.index
        for phase in self.plan.phases:
            num_steps = phase.end_step - max(phase.first_step, self.start.step)
            remaining += max(num_steps, 0) * self._count_items(phase)
        return max(remaining, 0)

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        """Return the place of the next micro-batch. A DataLoader with workers reads in their
        copies of this dataset: name the step that comes next."""
        place = self.next if step is None else Place(step)
        state: dict[str, Any] = {"plan": self.plan.hash, "step": place.step, "index": place.index}
        if (decision := self._find_decision(place)) is not None:
            state["decision"] = decision
        worker = get_worker_info() if step is None and self._is_worker_place else None
        if place.index or worker is not None:
            state |= {"world": self.world, "micro_batch": self.micro_batch}
        return state if worker is None else state | {"worker": [worker.id, worker.num_workers]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a place. Within a step it holds for the same ranks and micro-batches alone."""
        if state["plan"] != self.plan.hash:
            raise PlanError(
                f"the state belongs to the plan {state['plan']}, not to {self.plan.hash}",
                hint="open the plan.json that the loop was started with",
            )
        place = Place(state["step"], state.get("index", 0))
        if not self.plan.first_step <= place.step <= self.plan.end_step:
            raise PlanError(
                f"step {place.step} is not in the plan, whose steps are {self.plan.first_step} to "
                f"{self.plan.end_step - 1}"
            )
        if state.get("decision") != self._find_decision(place):
            raise PlanError(
                f"rows before step {place.step} were read by other decisions than those that the "
                "plan has now",
                hint="open the run's folder, not its plan.json; a loop that reads ahead of a run "
                "cannot know what the run decides later",
            )
        worker = get_worker_info()
        this_worker = None if worker is None else [worker.id, worker.num_workers]
        is_worker_place = "worker" in state
        if is_worker_place and state["worker"] != this_worker:
            number, workers = state["worker"]
            raise PlanError(
                f"the state is that of torch worker {number} of {workers}",
                hint="load it with as many workers, or save `state_dict(step=…)`",
            )
        layout = {"world": self.world, "micro_batch": self.micro_batch}
        is_within = place.index or is_worker_place
        if is_within and any(state.get(key) != value for key, value in layout.items()):
            raise PlanError(
                f"the state lies within step {place.step}, on {state.get('world')} ranks with "
                f"micro-batches of {state.get('micro_batch')} rows",
                hint="save a state where a step ends to go on with other ranks or micro-batches",
            )
        self.next = place
        self._is_worker_place = self._resumes = is_worker_place
        if not is_worker_place:
            self.start = place

    def __iter__(self) -> Iterator[Item]:
        resumes, self._resumes = self._resumes, False
        if not resumes:
            self.next, self._is_worker_place = self.start, False
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        worker_rows = WorkerRows(
            plan=self.plan,
            rank=self.rank,
            world=self.world,
            start_step=self.next.step,
            digests=False,
            group_bytes=0,
            micro_batch=self.micro_batch,
            first_index=self.next.index,
            skipped=0 if resumes else number,
            workers=workers,
        )
        batcher = Batcher(self.micro_batch)
        places = pairwise(chain(worker_rows.places(), [Place(self.plan.end_step)]))
        with closing(RankReader(worker_rows, self.cache)) as reader:
            for group, (place, self.next) in zip(reader.groups(), places, strict=True):
                self._is_worker_place = worker is not None
                labels = group.labels
                batch = batcher.make_batch(
                    group, slice(0, len(labels.rows)), labels.documents, labels.boundaries
                )
                yield self._name_tensors(batch, place.step)

    def _name_tensors(self, batch: Batch, step: int) -> Item:
        if self.names == "transformers":
            return _name_for_transformers(batch)
        if self.names == "torchtitan":
            return _name_for_torchtitan(batch)
        if self.names == "megatron":
            return _name_for_megatron(batch)
        return {
            "tokens": batch.tokens,
            "targets": batch.targets,
            "weights": batch.weights,
            "positions": batch.positions,
            "cu_seqlens": batch.cu_seqlens,
            "step": step,
            "rows": torch.from_numpy(batch.rows),
        }

    def _find_decision(self, place: Place) -> str | None:
        """Return the digest of the decision that rules the row before a place; None without one."""
        end_row = self.plan.end_row
        if place.step < self.plan.end_step:
            end_row = self.plan.step(place.step).first_row + (place.index > 0)
        digests = [decision.digest for decision in self.plan.decisions if decision.row < end_row]
        return digests[-1] if digests else None

    def _count_items(self, phase: Phase) -> int:
        return count_items(phase, self.world, self.micro_batch)


def _name_for_transformers(batch: Batch) -> Item:
    """Return the arguments of a causal model of transformers. It shifts the labels itself, so the
    last target of a row, which is the first token of another, has no loss."""
    labels = torch.full_like(batch.targets, IGNORED)
    labels[:, 1:] = _label_targets(batch)[:, :-1]
    return {"input_ids": batch.tokens, "labels": labels, "position_ids": batch.positions.long()}


def _name_for_torchtitan(batch: Batch) -> Item:
    """Return the arguments of a model and the labels, which torchtitan does not shift."""
    inputs = {"input": batch.tokens, "positions": batch.positions.long()}
    return inputs, _label_targets(batch)


def _name_for_megatron(batch: Batch) -> Item:
    """Return what `get_batch` of Megatron's scripts reads. The mask is [B, 1, L, L], true where
    attention may not look: at later tokens and at those of further documents."""
    places = torch.arange(batch.tokens.shape[1])
    starts = places - batch.positions  # [B, L], of the document's part in the row
    hidden = (places[None, :] > places[:, None]) | (places < starts[:, :, None])
    return {
        "tokens": batch.tokens,
        "labels": batch.targets,
        "loss_mask": batch.weights,
        "position_ids": batch.positions.long(),
        "attention_mask": hidden[:, None],
    }


def _label_targets(batch: Batch) -> torch.Tensor:
    """Return the targets, IGNORED where they have no loss."""
    if bool(((batch.weights != 0) & (batch.weights != 1)).any()):
        raise ConfigError(
            "the dataset",
            [ConfigProblem("names", "labels carry no loss weight but 0 and 1")],
        )
    return batch.targets.masked_fill(batch.weights == 0, IGNORED)


@dataclass(frozen=True, kw_only=True)
class WorkerRows(RankRows):
    """The rows of a torch worker: every `workers`-th micro-batch of a rank, a group each."""

    micro_batch: int
    first_index: int
    """Index of the first micro-batch in the first step."""
    skipped: int
    """Micro-batches before the worker's first one."""
    workers: int

    def places(self) -> Iterator[Place]:
        """Yield the places of the worker's micro-batches."""
        return (place for _, place in self._items())

    def groups(self) -> Iterator[StepGroup]:
        for phase, place in self._items():
            first = phase.batch_rows * self.rank // self.world
            end = phase.batch_rows * (self.rank + 1) // self.world
            start = min(first + place.index * self.micro_batch, end)
            share = range(start, min(start + self.micro_batch, end))
            yield StepGroup(phase, range(place.step, place.step + 1), share)

    def _items(self) -> Iterator[tuple[Phase, Place]]:
        number = -self.skipped
        for phase in self.plan.phases:
            num_items = count_items(phase, self.world, self.micro_batch)
            for step in range(max(phase.first_step, self.start_step), phase.end_step):
                for index in range(self.first_index * (step == self.start_step), num_items):
                    if number >= 0 and number % self.workers == 0:
                        yield phase, Place(step, index)
                    number += 1


def count_items(phase: Phase, world: int, micro_batch: int) -> int:
    """Count a rank's micro-batches in a step; all ranks have as many."""
    max_rows = -(-phase.batch_rows // world)
    return -(-max_rows // micro_batch)
