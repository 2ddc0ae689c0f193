from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.console.errors import RunError
from headrace.models.config.config import load_model_config
from headrace.reports.scores import tables
from headrace.trainer.cluster.lost_ranks import LostRankError
from headrace.trainer.scores import harness
from headrace.trainer.scores.config import ScoresConfig
from headrace.trainer.scores.missing import (
    ScoreGap,
    failure_entry,
    find_failures,
    find_gaps,
    unanswered_tasks,
)


def entry(step: int, *scored: str, asked: tuple[str, ...] = (), **bad: str) -> dict[str, Any]:
    tasks = {name: {"metrics": {"acc,none": 0.5}} for name in scored}
    return {"step": step, "asked": list(asked or (*scored, *bad)), "failed": bad, "tasks": tasks}


def test_a_task_is_owed_until_it_was_scored_or_failed_at_that_step() -> None:
    assert unanswered_tasks(("a", "b"), [], 4) == ("a", "b")
    assert unanswered_tasks(("a", "b"), [entry(2, "a", "b"), entry(4, "b")], 4) == ("a",)
    assert unanswered_tasks(("a", "b"), [entry(4, "b", a="no network")], 4) == ()
    tag = entry(4, "arc_easy", "arc_challenge", asked=("ai2_arc",))
    assert unanswered_tasks(("ai2_arc",), [tag], 4) == (), "a tag has no scores of its own"


def test_a_quick_look_answers_nothing() -> None:
    look = [{**entry(4, "a"), "limit": 2, "ema": False}]
    assert (
        unanswered_tasks(("a",), look, 4) == unanswered_tasks(("a",), look, 4, limit=500) == ("a",)
    )
    assert unanswered_tasks(("a",), look, 4, limit=2) == ()
    assert find_gaps(("a",), look, 4) == [ScoreGap(4, ("a",))]
    whole = [{**entry(4, "a"), "limit": None, "ema": False}]
    assert unanswered_tasks(("a",), whole, 4, limit=2) == ()
    assert unanswered_tasks(("a",), whole, 4, ema=True) == ("a",)
    assert unanswered_tasks(("a",), [entry(4, a="no network")], 4, ema=True) == ()


def test_a_failure_lasts_until_the_task_is_scored() -> None:
    entries = [entry(2, a="old"), entry(2, a="no network"), entry(4, "b", a="no network")]
    two, four = (ScoreGap(step, ("a",), "no network") for step in (2, 4))
    assert find_failures(entries, ("a",)) == [two, four]
    assert find_failures([*entries, entry(2, "a")], ("a",)) == [four]
    assert find_failures([entry(2, "a"), entry(2, a="later")]) == [], "it has scores"


def test_one_error_of_all_tasks_is_one_gap() -> None:
    error = RunError("rank 1 failed:\n  out of memory.", hint="x")
    (gap,) = find_failures([{"step": 3, **failure_entry(("a", "b"), error)}])
    assert gap.tasks == ("a", "b") and gap.reason == "rank 1 failed: out of memory."
    assert gap.sentence() == "the scores of a, b at step 3 failed: rank 1 failed: out of memory"
    assert gap.command("runs/x") == "trainer eval runs/x --step 3 --tasks a,b"


def test_the_command_names_tasks_that_the_run_does_not_score() -> None:
    """Without --tasks it takes those of the run's key `scores`, and needs that key."""
    bad = {**entry(4, own="x", a="x", b="x"), "include_path": "my tasks"}
    command_gap, run_gap = find_gaps(("own",), [bad], None)
    assert run_gap.command("a run") == "trainer eval 'a run' --step 4"
    assert (
        command_gap.command("r") == "trainer eval r --step 4 --tasks a,b --include-path 'my tasks'"
    )


def test_only_a_run_that_scores_and_is_at_its_end_owes_scores() -> None:
    assert find_gaps(("a",), [], 8) == [ScoreGap(8, ("a",))]
    assert find_gaps(("a",), [], None) == find_gaps((), [], 8) == find_gaps(None, [], 8) == []
    assert find_gaps(("a",), [entry(2, a="x")], None) == [ScoreGap(2, ("a",), "x")]


def test_the_report_says_what_is_missing_and_how_to_compute_it() -> None:
    gaps = [ScoreGap(8, ("a",)), ScoreGap(4, ("<b>",), "no network")]
    page = tables.scores_section([entry(4, b="no network")], gaps, "runs/x")
    assert "Step 8 has no scores of a yet." in page and "&lt;b&gt;" in page
    assert "<code>trainer eval runs/x --step 8</code>" in page and "<table" not in page
    assert "<table" in tables.scores_section([entry(4, "a")], gaps, "runs/x")


def test_a_lost_rank_is_no_failure_of_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run ends, and scores the checkpoint when it is resumed."""
    model: Any = load_model_config("tiny-transformer")
    source: Any = SimpleNamespace(where="here", model=model)
    nothing: Any = None
    config = ScoresConfig(tasks=("a", "b"))

    def raising(error: RunError) -> Any:
        def fail(*words: Any) -> None:
            raise error

        monkeypatch.setattr(harness, "evaluate_task", fail)
        return harness.evaluate(nothing, source, nothing, config, nothing)

    monkeypatch.setattr(harness, "HarnessModel", lambda *words, **options: None)
    entry, errors = raising(RunError("no network"))
    assert entry["failed"] == {"a": "no network", "b": "no network"} and len(errors) == 2
    with pytest.raises(LostRankError):
        raising(LostRankError("rank 0 lost its connection to another rank"))
