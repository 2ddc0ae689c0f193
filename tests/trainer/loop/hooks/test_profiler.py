from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from headrace.trainer.loop.hooks.profiler import MemorySnapshot, Profiler


def traced(profiler: Profiler) -> list[str]:
    with gzip.open(profiler.file) as file:
        return [event.get("name", "") for event in json.load(file)["traceEvents"]]


def test_only_the_chosen_steps_are_traced(tmp_path: Path) -> None:
    profiler = Profiler(tmp_path / "profiles", range(2, 4), rank=1)
    for step, name in enumerate(("tan", "tan", "cos", "cos", "sin", "sin")):
        profiler.step_begins(step)
        getattr(torch.ones(3), name)()
    profiler.close()
    assert profiler.file.name == "steps-2-4.rank-1.json.gz"
    names = traced(profiler)
    assert names.count("aten::cos") == 2
    assert "aten::sin" not in names and "aten::tan" not in names
    assert "[memory]" in names, "allocations"
    heading, _, *rows = profiler.table.read_text().splitlines()
    assert heading.startswith("device time of 2 steps from step 2, rank 1, ")
    assert any(row.endswith(" 1  aten::cos: aten::cos") for row in rows), "1 a step, 2 steps"


def test_a_trace_cut_short_by_a_kill_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dying(_: object, path: str) -> None:
        Path(path).write_bytes(b"half")
        raise KeyboardInterrupt

    profiler = Profiler(tmp_path, range(1, 2), rank=0)
    profiler.step_begins(1)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch.profiler.profile, "export_chrome_trace", dying)
        profiler.close()
    again = Profiler(tmp_path, range(1, 2), rank=0)
    again.step_begins(1)
    torch.ones(3).cos()
    again.close()
    assert "aten::cos" in traced(again)
    assert sorted(tmp_path.iterdir()) == [again.file, again.table]


def test_a_run_that_ends_within_the_steps_writes_its_trace(tmp_path: Path) -> None:
    profiler = Profiler(tmp_path, range(1, 100), rank=0)
    profiler.step_begins(1)
    torch.ones(3).cos()
    profiler.close()
    profiler.close()
    assert "aten::cos" in traced(profiler)


class Allocator:
    """Stand-in for the functions of torch.cuda.memory that MemorySnapshot calls."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        patch.setattr(torch.cuda.memory, "_record_memory_history", self.record)
        patch.setattr(torch.cuda.memory, "_dump_snapshot", self.dump)

    def record(self, enabled: str | None = "all") -> None:
        self.calls.append(f"record {enabled}")

    def dump(self, path: str) -> None:
        Path(path).write_bytes(b"snapshot")
        self.calls.append("dump")


def test_a_snapshot_holds_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator(monkeypatch)
    snapshot = MemorySnapshot(tmp_path / "profiles", 2, rank=1)
    for step in range(4):
        snapshot.step_begins(step)
        assert snapshot.file.exists() == (step > 2)
    snapshot.close()
    assert allocator.calls == ["record all", "dump", "record None"]
    assert [file.name for file in snapshot.file.parent.iterdir()] == ["memory-2.rank-1.pickle"]


def test_a_snapshot_is_written_where_the_step_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Allocator(monkeypatch)
    snapshot = MemorySnapshot(tmp_path, 0, rank=0)
    snapshot.step_begins(0)
    snapshot.close()
    assert snapshot.file.read_bytes() == b"snapshot"
