from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from headrace.console.errors import IntegrityError, StorageError
from headrace.dataplane.order.plan import Parent, Plan


def test_round_trip(two_phases: Plan, tmp_path: Path) -> None:
    two_phases.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == two_phases
    assert again.hash == two_phases.hash


def test_relative_datasets_are_resolved_here_or_where_the_plan_was_made(
    two_phases: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *others = two_phases.sources
    relative = replace(two_phases, sources=(replace(first, url="data/web"), *others))
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
        lambda data: data.update(version=99),
    ],
)
def test_a_changed_plan_is_refused(two_phases: Plan, tmp_path: Path, change: Callable) -> None:  # type: ignore[type-arg]
    file = tmp_path / "plan.json"
    two_phases.save(file)
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))
    with pytest.raises(IntegrityError, match="changed after it was written"):
        Plan.load(file)


def test_an_incomplete_or_newer_plan_is_refused(
    two_phases: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "plan.json"
    two_phases.save(file)
    whole = file.read_text()
    for part in (whole[:200], "0", "[]"):
        file.write_text(part)
        with pytest.raises(IntegrityError, match="not a whole plan"):
            Plan.load(file)
    file.write_text(whole)
    monkeypatch.setattr("headrace.dataplane.order.plan.VERSIONS", (98, 99))
    with pytest.raises(StorageError, match="version 4; this headrace reads 98, 99"):
        Plan.load(file)


def test_the_hash_names_the_order_alone(two_phases: Plan) -> None:
    first, *others = two_phases.sources
    same = [
        replace(two_phases, sources=(replace(first, url="s3://mirror"), *others)),
        replace(two_phases, sources=(replace(first, max_epochs=9), *others)),
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
    assert {plan.hash for plan in same} == {two_phases.hash}
    different = [
        replace(two_phases, sources=(replace(first, dataset="0" * 64), *others)),
        replace(two_phases, sources=(replace(first, order=replace(first.order, seed=8)), *others)),
        replace(two_phases, isolate_documents=False),
        replace(two_phases, parent=Parent(hash="x", row=0)),
        replace(two_phases, phases=two_phases.phases[:1]),
    ]
    hashes = {plan.hash for plan in different}
    assert len(hashes) == len(different) and two_phases.hash not in hashes
