"""The plan: a mixture resolved against datasets, down to the row; and its hash.

A plan decides which tokens row n has, and holds further settings of a run (URLs, batch sizes,
learning rates). The hash covers the order alone: a new learning rate or a mirror of a dataset keeps
it.

A plan with a `parent` continues the parent's row and step numbers.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from ...console.errors import IntegrityError
from ..freed import trim_heap
from ..storage import storage
from ..storage.sealed import seal, unseal
from .epochs.epoch import Cut
from .fair.owed import Line
from .refills import Refill
from .simulation import Segment
from .source_order import Position, SourceOrder, UnservedTokens
from .timeline import PhaseRows, PhaseTimeline

VERSION = 1
"""Format version of a saved plan."""
MAX_TABLE_ROWS = 1 << 17
"""Maximum rows in a table of constant shares."""
REMAKE_HINT = "make the plan again with `mixtures plan`"
SOURCE_ORDER = ("dataset", "order", "start", "refills")
"""Fields of a source that decide its rows; a saved plan lacks `refills` if there are none."""
NUM_STAIRS = 32
"""Stairs of a linear change, where a picture needs constant shares."""


@dataclass(frozen=True, kw_only=True)
class PlanSource:
    """A dataset, as the plan uses it."""

    name: str
    url: str
    dataset: str
    """Manifest hash after `generations` generations."""
    generations: int
    max_epochs: int
    order: SourceOrder
    start: Position = field(default_factory=Position)
    unlearnt: tuple[tuple[int, int], ...] = ()
    """Token ranges [start, end) without weight in the loss, sorted. Not part of the order."""
    refills: tuple[Refill, ...] = ()
    """Draws that get the rows of later draws, sorted (refills.py)."""


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Rows of a phase, with an integer weight per source."""

    rows: int
    weights: tuple[int, ...]
    to: tuple[int, ...] = ()
    """Weights at the end, with the same sum, if they change linearly over the rows."""

    @property
    def stairs(self) -> list[tuple[int, list[float]]]:
        """Rows of each stair, and the average share by source."""
        total, to = sum(self.weights), self.to or self.weights
        num_stairs = NUM_STAIRS if self.to else 1
        edges = [self.rows * number // num_stairs for number in range(num_stairs + 1)]
        return [
            (
                end_row - first_row,
                [
                    (start + (end - start) * (first_row + end_row) / (2 * self.rows)) / total
                    for start, end in zip(self.weights, to, strict=True)
                ],
            )
            for first_row, end_row in pairwise(edges)
            if end_row > first_row
        ]


@dataclass(frozen=True, kw_only=True)
class Phase(PhaseRows):
    """Rows with common weights, sequence length, batch and learning rate."""

    stretches: tuple[Stretch, ...]
    lr: Mapping[str, Any] = field(default_factory=dict)
    asked_tokens: int = 0
    """Tokens in the mixture, before rounding to whole steps."""
    weights_rule: str = ""
    """Rule that derived the weights from source sizes, for people."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Further tokens by source, which this rule would give without `max_epochs`."""
    control: Mapping[str, Any] = field(default_factory=dict)
    """Settings of what decides the shares during the run; empty, and not saved, without such."""


@dataclass(frozen=True, kw_only=True)
class Parent:
    """The plan that this one continues from a row on."""

    hash: str
    row: int
    run: str = ""
    """Folder of its run, as the mixture names it; not part of the order."""
    phases: Mapping[str, Mapping[str, Fraction]] = field(default_factory=dict)
    """Shares by which a replay draws, for phases in that run and its ancestors."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Shares that a run decided: from a row on, up to the phase's end or the next decision."""

    row: int
    """First row of a step."""
    weights: tuple[int, ...]
    """An integer weight per source."""
    digest: str
    """Hash over this decision, those before it, and the plan (runlog/decisions.py)."""
    before: tuple[int, ...] = ()
    """The plan's rows before `row`, by source; empty: to be counted."""


@dataclass(frozen=True, kw_only=True)
class Plan(PhaseTimeline[Phase]):
    """The rows of a run: sources, phases, and the order."""

    seed: int
    sources: tuple[PlanSource, ...]
    phases: tuple[Phase, ...]
    tokenizer: str
    """Fingerprint of the tokenizer, equal for all sources."""
    vocab_size: int
    isolate_documents: bool = True
    debts: tuple[Fraction, ...] = ()
    """Tokens owed to each source at the start of the plan."""
    parent: Parent | None = None
    lengths: tuple[int, ...] = ()
    """Tokens of the model's rows, by source, where a step's rows have one length; 0: whole rows."""
    decisions: tuple[Decision, ...] = ()
    """Decisions of the run so far, by row. Its decisions.jsonl holds them, not the saved plan: the
    plan's hash identifies the order without them."""

    @property
    def fair(self) -> bool:
        """True if lines with any shares (fair/) assign rows to sources, not small tables that
        repeat (apportionment.py).

        Tables are many times faster. They hold constant shares with a common denominator up to
        MAX_TABLE_ROWS; they can neither pay all debts of a continued run, nor give a source exactly
        its remaining rows.
        """
        return (
            self.parent is not None
            or any(phase.left_out for phase in self.phases)
            or any(
                stretch.to or sum(stretch.weights) > MAX_TABLE_ROWS
                for phase in self.phases
                for stretch in phase.stretches
            )
        )

    def lines(self) -> list[tuple[int, list[Line]]]:
        """Return, for consecutive phases with one sequence length, this length and the lines."""
        return [
            (
                length,
                [
                    Line(stretch.rows, stretch.weights, stretch.to or stretch.weights)
                    for phase in phases
                    for stretch in phase.stretches
                ],
            )
            for length, phases in groupby(self.phases, lambda phase: phase.seq_len)
        ]

    def segments(self) -> list[Segment]:
        return [
            Segment(stretch.rows, stretch.weights, phase.seq_len)
            for phase in self.phases
            for stretch in phase.stretches
        ]

    @cached_property
    def hash(self) -> str:
        """Identifies the order: with equal hashes, every row has equal tokens."""
        data = self.to_json()
        order = {
            "fair": self.fair,
            "parent": self.parent and {"hash": self.parent.hash, "row": self.parent.row},
            "debts": data["debts"],
            "isolate_documents": self.isolate_documents,
            "first_row": self.first_row,
            "sources": [
                {name: source[name] for name in SOURCE_ORDER if name in source}
                for source in data["sources"]
            ],
            "phases": [
                {name: phase[name] for name in ("rows", "seq_len", "stretches")}
                for phase in data["phases"]
            ],
        }
        if self.lengths:
            order["lengths"] = data["lengths"]
        canonical = json.dumps(order, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:32]

    def decision_digest(self, row: int) -> bytes:
        """Return the digest of the decision from `row` on; empty if there is none."""
        index = bisect_left(self.decisions, row, key=lambda decision: decision.row)
        decisions = self.decisions[index : index + 1]
        return b"".join(bytes.fromhex(d.digest) for d in decisions if d.row == row)

    @property
    def learnt_hash(self) -> str:
        """Identifies the order and the unlearnt tokens: with equal hashes, every row has equal
        tokens with equal weights."""
        unlearnt = [source.unlearnt for source in self.sources]
        if not any(unlearnt):
            return self.hash
        return hashlib.sha256(json.dumps([self.hash, unlearnt]).encode()).hexdigest()[:32]

    def to_json(self) -> dict[str, Any]:
        return ({"lengths": list(self.lengths)} if self.lengths else {}) | {
            "seed": self.seed,
            "tokenizer": self.tokenizer,
            "vocab_size": self.vocab_size,
            "isolate_documents": self.isolate_documents,
            "debts": [[debt.numerator, debt.denominator] for debt in self.debts],
            "parent": self.parent and _parent_to_json(self.parent),
            "sources": [_source_to_json(source) for source in self.sources],
            "phases": [_phase_to_json(phase) for phase in self.phases],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        return cls(
            seed=data["seed"],
            tokenizer=data["tokenizer"],
            vocab_size=data["vocab_size"],
            isolate_documents=data["isolate_documents"],
            debts=tuple(Fraction(*pair) for pair in data["debts"]),
            parent=data["parent"] and _parent_from_json(data["parent"]),
            lengths=tuple(data.get("lengths", ())),
            sources=tuple(
                PlanSource(
                    **{
                        **source,
                        "order": _order_from_json(source["order"]),
                        "start": _position_from_json(source["start"]),
                        "unlearnt": tuple(map(tuple, source.get("unlearnt", ()))),
                        "refills": tuple(map(tuple, source.get("refills", ()))),
                    }
                )
                for source in data["sources"]
            ),
            phases=tuple(
                Phase(
                    **{
                        **phase,
                        "stretches": tuple(
                            Stretch(
                                rows=stretch["rows"],
                                weights=tuple(stretch["weights"]),
                                to=tuple(stretch["to"]),
                            )
                            for stretch in phase["stretches"]
                        ),
                    }
                )
                for phase in data["phases"]
            ),
        )

    def save(self, file: str | Path) -> None:
        header = {"version": VERSION, "hash": self.hash, "folder": str(Path.cwd())}
        storage.write(str(file), seal({**header, **self.to_json()}, indent=1))

    @classmethod
    def load(cls, file: str | Path) -> Plan:
        """Read a saved plan and verify its seal.

        Relative dataset paths start at the current folder, or else at the folder where the plan was
        made.
        """
        data = read_saved(file)
        folder = data["folder"]
        try:
            plan = cls.from_json(data)
        except (ValueError, KeyError, TypeError) as error:
            raise IntegrityError(
                f"{file} is not a whole plan: {error!r}", hint=REMAKE_HINT
            ) from None
        assert plan.hash == data["hash"], "a sealed plan has the hash that it was saved with"
        del data
        trim_heap()
        sources = (replace(source, url=resolve_url(source.url, folder)) for source in plan.sources)
        return replace(plan, sources=tuple(sources))


def read_saved(file: str | Path) -> dict[str, Any]:
    """Read a saved plan as JSON data; verifies version and seal."""
    return unseal(str(file), storage.read(str(file)), hint=REMAKE_HINT, version=VERSION)


def resolve_url(url: str, folder: str) -> str:
    """Return a source's URL for readers in the current folder; `folder` is where its plan was
    made."""
    if not storage.is_local(url):
        return url
    path = storage.local_path(url)
    original = Path(folder, path)  # equal to an absolute `path`
    return url if path.exists() or not original.exists() else str(original)


def _source_to_json(source: PlanSource) -> dict[str, Any]:
    data = {**vars(source), "order": _order_to_json(source.order), "start": vars(source.start)}
    return _drop_empty(data, "unlearnt", "refills")


def _phase_to_json(phase: Phase) -> dict[str, Any]:
    data = {
        **vars(phase),
        "lr": dict(phase.lr),
        "left_out": dict(phase.left_out),
        "stretches": [vars(stretch) for stretch in phase.stretches],
        "control": dict(phase.control),
    }
    return _drop_empty(data, "control")


def _drop_empty(data: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in data.items() if value or name not in names}


def _parent_to_json(parent: Parent) -> dict[str, Any]:
    phases = {
        phase: {name: [share.numerator, share.denominator] for name, share in shares.items()}
        for phase, shares in parent.phases.items()
    }
    return {**vars(parent), "phases": phases}


def _parent_from_json(data: Mapping[str, Any]) -> Parent:
    phases = {
        phase: {name: Fraction(*share) for name, share in shares.items()}
        for phase, shares in data["phases"].items()
    }
    return Parent(**{**data, "phases": phases})


def _position_from_json(data: Mapping[str, Any]) -> Position:
    return Position(**{**data, "cuts": tuple(Cut(*cut) for cut in data["cuts"])})


def _order_to_json(order: SourceOrder) -> dict[str, Any]:
    return {
        "seed": order.seed,
        "name": order.name,
        "tokens": order.tokens,
        "chunk": order.chunk,
        "window": order.window,
        **({"direction": order.direction} if order.direction else {}),
        "rest": order.unserved and _unserved_to_json(order.unserved),
    }


def _order_from_json(data: Mapping[str, Any]) -> SourceOrder:
    settings = {key: value for key, value in data.items() if key != "rest"}
    unserved = data["rest"] and _unserved_from_json(data["rest"])
    return SourceOrder(**settings, unserved=unserved)


def _unserved_to_json(unserved: UnservedTokens) -> dict[str, Any]:
    return {
        "order": _order_to_json(unserved.order),
        "position": vars(unserved.position),
        "length": unserved.length,
    }


def _unserved_from_json(data: Mapping[str, Any]) -> UnservedTokens:
    return UnservedTokens(
        order=_order_from_json(data["order"]),
        position=_position_from_json(data["position"]),
        length=data["length"],
    )
