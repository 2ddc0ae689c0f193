"""The plan: a mixture resolved against datasets, down to the row; and its hash.

A plan holds everything that decides which tokens row n has, and further settings of a run (URLs,
batch sizes, learning rates). The hash covers only the former: a new learning rate or a mirror of a
dataset is not a new order.

A plan that continues another (`parent`) continues its row and step numbers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from ...console.errors import IntegrityError
from ..freed import give_back
from ..storage import storage
from ..storage.sealed import sealed, unsealed
from .epochs.epoch import Cut
from .fair.owed import Line
from .simulation import Segment
from .source_order import Position, Rest, SourceOrder
from .timeline import PhaseRows, Timeline

VERSION = 1
"""Version of the format of a saved plan."""
PERIOD = 1 << 17
"""Rows of the largest table of constant shares."""
MAKE_AGAIN = "make the plan again with `mixtures plan`"
PARTS = 32
"""Parts with the same shares, as which a line is drawn."""


@dataclass(frozen=True, kw_only=True)
class PlanSource:
    """A dataset as the plan uses it."""

    name: str
    url: str
    dataset: str
    """Hash of the dataset's manifest after `generations` generations."""
    generations: int
    max_epochs: int
    order: SourceOrder
    start: Position = field(default_factory=Position)


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Rows of a phase with integer weights, one per source of the plan."""

    rows: int
    weights: tuple[int, ...]
    to: tuple[int, ...] = ()
    """The weights at the end, of the same sum, if they change linearly over the rows."""

    @property
    def parts(self) -> list[tuple[int, list[float]]]:
        """Rows of parts of the stretch, and the average share of each source in them."""
        total, to = sum(self.weights), self.to or self.weights
        edges = (
            [self.rows * part // PARTS for part in range(PARTS + 1)] if self.to else [0, self.rows]
        )
        return [
            (
                last - first,
                [
                    (start + (end - start) * (first + last) / (2 * self.rows)) / total
                    for start, end in zip(self.weights, to, strict=True)
                ],
            )
            for first, last in pairwise(edges)
            if last > first
        ]


@dataclass(frozen=True, kw_only=True)
class Phase(PhaseRows):
    """A span of rows with its own weights, sequence length, batch and learning rate."""

    stretches: tuple[Stretch, ...]
    lr: Mapping[str, Any] = field(default_factory=dict)
    asked_tokens: int = 0
    """Tokens in the mixture, before rounding to whole steps."""
    weights_rule: str = ""
    """The rule that gave the weights from the sizes of the sources, for people."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """The tokens that sources would have got by that rule besides, without `max_epochs`."""


@dataclass(frozen=True, kw_only=True)
class Parent:
    """The plan that this one continues, up to (not including) a row."""

    hash: str
    row: int
    run: str = ""
    """Folder of the run that executed it, as the mixture names it; not part of the order."""
    phases: Mapping[str, Mapping[str, Fraction]] = field(default_factory=dict)
    """For each phase of that run and its ancestors, the shares that a replay draws by."""


@dataclass(frozen=True, kw_only=True)
class Plan(Timeline[Phase]):
    """The rows of a run: sources, phases, and their order."""

    seed: int
    sources: tuple[PlanSource, ...]
    phases: tuple[Phase, ...]
    tokenizer: str
    """Fingerprint of the tokenizer; equal for all sources."""
    vocab_size: int
    isolate_documents: bool = True
    debts: tuple[Fraction, ...] = ()
    """Tokens that each source is owed at the start of the plan."""
    parent: Parent | None = None

    @property
    def fair(self) -> bool:
        """Whether rows are assigned to sources by lines of any shares (fair/), not by small tables
        that repeat (apportionment.py).

        Tables are many times faster. They hold constant shares with a common denominator of up to
        PERIOD; they cannot pay all debts of a run that is continued, nor give a source just what
        it has left.
        """
        return (
            self.parent is not None
            or any(phase.left_out for phase in self.phases)
            or any(
                stretch.to or sum(stretch.weights) > PERIOD
                for phase in self.phases
                for stretch in phase.stretches
            )
        )

    def lines(self) -> list[tuple[int, list[Line]]]:
        """Return, for consecutive phases of one sequence length, that length and their lines."""
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
        """Identifies the order: plans with equal hashes have equal tokens in every row."""
        data = self.to_json()
        order = {
            "fair": self.fair,
            "parent": self.parent and {"hash": self.parent.hash, "row": self.parent.row},
            "debts": data["debts"],
            "isolate_documents": self.isolate_documents,
            "first_row": self.first_row,
            "sources": [
                {name: source[name] for name in ("dataset", "order", "start")}
                for source in data["sources"]
            ],
            "phases": [
                {name: phase[name] for name in ("rows", "seq_len", "stretches")}
                for phase in data["phases"]
            ],
        }
        text = json.dumps(order, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def to_json(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "tokenizer": self.tokenizer,
            "vocab_size": self.vocab_size,
            "isolate_documents": self.isolate_documents,
            "debts": [[debt.numerator, debt.denominator] for debt in self.debts],
            "parent": self.parent and _parent_to_json(self.parent),
            "sources": [
                {
                    **vars(source),
                    "order": _order_to_json(source.order),
                    "start": vars(source.start),
                }
                for source in self.sources
            ],
            "phases": [
                {
                    **vars(phase),
                    "lr": dict(phase.lr),
                    "left_out": dict(phase.left_out),
                    "stretches": [vars(stretch) for stretch in phase.stretches],
                }
                for phase in self.phases
            ],
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
            sources=tuple(
                PlanSource(
                    **{
                        **source,
                        "order": _order_from_json(source["order"]),
                        "start": _position_from_json(source["start"]),
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
                                rows=item["rows"],
                                weights=tuple(item["weights"]),
                                to=tuple(item["to"]),
                            )
                            for item in phase["stretches"]
                        ),
                    }
                )
                for phase in data["phases"]
            ),
        )

    def save(self, file: str | Path) -> None:
        about = {"version": VERSION, "hash": self.hash, "folder": str(Path.cwd())}
        storage.write(str(file), sealed({**about, **self.to_json()}, indent=1))

    @classmethod
    def load(cls, file: str | Path) -> Plan:
        """Read a saved plan and verify its seal.

        A relative path of a dataset is resolved in the current folder, then in the folder where the
        plan was made.
        """
        data = read_saved(file)
        folder = data["folder"]
        try:
            plan = cls.from_json(data)
        except (ValueError, KeyError, TypeError) as error:
            raise IntegrityError(
                f"{file} is not a whole plan: {error!r}", hint=MAKE_AGAIN
            ) from None
        assert plan.hash == data["hash"], "a sealed plan has the hash that it was saved with"
        del data
        give_back()
        return replace(plan, sources=tuple(_resolved(source, folder) for source in plan.sources))


def read_saved(file: str | Path) -> dict[str, Any]:
    """Return the content of a saved plan. Its version and its seal are verified."""
    return unsealed(str(file), storage.read(str(file)), hint=MAKE_AGAIN, version=VERSION)


def _resolved(source: PlanSource, folder: str) -> PlanSource:
    if not storage.is_local(source.url):
        return source
    here = storage.local_path(source.url)
    there = Path(folder, here)  # equals `here` if that is absolute
    return replace(source, url=str(there)) if there.exists() and not here.exists() else source


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
        "rest": order.rest and _rest_to_json(order.rest),
    }


def _order_from_json(data: Mapping[str, Any]) -> SourceOrder:
    return SourceOrder(**{**data, "rest": data["rest"] and _rest_from_json(data["rest"])})


def _rest_to_json(rest: Rest) -> dict[str, Any]:
    return {
        "order": _order_to_json(rest.order),
        "position": vars(rest.position),
        "length": rest.length,
    }


def _rest_from_json(data: Mapping[str, Any]) -> Rest:
    return Rest(
        order=_order_from_json(data["order"]),
        position=_position_from_json(data["position"]),
        length=data["length"],
    )
