from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from headrace.console.errors import IntegrityError, StorageError
from headrace.dataplane.order.plan import MAX_TABLE_ROWS, Parent, Plan
from headrace.dataplane.storage.sealed import seal


def test_round_trip(two_phases: Plan, tmp_path: Path) -> None:
    two_phases.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == two_phases
    assert again.hash == two_phases.hash


def test_relative_datasets_are_resolved_here_or_where_the_plan_was_made(
    two_phases: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *later_sources = two_phases.sources
    relative = replace(two_phases, sources=(replace(first, url="data/web"), *later_sources))
    home, moved, elsewhere = (tmp_path / name for name in ("home", "moved", "elsewhere"))
    for folder in (home / "data/web", moved / "data/web", elsewhere):
        folder.mkdir(parents=True)
    monkeypatch.chdir(home)
    relative.save(tmp_path / "plan.json")
    for folder, url in ((home, "data/web"), (moved, "data/web"), (elsewhere, f"{home}/data/web")):
        monkeypatch.chdir(folder)
        assert Plan.load(tmp_path / "plan.json").sources[0].url == url
    (home / "data/web").rmdir()
    assert Plan.load(tmp_path / "plan.json").sources[0].url == "data/web"  # in neither: unchanged


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data["phases"][0]["stretches"][0].update(weights=[1, 1, 1]),
        lambda data: data["phases"][1].update(first_row=3),
        lambda data: data["phases"][0].update(batch_rows=5),
        lambda data: data["sources"][0].update(url="s3://another"),
    ],
)
def test_a_changed_plan_is_refused(two_phases: Plan, tmp_path: Path, change: Callable) -> None:  # type: ignore[type-arg]
    file = tmp_path / "plan.json"
    two_phases.save(file)
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))
    with pytest.raises(IntegrityError, match="does not match its hash"):
        Plan.load(file)


def test_an_incomplete_plan_is_refused(two_phases: Plan, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    two_phases.save(file)
    whole = file.read_text()
    for part in (whole[:200], "0", "[]"):
        file.write_text(part)
        with pytest.raises(IntegrityError, match="is damaged"):
            Plan.load(file)
    file.write_bytes(seal({"version": 1, "folder": "."}))
    with pytest.raises(IntegrityError, match="not a whole plan"):
        Plan.load(file)


def test_a_plan_of_another_version_is_refused(two_phases: Plan, tmp_path: Path) -> None:
    """Both versions are named, also if that version seals in another way."""
    file = tmp_path / "plan.json"
    two_phases.save(file)
    data = json.loads(file.read_text())
    file.write_text(json.dumps({**data, "version": 5, "seal": "0" * 32}))
    with pytest.raises(StorageError, match="version 5; this headrace reads 1") as caught:
        Plan.load(file)
    assert caught.value.hint == "make the plan again with `mixtures plan`"


def test_the_plan_decides_how_its_rows_are_assigned(two_phases: Plan) -> None:
    """By tables; by lines if a share changes or needs a longer table, if the plan continues a run,
    or if a source is to give just what it has left."""
    phase, *later_phases = two_phases.phases
    (stretch,) = phase.stretches
    size = sum(stretch.weights)

    def plan_with(**changes: object) -> Plan:
        return replace(two_phases, phases=(replace(phase, **changes), *later_phases))

    longest = tuple(MAX_TABLE_ROWS // size * weight for weight in stretch.weights)
    longest = (longest[0] + MAX_TABLE_ROWS - sum(longest), *longest[1:])
    longer = (longest[0] + 1, *longest[1:])
    assert not two_phases.fair
    assert not plan_with(stretches=(replace(stretch, weights=longest),)).fair
    fair = [
        plan_with(stretches=(replace(stretch, weights=longer),)),
        plan_with(stretches=(replace(stretch, to=stretch.weights[::-1]),)),
        plan_with(left_out={"web": 0}),
        replace(two_phases, parent=Parent(hash="x", row=0)),
    ]
    assert all(plan.fair for plan in fair)
    assert fair[2].hash != two_phases.hash, "the hash covers the choice"


def test_the_hash_names_the_order_alone(two_phases: Plan) -> None:
    first, *later_sources = two_phases.sources
    equal_plans = [
        replace(two_phases, sources=(replace(first, url="s3://mirror"), *later_sources)),
        replace(two_phases, sources=(replace(first, max_epochs=9), *later_sources)),
        replace(
            two_phases,
            phases=tuple(
                replace(p, lr={"peak": 3}, name=f"x{p.name}", batch_rows=1)
                for p in two_phases.phases
            ),
        ),
    ]
    child = replace(two_phases, parent=Parent(hash="x", row=0))
    moved = Parent(hash="x", row=0, run="elsewhere", phases={"a": {"web": Fraction(1, 3)}})
    assert replace(child, parent=moved).hash == child.hash
    again = Plan.from_json(json.loads(json.dumps(replace(child, parent=moved).to_json())))
    assert again.parent == moved
    assert {plan.hash for plan in equal_plans} == {two_phases.hash}
    different = [
        replace(two_phases, sources=(replace(first, dataset="0" * 64), *later_sources)),
        replace(
            two_phases, sources=(replace(first, order=replace(first.order, seed=8)), *later_sources)
        ),
        replace(two_phases, isolate_documents=False),
        replace(two_phases, parent=Parent(hash="x", row=0)),
        replace(two_phases, phases=two_phases.phases[:1]),
    ]
    hashes = {plan.hash for plan in different}
    assert len(hashes) == len(different) and two_phases.hash not in hashes
