"""Rows refilled in the place of those with documents to leave out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from support.data.small_data import plan_of, random_documents, write_dataset

from headrace.console.errors import ConfigError, PlanError
from headrace.dataplane.order.plan import Plan
from headrace.dataplane.order.stream import Stream
from headrace.mixtures.audit.auditor import Auditor
from headrace.mixtures.cli import main
from headrace.mixtures.planning.open_plan import OpenedPlan

DROPPED = {3, 4, 17, 60}


@pytest.fixture
def spec(tmp_path: Path) -> dict[str, Any]:
    write_dataset(str(tmp_path / "web"), random_documents(1, 120))
    write_dataset(str(tmp_path / "code"), random_documents(2, 90, longest=40))
    (tmp_path / "drop.txt").write_text("".join(f"id-{number}\n" for number in sorted(DROPPED)))
    return {
        "seed": 4,
        "chunk": 128,
        "window": 4,
        "without": [str(tmp_path / "drop.txt")],
        "sources": {
            "web": {"data": str(tmp_path / "web"), "max_epochs": 2},
            "code": {"data": str(tmp_path / "code"), "max_epochs": 5},
        },
        "phases": {
            "first": {
                "tokens": 16_384,
                "seq_len": 32,
                "batch": 256,
                "weights": {"web": 0.8, "code": 0.2},
            },
            "second": {"tokens": 4_096, "weights": {"web": 0.5, "code": 0.5}},
        },
    }


def documents_by_row(plan: Plan) -> Iterator[tuple[str, set[tuple[str, int]]]]:
    """Yield the hash and the documents of each row."""
    for row in Auditor(OpenedPlan(Stream(plan))).rows(range(plan.end_row)):
        yield row.tokens_hash, {(row.source, piece.document) for piece in row.documents}


def test_rows_of_dropped_documents_are_refilled_and_all_others_are_equal(
    tmp_path: Path, spec: dict[str, Any]
) -> None:
    whole = plan_of(spec)
    plan_of({**spec, "refill": True}).save(tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.hash != whole.hash and plan.end_row == whole.end_row
    before, after = list(documents_by_row(whole)), list(documents_by_row(plan))
    dropped = {(source, number) for source in ("web", "code") for number in DROPPED}
    touched = [bool(documents & dropped) for _, documents in before]
    assert 20 < sum(touched) < len(touched) // 2
    for is_touched, (old, _), (new, documents) in zip(touched, before, after, strict=True):
        assert (old != new) == is_touched and not documents & dropped
    rows = np.arange(plan.end_row)
    (whole_draws, whole_sources), (draws, sources) = map(serve, (whole, plan), (rows, rows))
    assert np.array_equal(sources, whole_sources)
    for source in (0, 1):
        served, of_whole = draws[sources == source], whole_draws[sources == source]
        assert len(set(served)) == len(served), "no row is served twice"
        assert set(served[served != of_whole]).isdisjoint(of_whole)


def serve(plan: Plan, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the draws whose rows are served, and their sources: a draw is an epoch and a token."""
    located = Stream(plan).locate(rows)
    return located.epochs * 10**9 + located.tokens, located.sources


def test_documents_are_found_where_they_are_served(tmp_path: Path, spec: dict[str, Any]) -> None:
    """The inverse of the order knows both the replaced rows and the substitutes."""
    plan = plan_of({**spec, "refill": True})
    plan.save(tmp_path / "plan.json")
    expected: dict[tuple[str, int], list[int]] = {}
    for row, (_, documents) in enumerate(documents_by_row(plan)):
        for document in documents:
            expected.setdefault(document, []).append(row)
    (tmp_path / "ids.txt").write_text("".join(f"id-{number}\n" for number in range(90)))
    words = [
        "find",
        str(tmp_path / "plan.json"),
        "--documents",
        str(tmp_path / "ids.txt"),
        "--json",
    ]
    shown = CliRunner().invoke(main, words)
    assert shown.exit_code == 0, shown.output
    for answer in map(json.loads, shown.stdout.splitlines()[1:]):
        rows = [exposure["row"] for exposure in answer["exposures"]]
        assert sorted(set(rows)) == expected.get((answer["source"], answer["document"]), [])
    planned = CliRunner().invoke(main, ["plan", str(tmp_path / "plan.json")])
    assert "are refilled with rows that follow the plan's last" in planned.output


def test_what_cannot_be_refilled_is_named(tmp_path: Path, spec: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"rows are left to refill them; raise its max_epochs"):
        sources = {**spec["sources"], "code": {"data": str(tmp_path / "code"), "max_epochs": 3}}
        plan_of({**spec, "refill": True, "sources": sources})
    with pytest.raises(ConfigError, match="all phases must have the same seq_len"):
        phases = {**spec["phases"], "second": {**spec["phases"]["second"], "seq_len": 64}}
        plan_of({**spec, "refill": True, "phases": phases})
    with pytest.raises(ConfigError, match="name some"):
        plan_of({**spec, "refill": True, "without": []})
    plan_of({**spec, "refill": True}).save(tmp_path / "plan.json")
    phase = {"more": {"tokens": 1_024, "weights": {"web": 1}}}
    with pytest.raises((PlanError, ConfigError), match="would serve again"):
        plan_of({"after": {"run": str(tmp_path), "step": 80}, "phases": phase})
