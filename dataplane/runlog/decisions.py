"""Decisions of a run: the shares of its sources from a step on, one line each, in decisions.jsonl.

    {"step": 107, "row": 856, "shares": {"web": 0.7, "code": 0.3}, "by": "hand", "why": {…},
     "taken": {"web": 428, "code": 428}, "digest": "9b1f…"}

A line is durable before any rank follows it, and is never changed: a resume replays the file. The
digest chains a line to those before it and to the plan; the ledger's hash covers it from that step
on, and the ledger's line of the step names it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...console.errors import IntegrityError
from ..storage import storage
from . import ledger
from .writer import LineWriter, decode_line

if TYPE_CHECKING:
    from ..order.plan import Plan

NAME = "decisions.jsonl"
PLAN = "plan.json"
DIGEST_BYTES = ledger.DIGEST_BYTES
FIELDS = ("step", "row", "shares", "by", "why", "taken")
TOLERANCE = Fraction(1, 10**6)
"""Largest distance between a sum of shares and 1: weights have the proportions of the shares."""
HINT = "restore it from a copy: the rows of the run cannot be known without it"


@dataclass(frozen=True, kw_only=True)
class RecordedDecision:
    """A line of the file."""

    step: int
    """First step with these shares."""
    row: int
    """First row of this step."""
    shares: Mapping[str, float]
    """Shares by source, as decimals that sum to about 1; further sources of the plan have none."""
    by: str
    """`hand`, or the kind of the phase's controller."""
    why: Mapping[str, Any]
    """What the decision was made from."""
    taken: Mapping[str, int]
    """The plan's rows before `row`, by source: the order from here on needs no earlier decision."""
    digest: str

    @classmethod
    def chained(cls, previous: str, **fields: Any) -> RecordedDecision:
        """Make the decision that follows the one with the digest `previous`, or the plan."""
        return cls(**fields, digest=_chain(previous, fields))


def _chain(previous: str, fields: Mapping[str, Any]) -> str:
    values = [fields[name] for name in FIELDS]
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    data = bytes.fromhex(previous) + text.encode()
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


def append(file: Path, decision: RecordedDecision) -> None:
    """Append a decision durably."""
    with closing(LineWriter(file)) as writer:
        writer.write(vars(decision))
        writer.sync()


def read(file: str | Path, plan_hash: str) -> list[RecordedDecision]:
    """Read the decisions of a run, and check their chain. A line that a kill has cut short is no
    decision: no rank has followed it."""
    if not storage.exists(str(file)):
        return []
    decisions: list[RecordedDecision] = []
    previous = plan_hash
    for number, line in enumerate(_whole_lines(storage.read(str(file))), 1):
        entry = decode_line(line)
        if entry is None or set(entry) != {*FIELDS, "digest"}:
            raise IntegrityError(f"line {number} of {file} is damaged", hint=HINT)
        decision = RecordedDecision(**entry)
        if _chain(previous, entry) != decision.digest:
            raise IntegrityError(
                f"line {number} of {file} does not follow the line before it"
                if number > 1
                else f"{file} belongs to another plan, or was changed",
                hint=HINT,
            )
        decisions.append(decision)
        previous = decision.digest
    return decisions


def _whole_lines(data: bytes) -> Iterator[bytes]:
    return (line for line in data.splitlines(keepends=True) if line.endswith(b"\n"))


def add_decisions(plan: Plan, recorded: Sequence[RecordedDecision]) -> Plan:
    """Return the plan with further decisions."""
    from ..order.plan import Decision  # needs numpy

    decisions = [*plan.decisions]
    for decision in recorded:
        weights = exact_weights(plan, decision.shares)
        before = tuple(decision.taken.get(source.name, 0) for source in plan.sources)
        if (
            weights is None
            or sum(before) != decision.row - plan.first_row
            or not plan.first_step <= decision.step < plan.end_step
            or plan.step(decision.step).first_row != decision.row
            or (decisions and decision.row <= decisions[-1].row)
        ):
            raise IntegrityError(
                f"the decision from step {decision.step:,} on is none of the plan {plan.hash}",
                hint="restore the plan.json that the run was started with",
            )
        decisions.append(
            Decision(row=decision.row, weights=weights, digest=decision.digest, before=before)
        )
    return replace(plan, decisions=tuple(decisions))


def exact_weights(plan: Plan, shares: Mapping[str, float]) -> tuple[int, ...] | None:
    """Return integer weights by source in the proportions of decimal shares; None if a source is
    none of the plan, or the shares do not sum to about 1."""
    names = [source.name for source in plan.sources]
    exact = {name: Fraction(repr(share)) for name, share in shares.items()}
    total = sum(exact.values(), Fraction(0))
    is_sum = abs(total - 1) <= TOLERANCE
    if not is_sum or set(exact) - set(names) or min(exact.values()) < 0:
        return None
    common = math.lcm(*(share.denominator for share in exact.values()))
    return tuple(int(exact.get(name, 0) * common) for name in names)


def load_run_plan(run: str | Path) -> Plan:
    """Load the plan of a run, with the decisions that the run has made."""
    from ..order.plan import Plan

    plan = Plan.load(storage.join(str(run), PLAN))
    return add_decisions(plan, read_run(run, plan.hash))


def read_run(run: str | Path, plan_hash: str) -> list[RecordedDecision]:
    """Read the decisions of a run; raise if the ledger has followed one that is lost, or has not
    followed one from a step that it has."""
    file, ledger_file = (storage.join(str(run), name) for name in (NAME, ledger.NAME))
    # The ledger first: meanwhile the run may decide.
    steps, followed = range(0), {}
    if storage.exists(ledger_file):
        steps = ledger.read_steps(ledger_file)
        followed = dict(ledger.find_decisions(ledger_file))
    recorded = read(file, plan_hash)
    by_step = {decision.step: decision.digest for decision in recorded}
    for step, digest in followed.items():
        if by_step.get(step) != digest:
            raise IntegrityError(
                f"{file} lacks the decision that the run follows from step {step:,} on", hint=HINT
            )
    for step in by_step:
        # The first line of a ledger that begins at a checkpoint names no decision.
        if step in steps[1:] and step not in followed:
            raise IntegrityError(
                f"{file} has a decision from step {step:,} on that the ledger does not follow",
                hint=HINT,
            )
    return recorded
