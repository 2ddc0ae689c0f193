"""Read a report's data from the run's folder, in a single pass over the steps."""

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
from ....dataplane.runlog.ledger import find_gap
from ....trainer.checkpoints import store
from ....trainer.folders.folder import RunFolder
from ....trainer.loop.batches import RunPlan
from ....trainer.scores.missing import ScoreGap, find_gaps
from ...board.byte_sizes import ByteSizes, convert_entry, mean_loss
from ...board.runs import SKIPPED, derive_status
from .buckets import CurveBuckets, CurveTable
from .candidates import OutlierCandidates
from .chunks import CHUNK, chunks, convert_losses, count_lines, read_line
from .stored import StoredRun
from .totals import Totals

MAX_BUCKETS = 2000
"""Buckets on a page, over all runs: more would not be visible, and the file must open at once."""
MIN_BUCKETS = 400


@dataclass(frozen=True)
class PhaseShares:
    """A phase, and its planned and realised shares."""

    name: str
    first_token: int
    tokens: int
    seq_len: int
    batch_rows: int
    steps: int
    planned: list[float]
    """Share by source."""
    realised: list[int]
    """Tokens by source."""


@dataclass(frozen=True)
class RunData:
    stored: StoredRun
    totals: Totals
    table: CurveTable
    """Curves over the steps."""
    held_out_table: CurveTable
    signals_table: CurveTable
    """Curves over the steps that record signals."""
    first: dict[str, Any]
    """First line in the metrics."""
    events: list[dict[str, Any]]
    evaluation: dict[str, Any] | None
    """Last evaluation."""
    scores: list[dict[str, Any]]
    recall: list[dict[str, Any]]
    ledger: str
    """The ledger's last hash."""
    ledger_damage: str | None
    """What the ledger's lines show to be wrong with it; None if nothing."""
    checkpoints: list[int]
    candidates: OutlierCandidates
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
        num_runs: int = 1,
        *,
        chunk_bytes: int = CHUNK,
    ) -> RunData:
        """Read a run for a page with `num_runs` runs; with `sizes`, losses are in bits per byte.
        About `chunk_bytes` bytes from its metrics are in memory at once."""
        folder = run.folder
        num_steps, end = count_lines(folder.metrics, chunk_bytes)
        if not num_steps:
            raise RunError(
                f"the run in {folder.root} has not taken a step yet",
                hint="wait for its first step, or start it with `trainer resume`",
            )
        events = list(lines.read(folder.events))
        max_buckets = max(MIN_BUCKETS, MAX_BUCKETS // num_runs)
        buckets, candidates = CurveBuckets(num_steps, max_buckets), OutlierCandidates()
        totals = Totals(
            num_steps,
            [source.name for source in run.plan.sources],
            [phase.first_step for phase in run.plan.phases],
            cold_steps={e["step"] for e in events if e["event"] in ("start", "resume")},
            marked_steps={e["step"] for e in events if e["event"] in ("resume", *SKIPPED)},
        )
        for chunk in chunks(folder.metrics, end, chunk_bytes):
            if sizes is not None:
                convert_losses(chunk, sizes.trained)
            for reduction in (buckets, totals, candidates):
                reduction.add(chunk)
        table = buckets.table()
        return cls(
            stored=run,
            totals=totals,
            table=table,
            held_out_table=_read_sparse(folder.evaluations, table, sizes, max_buckets),
            signals_table=_read_sparse(folder.signals, table, None, max_buckets),
            first=_convert(read_line(folder.metrics, 0), sizes.trained if sizes else None),
            events=events,
            evaluation=_convert(
                lines.read_last(folder.evaluations), sizes.held_out if sizes else None
            ),
            scores=list(lines.read(folder.scores)),
            recall=list(lines.read(folder.recall)),
            ledger=str((lines.read_last(folder.ledger) or {}).get("hash", "")),
            ledger_damage=find_gap(folder.ledger),
            checkpoints=[store.parse_step(path) for path in store.committed(folder.checkpoints)],
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
        """Lines for the last tenth of the steps, at most 50."""
        sizes = self.sizes
        return [
            convert_entry(entry, sizes.trained) if sizes else entry for entry in self.totals.last
        ]

    @property
    def last_token(self) -> int:
        """The last step's end; charts end there."""
        return int(self.last[-1]["tokens"])

    @property
    def tokens(self) -> int:
        """Tokens in the steps so far."""
        return self.last_token - self.plan.first_token

    @property
    def status(self) -> str:
        last, ended = self.events[-1] if self.events else None, self.folder.holder_has_ended
        return derive_status(last, ended=ended, gaps=self.score_gaps)

    @property
    def score_gaps(self) -> list[ScoreGap]:
        """Scores that the run should have and has not."""
        last = self.plan.end_step if self.plan.end_step in self.checkpoints else None
        settings = self.stored.settings
        options = {name: settings.get(f"scores.{name}") for name in ("limit", "ema")}
        return find_gaps(settings.get("scores.tasks"), self.scores, last, **options)

    @property
    def error(self) -> str | None:
        """A failed run's error."""
        last = self.events[-1] if self.events else {}
        return str(last["error"]) if last.get("event") == "fail" else None

    @property
    def restarts(self) -> list[int]:
        """Steps at which the run was resumed."""
        return [event["step"] for event in self.events if event["event"] == "resume"]

    @property
    def skipped(self) -> list[dict[str, Any]]:
        """Events about steps whose updates are not in the weights."""
        steps = set(self.totals.skipped)
        events = {e["step"]: e for e in self.events if e["event"] in SKIPPED and e["step"] in steps}
        return [events[step] for step in sorted(events)]

    def tokens_before(self, step: int) -> float:
        """Return the number of tokens before a marked step."""
        return self.totals.tokens_after.get(step - 1, float(self.plan.first_token))

    @property
    def loss(self) -> float | None:
        """Mean loss over the last steps."""
        return mean_loss(self.last)

    @property
    def bits(self) -> float | None:
        """Mean loss over the last steps in bits per byte; None where the bytes are not known."""
        if self.sizes is not None:
            return self.loss
        sizes = self.stored.sizes
        if sizes is None:
            return None
        return mean_loss([convert_entry(entry, sizes.trained) for entry in self.last])

    @property
    def memory(self) -> int:
        """Peak bytes on a rank's device; 0 where no device counts them."""
        return int(self.totals.memory)

    @property
    def held_out(self) -> float | None:
        """Loss in the last evaluation."""
        return self.evaluation["loss"] if self.evaluation else None

    @property
    def held_out_bits(self) -> float | None:
        """Loss in the last evaluation in bits per byte; None where the bytes are not known."""
        if self.sizes is not None or self.evaluation is None:
            return self.held_out
        sizes = self.stored.sizes
        known = sizes is not None and self.evaluation["sources"].keys() <= sizes.held_out.keys()
        return (
            mean_loss([convert_entry(self.evaluation, sizes.held_out)]) if sizes and known else None
        )

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
                realised=[int(rows) * phase.seq_len for rows in rows_by_source],
            )
            for phase, rows_by_source in zip(self.plan.phases, self.totals.rows, strict=True)
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


def _convert(entry: dict[str, Any] | None, sizes: dict[str, float] | None) -> Any:
    return convert_entry(entry, sizes) if entry is not None and sizes is not None else entry


def _read_sparse(
    file: Path, steps: CurveTable, sizes: ByteSizes | None, max_buckets: int
) -> CurveTable:
    """Read curves of evaluations or signals, which only some steps have. Hours are interpolated
    from the steps' hours."""
    num_lines, end = count_lines(file)
    buckets = CurveBuckets(num_lines, max_buckets)
    for chunk in chunks(file, end) if num_lines else ():
        chunk.columns.pop("seconds", None)
        if sizes is not None:
            convert_losses(chunk, sizes.held_out)
        buckets.add(chunk)
    table = buckets.table()
    return replace(table, hours=np.interp(table.step, steps.step, steps.hours))


def first_difference(run_a: RunData, run_b: RunData) -> int | None:
    """Return the first step at which the ledgers of two runs differ."""
    with run_a.folder.ledger.open("rb") as a, run_b.folder.ledger.open("rb") as b:
        line_a, line_b = a.readline(), b.readline()
        while line_a.endswith(b"\n") and line_b.endswith(b"\n"):
            if line_a == line_b:
                line_a, line_b = a.readline(), b.readline()
                continue
            entry_a, entry_b = json.loads(line_a), json.loads(line_b)
            if entry_a["step"] == entry_b["step"]:
                if entry_a["hash"] != entry_b["hash"]:
                    return int(entry_a["step"])
                line_a, line_b = a.readline(), b.readline()
            elif entry_a["step"] < entry_b["step"]:
                line_a = a.readline()
            else:
                line_b = b.readline()
    return None


def planned_shares(run: RunData) -> list[tuple[float, float, list[float]]]:
    """Return (first token, end token, share by source) for each constant stretch in the plan."""
    columns = []
    for phase in run.plan.phases:
        token = float(phase.first_token)
        for rows, shares in _stretches(phase, len(run.sources)):
            end = token + rows * phase.seq_len
            columns.append((token, end, shares))
            token = end
    return columns


def realised_shares(run: RunData) -> Iterator[tuple[float, float, list[float]]]:
    """Yield (first token, end token, share by source) for columns with equally many steps."""
    begin = float(run.plan.first_token)
    for rows, end in zip(run.totals.strips, run.totals.strip_ends.tolist(), strict=True):
        total = rows.sum() or 1.0
        yield begin, end, [float(source_rows / total) for source_rows in rows]
        begin = end


def _stretches(phase: Any, num_sources: int) -> list[tuple[int, list[float]]]:
    """Return (rows, share by source) for each stretch; a changing stretch is cut into several."""
    stretches = getattr(phase, "stretches", None)
    if stretches is None:  # synthetic rows have a single source
        return [(phase.rows, [1.0] * num_sources)]
    return [piece for stretch in stretches for piece in stretch.stairs]


def _planned(phase: Any, num_sources: int) -> list[float]:
    stretches = _stretches(phase, num_sources)
    total = sum(rows for rows, _ in stretches)
    return [
        sum(rows * shares[source] for rows, shares in stretches) / total
        for source in range(num_sources)
    ]
