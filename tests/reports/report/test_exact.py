"""A report's numbers beside the same numbers from all lines at once, held in memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.pages.written_runs import make_run

from headrace.reports.report.outliers import find_outliers
from headrace.reports.report.reading import chunks
from headrace.reports.report.reading.buckets import CurveBuckets
from headrace.reports.report.reading.candidates import (
    DEVIATIONS,
    MAX_OUTLIERS,
    MIN_DISTANCE,
    WINDOW,
)
from headrace.reports.report.reading.data import RunData, first_difference
from headrace.trainer.folders.folder import RunFolder
from headrace.trainer.loop.guard import robust_center

MAYBE = st.one_of(st.none(), st.floats(0.1, 10))
LINE = st.fixed_dictionaries(
    {
        "loss": MAYBE,
        "grad_norm": MAYBE,
        "mfu": MAYBE,
        "memory": st.integers(0, 2**40),
        "tokens_per_second": st.floats(1, 1e6),
        "seconds": st.floats(0.01, 9),
        "data_wait": st.floats(0, 1),
        "skipped": st.booleans(),
    }
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run whose facts are stored: each report of it needs no torch."""
    from headrace.trainer.accounting import about
    from headrace.trainer.run.stored import read_run

    result = make_run(tmp_path_factory.mktemp("run"), [1.0] * 600)
    about.save_facts(read_run(result))
    return result


def write(folder: RunFolder, lines: list[dict[str, Any]]) -> None:
    with folder.metrics.open("w") as file:
        for step, line in enumerate(lines):
            sources = {"synthetic": {"loss": line["loss"], "weight": 64.0, "rows": 4}}
            entry = {"step": step, "tokens": 64 * (step + 1), "lr": 1e-3, "phase": "synthetic"}
            file.write(json.dumps({"sources": sources, **entry, **line}) + "\n")


