"""Data of a report, read from the run's folder in one pass over its steps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ....console.errors import RunError
from ....dataplane.runlog import writer as lines
from ....dataplane.runlog.ledger import gap
from ....trainer.checkpoints import store
from ....trainer.folders.folder import RunFolder
from ....trainer.loop.batches import RunPlan
from ....trainer.scores.missing import Missing, missing
from ...board.byte_sizes import ByteSizes, converted, mean_loss
from ...board.runs import SKIPPED, status_of
from .buckets import Buckets, Table
from .candidates import Candidates
from .chunks import CHUNK, chunks, convert, count, line_at
from .stored import StoredRun
from .totals import Totals

MOST_BUCKETS = 2000
"""Buckets of a page's curves: more would not be visible, and the file must open at once."""
LEAST_BUCKETS = 400


@dataclass(frozen=True)
class PhaseShares:
    """A phase, and the shares of the sources in it: planned and realised."""

    name: str
    first_token: int
    tokens: int
    seq_len: int
    batch_rows: int
    steps: int
    planned: list[float]
    realised: list[int]
    """Tokens by source."""


@dataclass(frozen=True)
class RunData:
    stored: StoredRun
    totals: Totals
    table: Table
    """Curves of the steps."""
    held_out_table: Table
    signals_table: Table
    """Curves of the steps that record signals."""
    first: dict[str, Any]
    """First line of the metrics."""
    events: list[dict[str, Any]]
    evaluation: dict[str, Any] | None
    """Last evaluation."""
    scores: list[dict[str, Any]]
    recall: list[dict[str, Any]]
    ledger: str
    """Last hash of the ledger."""
    ledger_damage: str | None
    """What its lines show to be wrong with the ledger."""
    checkpoints: list[int]
    candidates: Candidates
    sizes: ByteSizes | None = None
    """Bytes per token, if the losses are in bits per byte."""

    @classmethod
    def load(
        cls, folder: RunFolder, name: str | None = None, *, chunk_bytes: int = CHUNK
    ) -> RunData:
        return cls.read(StoredRun.open(folder, name), chunk_bytes=chunk_bytes)

    @classmethod
    def read(
        cls,
        run: StoredRun,
        sizes: ByteSizes | None = None,
        runs: int = 1,
        *,
        chunk_bytes: int = CHUNK,
    ) -> RunData:
        """Read a run's lines, as one of `runs` of a page; with `sizes`, in bits per byte. About
        `chunk_bytes` of its metrics are in memory at once."""
        folder = run.folder
        steps, end = count(folder.metrics, chunk_bytes)
        if not steps:
            raise RunError(
                f"the run in {folder.root} has not taken a step yet",
                hint="wait for its first step, or start it with `trainer resume`",
            )
        events = list(lines.read(folder.events))
        most = max(LEAST_BUCKETS, MOST_BUCKETS // runs)
        buckets, candidates = Buckets(steps, most), Candidates()
        totals = Totals(
            steps,
            [source.name for source in run.plan.sources],
            [phase.first_step for phase in run.plan.phases],
            cold={e["step"] for e in events if e["event"] in ("start", "resume")},
            marked={e["step"] for e in events if e["event"] in ("resume", *SKIPPED)},
        )
        for chunk in chunks(folder.metrics, end, chunk_bytes):
            if sizes is not None:
                convert(chunk, sizes.trained)
            for taker in (buckets, totals, candidates):
                taker.add(chunk)
        table = buckets.table()
        return cls(
            stored=run,
            totals=totals,
            table=table,
            held_out_table=_sparse(folder.evaluations, table, sizes, most),
            signals_table=_sparse(folder.signals, table, None, most),
            first=_one_of(line_at(folder.metrics, 0), sizes.trained if sizes else None),
            events=events,
            evaluation=_one_of(lines.last(folder.evaluations), sizes.held_out if sizes else None),
            scores=list(lines.read(folder.scores)),
            recall=list(lines.read(folder.recall)),
            ledger=str((lines.last(folder.ledger) or {}).get("hash", "")),
            ledger_damage=gap(folder.ledger),
            checkpoints=[store.step_of(path) for path in store.committed(folder.checkpoints)],
            candidates=candidates,
            sizes=sizes,
        )

    @property
    def name(self) -> str:
        return self.stored.name

    @property
    def folder(self) -> RunFolder:
        return self.stored.folder

    @property
    def about(self) -> dict[str, Any]:
        return self.stored.about

    @property
    def plan(self) -> RunPlan:
        return self.stored.plan

    @property
    def sources(self) -> list[str]:
        return [source.name for source in self.plan.sources]

    @property
    def steps(self) -> int:
        return self.totals.steps

    @cached_property
    def last(self) -> list[dict[str, Any]]:
        """Lines of the last tenth of the steps, at most 50."""
        sizes = self.sizes
        return [converted(each, sizes.trained) if sizes else each for each in self.totals.last]

    @property
    def last_token(self) -> int:
        """End of the last step; charts end there."""
        return int(self.last[-1]["tokens"])

    @property
    def tokens(self) -> int:
        """Tokens of the steps so far."""
        return self.last_token - self.plan.first_token

    @property
    def status(self) -> str:
        last, ended = self.events[-1] if self.events else None, self.folder.holder_has_ended
        return status_of(last, ended=ended, missing=self.missing)

    @property
    def missing(self) -> list[Missing]:
        """Scores that the run was to have."""
        last = self.plan.last_step if self.plan.last_step in self.checkpoints else None
        own = {name: self.stored.settings.get(f"scores.{name}") for name in ("limit", "ema")}
        return missing(self.stored.settings.get("scores.tasks"), self.scores, last, **own)

    @property
    def error(self) -> str | None:
        """Error of a failed run."""
        last = self.events[-1] if self.events else {}
        return str(last["error"]) if last.get("event") == "fail" else None

    @property
    def restarts(self) -> list[int]:
        """Steps at which the run was resumed."""
        return [each["step"] for each in self.events if each["event"] == "resume"]

    @property
    def skipped(self) -> list[dict[str, Any]]:
        """Events of the skipped steps: their updates are not in the weights."""
        steps = set(self.totals.skipped)
        events = {e["step"]: e for e in self.events if e["event"] in SKIPPED and e["step"] in steps}
        return [events[step] for step in sorted(events)]

    def tokens_at(self, step: int) -> float:
        """Return the tokens at which a marked step began."""
        return self.totals.tokens_after.get(step - 1, float(self.plan.first_token))

    @property
    def loss(self) -> float | None:
        """Mean loss of the last steps."""
        return mean_loss(self.last)

    @property
    def bits(self) -> float | None:
        """Mean loss of the last steps in bits per byte; None where the bytes are not known."""
        if self.sizes is not None:
            return self.loss
        sizes = self.stored.sizes
        return mean_loss([converted(each, sizes.trained) for each in self.last]) if sizes else None

    @property
    def memory(self) -> int:
        """Most bytes that a rank's device has held; 0 where no device counts them."""
        return int(self.totals.memory)

    @property
    def held_out(self) -> float | None:
        """Loss of the last evaluation."""
        return self.evaluation["loss"] if self.evaluation else None

    @property
    def held_out_bits(self) -> float | None:
        """Loss of the last evaluation in bits per byte; None where the bytes are not known."""
        if self.sizes is not None or self.evaluation is None:
            return self.held_out
        sizes = self.stored.sizes
        known = sizes is not None and self.evaluation["sources"].keys() <= sizes.held_out.keys()
        return mean_loss([converted(self.evaluation, sizes.held_out)]) if sizes and known else None

    def phases(self) -> list[PhaseShares]:
        return [
            PhaseShares(
                name=phase.name,
                first_token=phase.first_token,
                tokens=phase.tokens,
                seq_len=phase.seq_len,
                batch_rows=phase.batch_rows,
                steps=phase.steps,
                planned=_planned(phase, len(self.sources)),
                realised=[int(rows) * phase.seq_len for rows in taken],
            )
            for phase, taken in zip(self.plan.phases, self.totals.rows, strict=True)
        ]

    def summary(self) -> dict[str, Any]:
        return {
            "run": str(self.folder.root),
            "status": self.status,
            "steps": self.steps,
            "tokens": self.tokens,
            "loss": self.loss,
            "bits_per_byte": self.bits,
            "tokens_per_second": self.totals.tokens_per_second,
            "data_wait": self.totals.data_wait,
            "memory": self.memory or None,
            "restarts": len(self.restarts),
            "held_out": self.held_out,
            "left_out": [event["step"] for event in self.skipped],
            "measured": self.stored.measured,
            "plan_hash": self.plan.hash,
            "ledger_hash": self.ledger,
            "ledger_damage": self.ledger_damage,
        }


def _one_of(entry: dict[str, Any] | None, sizes: dict[str, float] | None) -> Any:
    return converted(entry, sizes) if entry is not None and sizes is not None else entry


def _sparse(file: Path, steps: Table, sizes: ByteSizes | None, most: int) -> Table:
    """Return the curves of few steps, of evaluations or signals. Their lines have no hours: those
    of the run's steps count."""
    number, end = count(file)
    buckets = Buckets(number, most)
    for chunk in chunks(file, end) if number else ():
        chunk.columns.pop("seconds", None)
        if sizes is not None:
            convert(chunk, sizes.held_out)
        buckets.add(chunk)
    table = buckets.table()
    return replace(table, hours=np.interp(table.step, steps.step, steps.hours))


def first_difference(one: RunData, other: RunData) -> int | None:
    """Return the first step at which the ledgers of two runs differ."""
    with one.folder.ledger.open("rb") as a, other.folder.ledger.open("rb") as b:
        left, right = a.readline(), b.readline()
        while left.endswith(b"\n") and right.endswith(b"\n"):
            if left == right:
                left, right = a.readline(), b.readline()
                continue
            mine, theirs = json.loads(left), json.loads(right)
            if mine["step"] == theirs["step"]:
                if mine["hash"] != theirs["hash"]:
                    return int(mine["step"])
                left, right = a.readline(), b.readline()
            elif mine["step"] < theirs["step"]:
                left = a.readline()
            else:
                right = b.readline()
    return None


def planned_over_tokens(run: RunData) -> list[tuple[float, float, list[float]]]:
    """Return (from, to, share of each source) for each constant stretch of the plan."""
    columns = []
    for phase in run.plan.phases:
        token = float(phase.first_token)
        for rows, shares in _stretches(phase, len(run.sources)):
            end = token + rows * phase.seq_len
            columns.append((token, end, shares))
            token = end
    return columns


def realised_over_tokens(run: RunData) -> Iterator[tuple[float, float, list[float]]]:
    """Yield (from, to, share of each source) of the steps, in columns of equally many steps."""
    begin = float(run.plan.first_token)
    for rows, end in zip(run.totals.strips, run.totals.strip_ends.tolist(), strict=True):
        total = rows.sum() or 1.0
        yield begin, end, [float(taken / total) for taken in rows]
        begin = end


def _stretches(phase: Any, sources: int) -> list[tuple[int, list[float]]]:
    """Return (rows, share of each source) for each stretch, or part of one that changes."""
    stretches = getattr(phase, "stretches", None)
    if stretches is None:  # synthetic rows have one source
        return [(phase.rows, [1.0] * sources)]
    return [part for stretch in stretches for part in stretch.parts]


def _planned(phase: Any, sources: int) -> list[float]:
    stretches = _stretches(phase, sources)
    total = sum(rows for rows, _ in stretches)
    return [sum(rows * shares[i] for rows, shares in stretches) / total for i in range(sources)]
