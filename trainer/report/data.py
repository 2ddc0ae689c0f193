"""Data of a report, read from the run's folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ...console.errors import RunError
from ...dataplane.runlog import writer as lines
from ..board.runs import SKIPPED, status_of
from ..checkpoints import store
from ..costs import measured
from ..costs.describe import describe
from ..drawing.chart import Curve
from ..folder import RunFolder
from ..run.job import Job
from ..run.stored import read_run

T = TypeVar("T")

MOST_POINTS = 500
"""Points of a curve: more would not be visible, and the file must open at once."""


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
    name: str
    """Name on the page: the last parts of the folder's path that no other run of the page has."""
    job: Job
    about: dict[str, Any]
    metrics: list[dict[str, Any]]
    events: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    scores: list[dict[str, Any]]
    recall: list[dict[str, Any]]
    hashes: dict[int, str]
    """Hashes of the ledger, by step."""
    checkpoints: list[int]
    measured: dict[str, Any] | None
    """Measured seconds and bytes beside the predicted ones, for a run with a layout plan."""

    @classmethod
    def load(cls, folder: RunFolder, name: str | None = None) -> RunData:
        job = read_run(folder)
        metrics = list(lines.read(folder.metrics))
        if not metrics:
            raise RunError(
                f"the run in {folder.root} has not taken a step yet",
                hint="wait for its first step, or start it with `trainer resume`",
            )
        return cls(
            name=name or folder.root.resolve().name,
            job=job,
            about=describe(job),
            metrics=metrics,
            events=list(lines.read(folder.events)),
            evaluations=list(lines.read(folder.evaluations)),
            scores=list(lines.read(folder.scores)),
            recall=list(lines.read(folder.recall)),
            hashes={entry["step"]: entry["hash"] for entry in lines.read(folder.ledger)},
            checkpoints=[store.step_of(path) for path in store.committed(folder.checkpoints)],
            measured=measured.of_run(job),
        )

    @property
    def sources(self) -> list[str]:
        return [source.name for source in self.job.plan.sources]

    @property
    def first_token(self) -> int:
        return self.job.plan.first_token

    @property
    def last_token(self) -> int:
        """End of the last step; charts end there."""
        return int(self.metrics[-1]["tokens"])

    @property
    def tokens(self) -> int:
        """Tokens of the steps so far."""
        return self.last_token - self.first_token

    @property
    def status(self) -> str:
        return status_of(self.events[-1] if self.events else None)

    @property
    def error(self) -> str | None:
        """Error of a failed run."""
        last = self.events[-1] if self.events else {}
        return str(last["error"]) if last.get("event") == "fail" else None

    @property
    def restarts(self) -> list[float]:
        """Tokens at which the run was resumed."""
        return self.tokens_at([e["step"] for e in self.events if e["event"] == "resume"])

    @property
    def ledger(self) -> str:
        """Last hash of the ledger."""
        return self.hashes[max(self.hashes)]

    @property
    def skipped(self) -> list[dict[str, Any]]:
        """Events of the skipped steps: their updates are not in the weights."""
        steps = {entry["step"] for entry in self.metrics if entry.get("skipped")}
        events = {e["step"]: e for e in self.events if e["event"] in SKIPPED and e["step"] in steps}
        return [events[step] for step in sorted(events)]

    def tokens_at(self, steps: Sequence[int]) -> list[float]:
        """Return the tokens at which these steps began."""
        taken = {entry["step"]: float(entry["tokens"]) for entry in self.metrics}
        return [taken.get(step - 1, float(self.first_token)) for step in steps]

    @property
    def loss(self) -> float | None:
        """Mean loss of the last tenth of the steps, at most 50: one step alone is noise."""
        last = self.metrics[-self.last_steps :]
        known = [entry["loss"] for entry in last if entry["loss"] is not None]
        return sum(known) / len(known) if known else None

    @property
    def last_steps(self) -> int:
        return max(1, min(50, len(self.metrics) // 10))

    @property
    def tokens_per_second(self) -> float:
        """Mean speed without the first step of each start, which is slower."""
        cold = {e["step"] for e in self.events if e["event"] in ("start", "resume")}
        warm = [entry for entry in self.metrics if entry["step"] not in cold] or self.metrics
        seconds = sum(entry["seconds"] for entry in warm)
        return float(sum(entry["tokens_per_second"] * entry["seconds"] for entry in warm) / seconds)

    @property
    def seconds(self) -> float:
        return float(sum(entry["seconds"] for entry in self.metrics))

    @property
    def data_wait(self) -> float:
        waited = sum(entry["data_wait"] * entry["seconds"] for entry in self.metrics)
        return float(waited / self.seconds)

    def curve(self, key: str) -> Curve:
        """Return a metric of every step."""
        return _curve((entry["tokens"], entry.get(key)) for entry in self.metrics)

    def source_loss(self, name: str) -> Curve:
        return _curve(
            (entry["tokens"], entry["sources"].get(name, {}).get("loss")) for entry in self.metrics
        )

    def source_speed(self, name: str) -> Curve:
        """Return the tokens of one source per second, in every step."""
        return _curve(
            (
                entry["tokens"],
                entry["tokens_per_second"] * entry["sources"].get(name, {}).get("rows", 0) / rows,
            )
            for entry in self.metrics
            if (rows := sum(source["rows"] for source in entry["sources"].values()))
        )

    @property
    def memory(self) -> int:
        """Most bytes that a rank's device has held; 0 where no device counts them."""
        return max(entry.get("memory") or 0 for entry in self.metrics)

    @property
    def held_out(self) -> float | None:
        """Loss of the last evaluation."""
        return self.evaluations[-1]["loss"] if self.evaluations else None

    def held_out_curves(self) -> dict[str, Curve]:
        """Return the loss on held-out rows: of all sources together (`all`), then of each."""
        names = dict.fromkeys(name for entry in self.evaluations for name in entry["sources"])
        together = _curve((entry["tokens"], entry["loss"]) for entry in self.evaluations)
        by_source = {
            name: _curve(
                (entry["tokens"], entry["sources"].get(name, {}).get("loss"))
                for entry in self.evaluations
            )
            for name in names
        }
        return {"all": together, **(by_source if len(by_source) > 1 else {})}

    def phases(self) -> list[PhaseShares]:
        realised: dict[str, list[int]] = {}
        for entry in self.metrics:
            taken = realised.setdefault(entry["phase"], [0] * len(self.sources))
            for place, source in enumerate(self.sources):
                taken[place] += entry["sources"].get(source, {}).get("rows", 0)
        return [
            PhaseShares(
                name=phase.name,
                first_token=phase.first_token,
                tokens=phase.tokens,
                seq_len=phase.seq_len,
                batch_rows=phase.batch_rows,
                steps=phase.steps,
                planned=_planned(phase, len(self.sources)),
                realised=[
                    rows * phase.seq_len
                    for rows in realised.get(phase.name, [0] * len(self.sources))
                ],
            )
            for phase in self.job.plan.phases
        ]

    def summary(self) -> dict[str, Any]:
        return {
            "run": str(self.job.folder.root),
            "status": self.status,
            "steps": len(self.metrics),
            "tokens": self.tokens,
            "loss": self.loss,
            "tokens_per_second": self.tokens_per_second,
            "data_wait": self.data_wait,
            "memory": self.memory or None,
            "restarts": len(self.restarts),
            "held_out": self.held_out,
            "left_out": [event["step"] for event in self.skipped],
            "measured": self.measured,
            "plan_hash": self.job.plan.hash,
            "ledger_hash": self.ledger,
        }


def first_difference(one: RunData, other: RunData) -> int | None:
    """Return the first step at which the ledgers of two runs differ."""
    common = sorted(one.hashes.keys() & other.hashes.keys())
    return next((step for step in common if one.hashes[step] != other.hashes[step]), None)


def planned_over_tokens(run: RunData) -> list[tuple[float, float, list[float]]]:
    """Return (from, to, share of each source) for each constant stretch of the plan."""
    columns = []
    for phase in run.job.plan.phases:
        token = float(phase.first_token)
        for rows, shares in _stretches(phase, len(run.sources)):
            end = token + rows * phase.seq_len
            columns.append((token, end, shares))
            token = end
    return columns


def realised_over_tokens(run: RunData, bins: int) -> list[tuple[float, float, list[float]]]:
    """Return (from, to, share of each source) of the steps, in at most `bins` columns."""
    count = max(1, -(-len(run.metrics) // bins))
    columns = []
    begin = float(run.first_token)
    for first in range(0, len(run.metrics), count):
        group = run.metrics[first : first + count]
        rows = [
            sum(entry["sources"].get(source, {}).get("rows", 0) for entry in group)
            for source in run.sources
        ]
        total = sum(rows)
        end = float(group[-1]["tokens"])
        columns.append((begin, end, [taken / total for taken in rows]))
        begin = end
    return columns


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


def groups(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield neighbours together, in at most MOST_POINTS groups."""
    size = max(1, -(-len(items) // MOST_POINTS))
    return (items[first : first + size] for first in range(0, len(items), size))


def thin(curve: Curve) -> Curve:
    """Return the mean of each group of points."""
    means = [_mean(group) for group in groups(list(zip(curve.x, curve.y, strict=True)))]
    return Curve([x for x, _ in means], [y for _, y in means])


def extremes(curve: Curve) -> Curve:
    """Return the lowest and the highest point of each group, so that one outlier among a million
    steps stays visible."""
    pairs = [
        pair
        for group in groups(list(zip(curve.x, curve.y, strict=True)))
        for pair in sorted({min(group, key=_height), max(group, key=_height)})
    ]
    return Curve([x for x, _ in pairs], [y for _, y in pairs])


def _height(point: tuple[float, float]) -> float:
    return point[1]


def _mean(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return sum(x for x, _ in points) / len(points), sum(y for _, y in points) / len(points)


def _curve(points: Iterable[tuple[float, float | None]]) -> Curve:
    """Return the curve of the known values."""
    known = [(float(x), float(y)) for x, y in points if y is not None]
    return Curve([x for x, _ in known], [y for _, y in known])


def smooth(curve: Curve, width: int) -> Curve:
    """Return the centred mean over `width` points."""
    half = width // 2
    y = [
        sum(curve.y[max(0, i - half) : i + half + 1])
        / len(curve.y[max(0, i - half) : i + half + 1])
        for i in range(len(curve.y))
    ]
    return Curve(curve.x, y)