@settings(max_examples=12, deadline=None)
@given(lines=st.lists(LINE, min_size=1, max_size=70), size=st.sampled_from([400, 2000, 1 << 20]))
def test_totals_are_those_of_all_lines(
    folder: RunFolder, lines: list[dict[str, Any]], size: int
) -> None:
    write(folder, lines)
    run = RunData.load(folder, chunk_bytes=size)
    seconds = sum(line["seconds"] for line in lines)
    warm = [line for step, line in enumerate(lines) if step not in (0, 2)] or lines
    speed = sum(line["tokens_per_second"] * line["seconds"] for line in warm)
    last = [line["loss"] for line in lines[-max(1, len(lines) // 10) :] if line["loss"] is not None]
    mfu = [line["mfu"] for line in lines if line["mfu"] is not None]
    assert (run.steps, run.tokens) == (len(lines), 64 * len(lines))
    assert run.totals.seconds == pytest.approx(seconds, rel=1e-12)
    warm_seconds = sum(line["seconds"] for line in warm)
    assert run.totals.tokens_per_second == pytest.approx(speed / warm_seconds, rel=1e-12)
    wait = sum(line["data_wait"] * line["seconds"] for line in lines) / seconds
    assert run.totals.data_wait == pytest.approx(wait, rel=1e-12)
    assert run.memory == max(line["memory"] for line in lines)
    assert run.totals.skipped == [step for step, line in enumerate(lines) if line["skipped"]]
    assert run.loss == (pytest.approx(sum(last) / len(last)) if last else None)
    assert run.totals.mean("mfu") == (pytest.approx(sum(mfu) / len(mfu)) if mfu else None)
    assert run.phases()[0].realised == [64 * len(lines)]
    expected = [np.nan if line["loss"] is None else line["loss"] for line in lines]
    assert np.array_equal(run.table.mean("loss"), np.float32(expected), equal_nan=True)


def by_hand(losses: list[float | None]) -> list[int]:
    """Return the outlier steps, found by looking at one loss after the other."""
    window: deque[float] = deque(maxlen=WINDOW)
    result = []
    for step, loss in enumerate(losses):
        if loss is None:
            continue
        if len(window) >= WINDOW // 4 and loss > max(window):
            middle, deviation = robust_center(window)
            if (loss - middle) / deviation > DEVIATIONS:
                result.append(((loss - middle) / deviation, step))
        window.append(loss)
    kept: list[int] = []
    for _, step in sorted(result, reverse=True):
        if len(kept) < MAX_OUTLIERS and all(abs(step - item) >= MIN_DISTANCE for item in kept):
            kept.append(step)
    return sorted(kept)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6), size=st.sampled_from([3000, 1 << 20]))
def test_outliers_are_those_of_a_look_at_each_loss(folder: RunFolder, seed: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    spikes = defaultdict(float, {int(step): 3 * rng.random() for step in rng.integers(0, 300, 9)})
    losses = [2 + 0.1 * rng.standard_normal() + spikes[step] for step in range(300)]
    write(folder, [line(loss) for loss in losses])
    run = RunData.load(folder, chunk_bytes=size)
    assert [outlier.step for outlier in find_outliers(run)] == by_hand([*losses])


def line(loss: float) -> dict[str, Any]:
    speed = {"tokens_per_second": 64.0, "seconds": 1.0, "data_wait": 0.0, "memory": 0}
    return {"loss": loss, "grad_norm": 1.0, "mfu": None, **speed}


def test_few_buckets_keep_means_and_extremes(folder: RunFolder) -> None:
    losses = [float(number % 7) for number in range(500)]
    losses[333] = 99.0
    write(folder, [line(loss) for loss in losses])
    number, end = chunks.count_lines(folder.metrics)
    buckets = CurveBuckets(number, 40)
    for chunk in chunks.chunks(folder.metrics, end):
        buckets.add(chunk)
    table = buckets.table()
    assert table.first[0] == 0 and table.last[-1] == 499
    assert (table.first[1:] == table.last[:-1] + 1).all()
    assert table.last[0] - table.first[0] < table.last[-1] - table.first[-1], "a fine beginning"
    mean, low, high = table.curves["loss"]
    for place, (first, last) in enumerate(zip(table.first, table.last, strict=True)):
        bucket = losses[int(first) : int(last) + 1]
        assert mean[place] == pytest.approx(sum(bucket) / len(bucket))
        assert (low[place], high[place]) == (min(bucket), max(bucket))
    middle = (table.first + table.last) // 2
    assert (table.step == middle).all() and (table.tokens == 64 * (middle + 1)).all()
    assert table.hours == pytest.approx((middle + 1) / 3600)


def test_an_incomplete_last_line_is_left_out(folder: RunFolder) -> None:
    write(folder, [line(2.0)] * 9)
    with folder.metrics.open("a") as file:
        file.write('{"step": 9, "loss"')
    assert RunData.load(folder).steps == 9


def test_the_first_difference_of_ledgers_is_that_of_common_steps(
    folder: RunFolder, tmp_path: Path
) -> None:
    write(folder, [line(2.0)] * 9)
    run = RunData.load(folder)
    second_run = RunData.load(make_run(tmp_path / "other", [2.0] * 9))

    def ledger(run: RunData, hashes: dict[int, str]) -> None:
        lines = (json.dumps({"step": step, "hash": hash}) for step, hash in hashes.items())
        run.folder.ledger.write_text("".join(f"{line}\n" for line in lines))

    ledger(run, {step: f"hash {step}" for step in range(9)})
    for first, changed, expected in ((0, {}, None), (4, {}, None), (4, {6: "x", 8: "y"}, 6)):
        ledger(second_run, {step: changed.get(step, f"hash {step}") for step in range(first, 12)})
        assert first_difference(run, second_run) == first_difference(second_run, run) == expected


def test_a_report_imports_no_torch(folder: RunFolder) -> None:
    """torch takes more memory than the report of a million steps may."""
    write(folder, [line(2.0)] * 9)
    script = (
        "import sys; from headrace.trainer.cli import main\n"
        f"main(['report', {str(folder.root)!r}], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules and 'pydantic' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
