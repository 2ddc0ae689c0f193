"""Kernels are compiled before the first step: by one rank of each node, for all of its ranks."""

from __future__ import annotations

from pathlib import Path

from support.ranks.ranks import Ranks

TASK = "compiling.compile_run"


def test_one_rank_of_a_node_compiles(two_ranks: Ranks, tmp_path: Path) -> None:
    first, second = two_ranks.run(TASK, tmp_path, ["a", "a"])
    assert first["arch"] == [90] and first["attests"] == [True] and first["rows"][0] > 1
    assert "compiling 17 of 23 programs" in first["beats"]
    assert second["arch"] == [] and second["beats"] == ["waiting for the programs of the kernels"]
    assert first["remarks"] == ["1 of the programs in C were damaged: compiled again (glu)"]
    assert second["remarks"] == [], "the first rank says it"


def test_each_node_compiles(two_ranks: Ranks, tmp_path: Path) -> None:
    outcomes = two_ranks.run(TASK, tmp_path, ["a", "b"])
    assert [outcome["arch"] for outcome in outcomes] == [[90], [90]]


def test_what_was_attested_is_not_compiled_for_it(two_ranks: Ranks, tmp_path: Path) -> None:
    first, _ = two_ranks.run(TASK, tmp_path, ["a", "a"], attested=True)
    assert first["attests"] == [False]


def test_without_a_c_compiler_no_rank_starts(two_ranks: Ranks, tmp_path: Path) -> None:
    errors = two_ranks.run(TASK, tmp_path, ["a", "a"], "Triton finds no gcc; apt-get install gcc")
    assert errors[0] == errors[1] and "Triton finds no gcc" in errors[0]
    assert "apt-get install gcc" in errors[0]


def test_a_compiler_that_crashes_stops_no_run(two_ranks: Ranks, tmp_path: Path) -> None:
    first, _ = two_ranks.run(TASK, tmp_path, ["a", "a"], "crash")
    assert first["remarks"] == ["the programs of the model could not be compiled: killed"]


def test_on_a_cpu_nothing_is_compiled(two_ranks: Ranks, tmp_path: Path) -> None:
    assert two_ranks.run(TASK, tmp_path, ["a", "a"], device="cpu")[0]["beats"] == []
