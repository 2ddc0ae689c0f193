"""Agreement in words; tests/trainer/launch/test_agreement.py has the ranks of a run."""

from __future__ import annotations

from support.ranks.ranks import Ranks

from headrace.console.differences import Difference
from headrace.console.errors import IntegrityError
from headrace.trainer.cluster.agreement import describe_differences


def test_ranks_with_one_value_are_named_together() -> None:
    many = [Difference("optimizer.lr", 0.1, 0.2)]
    of_ranks = [[], many, [Difference("optimizer.lr", 0.1, None)], *[many] * 20]
    assert describe_differences(of_ranks) == [
        "optimizer.lr: rank 0 has 0.1, ranks 1, 3, 4, 5, 6, 7, 8, 9, … have 0.2, "
        "rank 2 has no value"
    ]


def test_a_long_value_is_cut() -> None:
    (line,) = describe_differences([[], [Difference("pattern", "a", "b" * 999)]])
    assert len(line) < 250 and line.endswith("bbb…")


def test_equal_facts_are_agreed(two_ranks: Ranks) -> None:
    assert two_ranks.run("compare", [{"lr": 1.0}, {"lr": 1.0}]) == ["agreed", "agreed"]


def test_all_ranks_raise_if_one_differs(two_ranks: Ranks) -> None:
    expected = "the ranks do not agree on a test; lr: rank 0 has 1.0, rank 1 has 2.0"
    assert two_ranks.run("compare", [{"lr": 1.0}, {"lr": 2.0}]) == [expected] * 2


def test_an_error_of_rank_0_is_the_error_of_all(two_ranks: Ranks) -> None:
    """The others would wait for it."""
    assert two_ranks.run("refuse_first", None) == ["done"] * 2
    error = IntegrityError("the ledger ends at step 3", hint="restore it")
    expected = "IntegrityError: the ledger ends at step 3\n  hint:  restore it"
    assert two_ranks.run("refuse_first", error) == [expected] * 2
    first, second = two_ranks.run("refuse_first", ValueError("a bug"))
    assert first == "ValueError: a bug"
    assert second.startswith("RunError: rank 0 failed: ValueError('a bug')")


def test_a_rank_that_fails_stops_all(two_ranks: Ranks) -> None:
    """The other rank would wait for it. If both fail alike, they raise their own error."""
    for facts, able, failed in (([{"lr": 1.0}, "no file"], 0, 1), (["no file", {"lr": 1.0}], 1, 0)):
        error = f"rank {able} can read a test, and rank {failed} cannot; rank {failed}: no file"
        assert two_ranks.run("compare", facts) == [error] * 2
    assert two_ranks.run("compare", ["no file", "no file"]) == ["no file"] * 2


def test_a_rank_knows_whether_it_waits_for_others(two_ranks: Ranks) -> None:
    assert two_ranks.run("late_for_barrier") == [True, False]
