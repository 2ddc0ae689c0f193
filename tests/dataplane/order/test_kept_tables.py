from __future__ import annotations

import hashlib
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from headrace.dataplane.order import stream as streams
from headrace.dataplane.order.apportionment import Assignment
from headrace.dataplane.order.kept_tables import load_tables
from headrace.dataplane.order.plan import Phase, Plan, PlanSource, Stretch
from headrace.dataplane.order.simulation import Segment, simulate
from headrace.dataplane.order.source_order import SourceOrder
from headrace.dataplane.order.stream import Stream
from headrace.dataplane.order.tables import Tables
from headrace.dataplane.storage.host_files import folder

SEGMENTS = [Segment(300, (5, 2, 1), 8), Segment(90, (0, 1, 1), 16)]
FILE = "plan.tables"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return folder()


class Computed:
    """Computes the tables of SEGMENTS, and counts how often."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> Tables:
        self.times += 1
        return simulate(SEGMENTS)[0]


def located(tables: Tables) -> list[list[int]]:
    assignment = Assignment(SEGMENTS, tables)
    sources, draws = assignment.locate(np.arange(assignment.rows))
    return [sources.tolist(), draws.tolist()]


def test_tables_are_computed_once_and_mapped(cache: Path) -> None:
    compute = Computed()
    first, second = load_tables("plan", compute, Tables), load_tables("plan", compute, Tables)
    assert compute.times == 1
    for name, array in simulate(SEGMENTS)[0].arrays.items():
        assert array.dtype == second.arrays[name].dtype
        assert array.tolist() == second.arrays[name].tolist(), name
        assert not second.arrays[name].flags.owndata and not second.arrays[name].flags.writeable
    assert located(first) == located(second) == located(compute())
    assert [file.name for file in sorted(cache.iterdir())] == ["plan.lock", FILE]


def test_another_plan_has_other_tables() -> None:
    """Negative control: the name decides which tables are mapped."""
    load_tables("plan", Computed(), Tables)
    recomputed = Computed()
    load_tables("other", recomputed, Tables)
    assert recomputed.times == 1


@pytest.mark.parametrize("place", [0, 20, 32, 60, 4200, -1])
def test_a_flipped_byte_is_noticed_and_repaired(cache: Path, place: int) -> None:
    whole = located(load_tables("plan", Computed(), Tables))
    data = bytearray((cache / FILE).read_bytes())
    data[place] ^= 1
    (cache / FILE).write_bytes(data)
    again, never = Computed(), Computed()
    assert located(load_tables("plan", again, Tables)) == whole and again.times == 1
    assert located(load_tables("plan", never, Tables)) == whole and never.times == 0


@pytest.mark.parametrize("size", [0, 10, 40, 3000, 4500])
def test_a_shortened_file_is_noticed_and_repaired(cache: Path, size: int) -> None:
    whole = located(load_tables("plan", Computed(), Tables))
    data = (cache / FILE).read_bytes()
    assert size < len(data)
    (cache / FILE).write_bytes(data[:size])
    again = Computed()
    assert located(load_tables("plan", again, Tables)) == whole and again.times == 1
    assert (cache / FILE).read_bytes() == data


def test_processes_at_the_same_time_compute_once() -> None:
    """Threads stand for processes: a lock belongs to an open file, not to a process."""
    compute, barrier = Computed(), threading.Barrier(4)
    results = []

    def start() -> None:
        barrier.wait()
        results.append(located(load_tables("plan", compute, Tables)))

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compute.times == 1
    assert results == [located(Computed()())] * 4


@pytest.mark.parametrize("home", [True, False])
def test_without_a_folder_each_process_computes(
    cache: Path, home: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if home:
        cache.write_text("a file where the folder would be")
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.delenv("HOME")
        monkeypatch.setattr("os.getuid", lambda: 123_456_789)
    compute = Computed()
    assert located(load_tables("plan", compute, Tables)) == located(
        load_tables("plan", compute, Tables)
    )
    assert compute.times == 2


def large_plan() -> Plan:
    """A plan whose table has 22,000 rows."""
    weights = (10_001, 7_000, 4_990, 9)
    sources = tuple(
        PlanSource(
            name=f"s{number}",
            url="",
            dataset=str(number),
            generations=1,
            max_epochs=1,
            order=SourceOrder(seed=0, name=f"s{number}", tokens=1 << 30, chunk=1024, window=4),
        )
        for number in range(len(weights))
    )
    phase = Phase(
        name="all",
        first_row=0,
        first_step=0,
        first_token=0,
        rows=150_000,
        seq_len=8,
        batch_rows=10,
        stretches=(Stretch(rows=150_000, weights=weights),),
    )
    return Plan(seed=0, sources=sources, phases=(phase,), tokenizer="", vocab_size=1)


def test_the_order_of_a_large_plan_is_kept_and_stays_as_it_was(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = large_plan()
    rows = np.arange(0, plan.end_row, 7)
    first = Stream(plan).locate(rows)
    assert (cache / f"{plan.hash}.tables").exists()
    digest = hashlib.sha256()
    for array in (first.sources.astype("<i4"), first.epochs, first.tokens):
        digest.update(array.tobytes())
    assert digest.hexdigest()[:16] == "dccc34d6f19b9863"

    def refuse(*_: object) -> None:
        raise AssertionError("the tables are on the disk")

    monkeypatch.setattr(streams, "simulate", refuse)
    second = Stream(plan).locate(rows)
    assert second.sources.tolist() == first.sources.tolist()
    assert second.tokens.tolist() == first.tokens.tolist()


def test_files_that_were_not_opened_for_long_are_deleted(cache: Path) -> None:
    for name in ("old", "opened", "fresh"):
        load_tables(name, Computed(), Tables)
    month_ago = time.time() - 31 * 24 * 3600
    for name in ("old", "opened"):
        os.utime(cache / f"{name}.tables", (month_ago, month_ago))
    load_tables("opened", Computed(), Tables)
    load_tables("new", Computed(), Tables)
    names = {file.name for file in cache.glob("*.tables")}
    assert names == {"opened.tables", "fresh.tables", "new.tables"}
