"""Degrees of parallelism.

ranks = pp × dp × cp × tp       pipeline × data parallel × context parallel × tensor parallel

Experts are split over the innermost ep of a stage's ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

from ...console.config import NameIn
from ...console.errors import ConfigProblem, ConfigProblems, LayoutError
from ...models.config.options.names import AttentionForm, DeltaForm, LongFilterForm, RowForms
from .schedules import PLAIN, SCHEDULES, Orders, Schedule, refusal_reason


@dataclass(frozen=True, kw_only=True)
class LayoutConfig:
    """Degrees of parallelism. Data parallelism takes the ranks that PP, TP and CP leave."""

    pp: int = 1
    """Pipeline parallel: stages, each with a part of the layers."""
    chunks: int = 1
    """Chunks of layers on each stage; more than one for `schedule: interleaved`."""
    schedule: Annotated[str, NameIn(SCHEDULES, refused=refusal_reason)] = PLAIN.name
    """Order of a step's passes. `1f1b`: after a warm-up, forward and backward passes in turn; stage
    s has at most pp − s micro-batches in flight. `gpipe`: all forward passes first; every
    micro-batch is in flight at once. `interleaved`: 1f1b with v chunks on each stage, which makes
    the bubble v times smaller and the messages v times as many."""
    cuts: tuple[int, ...] | None = None
    """First layers of the chunks after the first. Default: the cuts of the fastest simulated
    step."""
    tp: int = 1
    """Tensor parallel: ranks that shard every matrix."""
    cp: int = 1
    """Context parallel: ranks that shard every row."""
    ep: int = 1
    """Expert parallel: ranks that split a `moe` layer's experts. 1, or a multiple of tp that
    divides dp × cp × tp and every layer's number of experts. It adds no ranks."""
    attention: AttentionForm = "a2a"
    """Attention over a sharded row: `a2a` gives each rank whole rows for some heads and sends
    least, and tp × cp must divide the heads; `ring` passes keys and values from rank to rank, for
    any number of heads."""
    hyena_li: LongFilterForm = "states"
    """Hyena-LI's modal filters over a sharded row: `states` passes filter states to the next rank,
    a message that does not grow with the row; `a2a` gives each rank whole rows for some channels,
    for filters by FFT (`method: fft`). Free-form filters always use a2a."""
    delta: DeltaForm = "states"
    """The delta rule over a sharded row: `states` passes a state and a transition matrix to later
    ranks, a message that does not grow with the row; `a2a` gives each rank whole rows for some
    heads, and tp × cp must divide the value heads."""

    def __post_init__(self) -> None:
        if problems := list(self._problems()):
            raise ConfigProblems(problems)

    def _problems(self) -> Iterator[ConfigProblem]:
        """Yield degrees that are too small, and contradictions between settings."""
        for axis in ("pp", "chunks", "tp", "cp", "ep"):
            if getattr(self, axis) < 1:
                yield ConfigProblem(axis, f"must be at least 1, not {getattr(self, axis)}")
        if (self.chunks > 1) != self.pipeline_schedule.has_chunks:
            chunked = [name for name, schedule in SCHEDULES.items() if schedule.has_chunks]
            yield ConfigProblem(
                "schedule",
                f"schedule={self.schedule} and chunks={self.chunks}: {' and '.join(chunked)} "
                f"need{'s' * (len(chunked) == 1)} at least 2 chunks on each stage, and the other "
                "schedules have one",
            )
        if self.chunks > 1 and self.pp == 1:
            yield ConfigProblem("chunks", f"chunks={self.chunks} needs at least 2 stages (pp)")
        if self.cuts is None:
            return
        if len(self.cuts) != self.all_chunks - 1:
            yield ConfigProblem(
                "cuts",
                f"has {len(self.cuts)} layers, and {self.all_chunks} chunks (pp × chunks) need "
                f"{self.all_chunks - 1}",
            )
        if any(first >= end for first, end in pairwise((0, *self.cuts))):
            yield ConfigProblem("cuts", f"must increase from above 0: {list(self.cuts)}")

    @property
    def all_chunks(self) -> int:
        """Chunks of all stages together."""
        return self.pp * self.chunks

    @property
    def row_forms(self) -> RowForms:
        """How operators work on rows that ranks share."""
        return {"attention": self.attention, "hyena_li": self.hyena_li, "delta": self.delta}

    @property
    def holds_all_layers(self) -> bool:
        """True if every rank holds all layers, or a shard of every layer: there are no stages."""
        return self.pp == 1

    @property
    def pipeline_schedule(self) -> Schedule:
        """The schedule that `schedule` names."""
        return SCHEDULES[self.schedule]

    def orders(self, micro_batches: int) -> Orders:
        """Return each stage's passes in a step with so many micro-batches."""
        return self.pipeline_schedule.orders(self.pp, self.chunks, micro_batches)

    @property
    def shards(self) -> int:
        """Ranks that hold one model together: pp × tp × cp."""
        return self.pp * self.tp * self.cp

    def data_parallel(self, processes: int) -> int:
        """Return the data-parallel degree on so many processes."""
        if processes % self.shards:
            stages = f"layout.pp={self.pp} × " if self.pp > 1 else ""
            raise LayoutError(
                f"{stages}layout.tp={self.tp} × layout.cp={self.cp} does not divide {processes} "
                f"process{'es' * (processes > 1)}",
                hint=f"use processes={self.shards} or a multiple of it, or a smaller layout",
            )
        return processes // self.shards

    def rank_name(self, rank: int, processes: int) -> str:
        """Name a rank in messages, with its stage."""
        if self.pp == 1:
            return f"rank {rank}"
        return f"rank {rank} (stage {rank * self.pp // processes})"
