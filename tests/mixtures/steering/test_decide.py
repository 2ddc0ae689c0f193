"""Requests and controllers beside a plan: what is refused, what max_epochs leaves, what is kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from formats.samples import pin_keys
from hypothesis import given
from hypothesis import strategies as st
from support.data.plan_data import write_taken_run

from headrace.console.errors import ConfigError, IntegrityError, PlanError
from headrace.dataplane.order.plan import Plan
from headrace.dataplane.order.stream import Stream
from headrace.dataplane.runlog import decisions
from headrace.dataplane.runlog.decisions import RecordedDecision, add_decisions
from headrace.mixtures.audit.decisions import audit_decisions
from headrace.mixtures.cli import main
from headrace.mixtures.controllers.controller import Observed
from headrace.mixtures.mixture_file.mixture import After, Mixture, PhaseSpec, SourceSpec
from headrace.mixtures.planning.branch_point import open_branch_point
from headrace.mixtures.planning.open_plan import open_plan
from headrace.mixtures.planning.resolve_mixture import resolve
from headrace.mixtures.steering.ask import ask_run
from headrace.mixtures.steering.decide import decide_by_controller, decide_by_hand
from headrace.mixtures.steering.limits import UNITS, fit_limits
from headrace.mixtures.steering.request import NAME
from headrace.mixtures.view.summary import summarize
from headrace.mixtures.view.table import format_table

ODM = {"kind": "odm", "every": 5}
STAGES = {"kind": "held-out", "stages": [{"code": 1}, {"web": 0.25, "code": 0.75}]}


def planned(head: Callable[..., str], *, code: int = 2000, control: Any = None) -> Plan:
    """Plan 40 steps of two sources, the second of which may be small, and a phase of one."""
    from headrace.console import config as reader

    spec = {
        "sources": {
            "web": {"data": head("web", 90_000)},
            "code": {"data": head("code", code), "max_epochs": 2},
            "math": {"data": head("math", 9_000)},
        },
        "phases": {
            "main": {
                "tokens": 5120, "seq_len": 16, "batch": 128,
                "weights": {"web": 0.75, "code": 0.25}, "control": control,
            },
            "end": {"tokens": 1280, "weights": {"code": 0.5, "math": 0.5}},
        },
    }  # fmt: skip
    return resolve(reader.build(Mixture, spec, source="a test"))


@pytest.mark.parametrize(
    ("shares", "step", "why"),
    [
        ({"web": 0.5, "codx": 0.5}, None, "has no source codx"),
        ({"web": 0.5, "math": 0.5}, None, "phase main does not draw from math"),
        ({"web": 0.5}, None, "sum to 0.5"),
        ({"web": 1.5, "code": -0.5}, None, "share of code is -0.5"),
        ({"web": 1.0}, 11, "step 11 is too early: rows before step 12"),
        ({"web": 1.0}, 50, "the run ends at step 50"),
        ({"code": 1.0}, None, "code runs dry at row"),
        ({"math": 1.0}, 40, "has decided already from step 45 on"),
    ],
)
def test_a_request_that_the_plan_does_not_allow_is_refused(
    head: Callable[..., str], tmp_path: Path, shares: dict[str, float], step: int, why: str
) -> None:
    plan = planned(head)
    run = write_taken_run(tmp_path / "run", plan, 10)
    if "already" in why:
        result = decide_by_hand(Stream(plan), [], {"math": 1.0}, 12, 45, "id")
        decisions.append(run / decisions.NAME, result)
    with pytest.raises(PlanError, match=why):
        ask_run(run, shares, step)
    assert not (run / NAME).exists()


def test_one_request_waits_at_a_time(head: Callable[..., str], tmp_path: Path) -> None:
    run = write_taken_run(tmp_path / "run", planned(head), 10)
    done = CliRunner().invoke(main, ["steer", str(run), "--weights", "web=0.7,code=0.3", "--json"])
    assert done.exit_code == 0, done.output
    printed = json.loads(done.stdout)
    assert printed["shares"] == {"web": 0.7, "code": 0.3}
    assert json.loads((run / NAME).read_text())["id"] == printed["id"]
    pin_keys("steer", {"printed": printed, "file": json.loads((run / NAME).read_text())})
    with pytest.raises(PlanError, match="waits already"):
        ask_run(run, {"web": 1.0}, None)
    for words in ("web", "web=x", "web=0.5,web=0.5"):
        assert CliRunner().invoke(main, ["steer", str(run), "--weights", words]).exit_code == 2
    with pytest.raises(PlanError, match="there is no run"):
        ask_run(tmp_path, {"web": 1.0}, None)


def test_a_phase_has_one_controller(head: Callable[..., str], tmp_path: Path) -> None:
    run = write_taken_run(tmp_path / "run", planned(head, control=ODM), 10)
    with pytest.raises(PlanError, match=r"phase main has a controller \(odm\)"):
        ask_run(run, {"web": 1.0}, None)
    ask_run(run, {"math": 1.0}, 41)


def control(
    plan: Plan, steps: tuple[int, ...], held_out: tuple[float, ...] = ()
) -> list[RecordedDecision]:
    """Let the controller decide after these steps."""
    recorded: list[RecordedDecision] = []
    for turn, step in enumerate(steps):
        observed = Observed(losses={"web": 2.0 - turn / 8, "code": 3.5}, held_out=held_out)
        stream = Stream(add_decisions(plan, recorded))
        result = decide_by_controller(stream, recorded, step, step + 2, observed)
        assert result is not None
        recorded.append(result)
    return recorded


@pytest.mark.parametrize("code", [1100, 1500, 2000, 90_000])
def test_controllers_keep_max_epochs_to_the_end_of_the_plan(
    head: Callable[..., str], code: int
) -> None:
    plan = planned(head, code=code, control=STAGES)
    [result] = control(plan, (10,), (3.0, 3.0, 3.0))
    decided = add_decisions(plan, [result])
    assert not list(Stream(decided).shortages())
    assert ("code" in result.why["limits"]) == (code < 90_000)
    asked = result.why["limits"].get("code", 1.0)
    assert result.shares == {name: s for name, s in (("web", 1 - asked), ("code", asked)) if s}
    if code < 90_000:  # without the limit it runs dry, and little is left over with it
        free = replace(decided.decisions[0], weights=(0, 1, 0))
        assert list(Stream(replace(decided, decisions=(free,))).shortages())
        more = round(asked * UNITS) + UNITS // 40
        above = replace(free, weights=(UNITS - more, more, 0))
        assert list(Stream(replace(decided, decisions=(above,))).shortages())


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.floats(0, 1), min_size=1),
    st.dictionaries(st.sampled_from("abcdef"), st.integers(0, UNITS)),
)
def test_shares_fit_their_limits(shares: dict[str, float], caps: dict[str, int]) -> None:
    limits = {name: cap / UNITS for name, cap in caps.items() if name in shares}
    fitted = fit_limits(shares, limits)
    room = sum(caps.get(name, UNITS) for name in shares)
    assert (fitted is None) == (room < UNITS)
    if fitted is None:
        return
    assert sum(round(share * UNITS) for share in fitted.values()) == UNITS
    assert all(share <= limits.get(name, 1) for name, share in fitted.items())
    total = sum(shares.values())
    if total > 1e-3 and not limits:
        for name, share in shares.items():
            assert fitted[name] == pytest.approx(share / total, abs=2 / UNITS)


def write_decisions(folder: Path, plan: Plan, recorded: list[RecordedDecision]) -> Path:
    run = write_taken_run(folder, plan, 4)
    for decision in recorded:
        decisions.append(run / decisions.NAME, decision)
    return run


@pytest.mark.parametrize(("settings", "steps"), [(ODM, (5, 10, 15, 20)), (STAGES, (12, 30))])
def test_the_audit_repeats_controllers_bit_by_bit(
    head: Callable[..., str], tmp_path: Path, settings: dict[str, Any], steps: tuple[int, ...]
) -> None:
    """A decision with another input or output, in a chain that is whole, is found."""
    plan = planned(head, code=1800, control=settings)
    recorded = control(plan, steps, (3.0, 3.0, 3.0))
    run = write_decisions(tmp_path / "run", plan, recorded)
    audited = list(audit_decisions(open_plan(str(run))))
    assert [item.recorded.digest for item in audited] == [item.digest for item in recorded]
    assert all("repeated, and equal" in item.format_text() for item in audited)
    pin_keys(f"decisions-{settings['kind']}", [json.loads(item.format_json()) for item in audited])
    last = recorded[-1]
    lower = {name: loss / 2 for name, loss in last.why["losses"].items()}
    changes: list[dict[str, Any]] = [
        {"shares": {"web": 0.5, "code": 0.5}},
        {"why": last.why | {"limits": {}}},
        {"taken": {"web": last.row - 1, "code": 1}},
        {"why": last.why | {"before": {}}},
        {"why": last.why | {"shares": {"web": 0.5, "code": 0.5}}},
        {"why": last.why | {"after": {}}},
    ]
    if settings is ODM:
        changes.append({"why": last.why | {"losses": lower}})
    for number, change in enumerate(changes):
        fields = {name: getattr(last, name) for name in decisions.FIELDS} | change
        forged = RecordedDecision.chained(recorded[-2].digest, **fields)
        forged_run = write_decisions(tmp_path / str(number), plan, [*recorded[:-1], forged])
        with pytest.raises(IntegrityError, match="cannot be repeated"):
            list(audit_decisions(open_plan(str(forged_run))))


def test_a_plan_says_what_is_unknown_before_the_run(head: Callable[..., str]) -> None:
    plan = planned(head, control=STAGES)
    phases = tuple(replace(phase, control={}) for phase in plan.phases)
    without = replace(plan, phases=phases)
    assert plan.hash == without.hash, "control is no part of the order"
    assert plan.to_json()["phases"][0]["control"]["kind"] == "held-out"
    assert "control" not in without.to_json()["phases"][0]
    again = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again.phases[0].control["stages"] == STAGES["stages"]
    text = format_table(summarize(Stream(plan)))
    assert "The controller held-out decides the shares during the run" in text
    assert "code 25.00% to 100.00% (at most 2 total epochs)" in text
    assert "web 0.00% to 75.00%" in text
    rare = planned(head, control={"kind": "odm", "every": 1000})
    assert "The controller odm keeps the shares" in format_table(summarize(Stream(rare)))


@pytest.mark.parametrize(
    ("phase", "path"),
    [
        ({"weights": {"web": 1}, "control": ODM}, "phases.main.control"),
        ({"control": ODM | {"every": 0}}, "phases.main.control.every"),
        ({"control": {"kind": "held-out", "stages": [{"math": 1}]}}, "phases.main.control.stages"),
        ({"control": ODM, "weights": {"web": {"from": 1, "to": 0}, "code": {"from": 0, "to": 1}}},
         "phases.main.control"),
    ],
)  # fmt: skip
def test_a_controller_that_contradicts_its_phase_is_named(
    head: Callable[..., str], phase: dict[str, Any], path: str
) -> None:
    from headrace.console import config as reader

    sources = {name: {"data": head(name, 9000)} for name in ("web", "code", "math")}
    main_phase = {"tokens": 1280, "seq_len": 16, "batch": 64, "weights": {"web": 0.5, "code": 0.5}}
    spec = {"sources": sources, "phases": {"main": main_phase | phase}}
    with pytest.raises(ConfigError) as caught:
        resolve(reader.build(Mixture, spec, source="a test"))
    assert path in [problem.path for problem in caught.value.problems]


@pytest.mark.parametrize("choice", ["drop", "keep"])
def test_a_branch_keeps_or_drops_later_decisions(
    head: Callable[..., str], tmp_path: Path, choice: Any
) -> None:
    plan = planned(head, code=90_000)
    recorded: list[RecordedDecision] = []
    for step, shares in ((6, {"web": 0.5, "code": 0.5}), (20, {"web": 0.125, "code": 0.875})):
        stream = Stream(add_decisions(plan, recorded))
        recorded.append(decide_by_hand(stream, recorded, shares, step, None, str(step)))
    run = write_decisions(tmp_path / "run", plan, recorded)
    after = After(run=str(run), step=10, decisions=choice)
    phases = {"more": PhaseSpec(tokens=2560, weights={"web": 0.5, "code": 0.5})}
    branch = resolve(Mixture(phases=phases, after=after))
    point = open_branch_point(after)
    assert [decision.row for decision in point.plan.decisions] == [6 * 8]
    [phase] = branch.phases
    stretches = [(stretch.rows, stretch.weights[:2]) for stretch in phase.stretches]
    assert stretches == ([(160, (1, 1))] if choice == "drop" else [(80, (1, 1)), (80, (1, 7))])
    served = add_decisions(plan, recorded[:1])
    assert branch.debts[:2] == tuple(Stream(served).debts(80)[:2])
    replay = resolve(Mixture(phases={"again": PhaseSpec(tokens=2560, weights={"main": 1})},
                             after=after))  # fmt: skip
    shares = replay.phases[0].stretches[0].weights
    # Six steps of 3 to 1, then the decision for the rest of the phase, as it is known there.
    assert shares[1] / sum(shares) == pytest.approx((6 * 0.25 + 34 * 0.5) / 40)
    if choice == "keep":
        foreign = {"more": PhaseSpec(tokens=2560, weights={"web": 1.0})}
        with pytest.raises(PlanError, match="phase more does not draw from it"):
            resolve(Mixture(sources={"web": SourceSpec(data=plan.sources[0].url)}, phases=foreign,
                            after=after))  # fmt: skip


def test_a_kept_decision_brings_a_source_back(head: Callable[..., str], tmp_path: Path) -> None:
    """The first one leaves it out from the branch's first row on."""
    plan = planned(head, code=90_000)
    recorded: list[RecordedDecision] = []
    for step, shares in ((10, {"code": 1.0}), (20, {"web": 1.0})):
        stream = Stream(add_decisions(plan, recorded))
        recorded.append(decide_by_hand(stream, recorded, shares, step, None, str(step)))
    run = write_decisions(tmp_path / "run", plan, recorded)
    phases = {"more": PhaseSpec(tokens=2560, weights={"web": 0.5, "code": 0.5})}
    branch = resolve(Mixture(phases=phases, after=After(run=str(run), step=10, decisions="keep")))
    weights = [stretch.weights[:2] for stretch in branch.phases[0].stretches]
    assert weights == [(0, 1), (1, 0)]
