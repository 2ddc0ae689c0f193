from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.console.errors import IntegrityError
from headrace.dataplane.order.plan import Plan
from headrace.dataplane.runlog import decisions, ledger
from headrace.dataplane.runlog.decisions import RecordedDecision
from headrace.dataplane.runlog.ledger import LedgerEntry
from headrace.dataplane.runlog.writer import encode_line


def decide(plan: Plan, step: int, previous: str, **changes: Any) -> RecordedDecision:
    fields = {
        "step": step,
        "row": plan.step(step).first_row,
        "shares": {"web": 0.25, "math": 0.75},
        "by": "hand",
        "why": {"request": "7f"},
        "taken": {"web": plan.step(step).first_row - 1, "code": 1},
    }
    return RecordedDecision.chained(previous, **fields | changes)


@pytest.fixture
def run(two_phases: Plan, tmp_path: Path) -> Path:
    """A run's folder with a plan and two decisions."""
    two_phases.save(tmp_path / decisions.PLAN)
    first = decide(two_phases, 3, two_phases.hash)
    for decision in (first, decide(two_phases, 5, first.digest, shares={"code": 1})):
        decisions.append(tmp_path / decisions.NAME, decision)
    return tmp_path


def test_the_digest_covers_the_plan_the_decisions_before_and_each_field(run: Path) -> None:
    plan = Plan.load(run / decisions.PLAN)
    recorded = decisions.read(run / decisions.NAME, plan.hash)
    previous = plan.hash
    for decision in recorded:
        fields = [decision.step, decision.row, decision.shares, "hand", {"request": "7f"}]
        fields.append({"web": decision.row - 1, "code": 1})
        text = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
        data = bytes.fromhex(previous) + text
        previous = hashlib.blake2b(data, digest_size=16).hexdigest()
        assert decision.digest == previous
    steered = decisions.load_run_plan(run)
    assert [decision.weights for decision in steered.decisions] == [(1, 0, 3), (0, 1, 0)]
    assert [decision.row for decision in steered.decisions] == [plan.step(3).first_row,
                                                                plan.step(5).first_row]  # fmt: skip
    assert steered.hash == plan.hash and replace(steered, decisions=()) == plan


def test_any_flipped_bit_is_found(run: Path) -> None:
    plan, file = Plan.load(run / decisions.PLAN), run / decisions.NAME
    whole = file.read_bytes()
    for place in range(len(whole) - 1):
        data = bytearray(whole)
        data[place] ^= 1 << place % 8
        file.write_bytes(data)
        with pytest.raises(IntegrityError):
            decisions.read(file, plan.hash)


def test_a_line_that_a_kill_cut_short_is_no_decision(run: Path) -> None:
    """Neither for a reader nor for the next writer, which removes it."""
    plan, file = Plan.load(run / decisions.PLAN), run / decisions.NAME
    first, second = file.read_bytes().splitlines(keepends=True)
    for size in range(len(second)):
        file.write_bytes(first + second[:size])
        assert len(decisions.read(file, plan.hash)) == 1
    [recorded] = decisions.read(file, plan.hash)
    decisions.append(file, decide(plan, 5, recorded.digest, shares={"code": 1}))
    assert file.read_bytes() == first + second


def test_a_decision_that_the_ledger_follows_cannot_be_lost(run: Path) -> None:
    plan, file = Plan.load(run / decisions.PLAN), run / decisions.NAME
    recorded = decisions.read(file, plan.hash)
    lines = []
    for step in range(5):
        planned = plan.step(step)
        entry: dict[str, Any] = vars(LedgerEntry(step, planned.first_row, planned.rows, "00" * 16))
        lines.append(entry | ({"decision": recorded[0].digest} if step == 3 else {}))
    (run / ledger.NAME).write_bytes(b"".join(map(encode_line, lines)))
    assert len(decisions.load_run_plan(run).decisions) == 2
    file.write_bytes(file.read_bytes().splitlines(keepends=True)[0])
    assert len(decisions.load_run_plan(run).decisions) == 1  # no step has followed the second
    for content in (b"", None):
        file.unlink() if content is None else file.write_bytes(content)
        with pytest.raises(IntegrityError, match=r"lacks the decision .* from step 3 on"):
            decisions.load_run_plan(run)


@pytest.mark.parametrize(
    "changes",
    [{"row": 1}, {"taken": {"web": 1}}, {"shares": {"other": 1}}, {"shares": {"web": 0.5}},
     {"shares": {"web": 1.5, "code": -0.5}}],
)  # fmt: skip
def test_decisions_of_another_plan_are_refused(two_phases: Plan, changes: dict[str, Any]) -> None:
    decision = decide(two_phases, 3, two_phases.hash, **changes)
    with pytest.raises(IntegrityError, match="is none of the plan"):
        decisions.add_decisions(two_phases, [decision])
    late = replace(decision, step=10**6)
    with pytest.raises(IntegrityError, match="is none of the plan"):
        decisions.add_decisions(two_phases, [late])
    good = decide(two_phases, 3, two_phases.hash)
    with pytest.raises(IntegrityError, match="is none of the plan"):  # two of the same row
        decisions.add_decisions(two_phases, [good, decide(two_phases, 3, good.digest)])
