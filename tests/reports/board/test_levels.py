"""Levels of detail, compared with the values of every line."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.console.errors import IntegrityError
from headrace.reports.board import levels
from headrace.reports.board.levels import Levels


def lines(count: int, *, first: int = 0, seed: int = 0) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    losses = 2 + rng.random(count)
    return [
        {
            "step": step,
            "row": 8 * step,
            "tokens": 512 * (step + 1),
            "phase": "stable",
            "loss": None if step % 10 == 3 else float(loss),
            "mfu": None,
            "seconds": 0.5,
            "sources": {"web": {"loss": float(loss), "weight": 8.0, "rows": 8}}
            | ({"a/b": {"loss": 1.0, "weight": 1.0, "rows": 1}} if step >= 300 else {}),
        }
        for step, loss in zip(range(first, first + count), losses, strict=True)
    ]


def write(file: Path, entries: list[dict[str, Any]], mode: str = "w") -> None:
    with file.open(mode) as opened:
        opened.writelines(json.dumps(entry) + "\n" for entry in entries)


def curve(entries: list[dict[str, Any]], name: str) -> np.ndarray:
    """Return a curve from the lines themselves."""
    field, _, source = name.partition("/")
    result = [
        entry["sources"].get(source, {}).get(field) if source else entry[field] for entry in entries
    ]
    missing = (
        0.0 if field in ("rows", "weight") else np.nan
    )  # a source has none where it is not named
    return np.array([missing if value is None else value for value in result])


def check(store: Levels, entries: list[dict[str, Any]]) -> None:
    """Compare windows of many widths and places with the lines."""
    assert store.index.entries == len(entries)
    assert store.axis("step").tolist() == [entry["step"] for entry in entries]
    first_step, last_step = entries[0]["step"], entries[-1]["step"]
    ends = [(first_step + 3 * n, first_step + 90 - n) for n in range(20)]
    for low, high in ((-1e9, 1e9), *ends, (last_step, last_step)):
        for width in (1, 7, 100, 5000):
            window = store.window(list(store.index.series), "step", low, high, width)
            assert 0 < len(window.x) <= width + 1
            for name in ("loss", "loss/a/b", "rows/a/b", "weight/a/b"):
                if name not in window.curves:
                    continue
                values = curve(entries, name)
                for place, (first, last) in enumerate(zip(window.first, window.last, strict=True)):
                    part = values[int(first) - first_step : int(last) - first_step + 1]
                    known = part[np.isfinite(part)]
                    mean, lowest, greatest = (item[place] for item in window.curves[name])
                    if not len(known):
                        assert np.isnan(mean) and np.isnan(lowest)
                        continue
                    expected = (known.mean(), known.min(), known.max())
                    assert np.allclose((mean, lowest, greatest), expected, rtol=1e-6)
            steps = window.first.tolist()
            assert steps == sorted(set(steps)) and (window.last[:-1] + 1 == window.first[1:]).all()
            assert window.first[0] <= max(low, first_step)
            assert window.last[-1] >= min(high, last_step)


def test_levels_are_those_of_the_lines(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    entries = lines(1000)
    write(file, entries)
    store = Levels(str(file), tmp_path / "board", chunk_bytes=20_000)
    parts = sum(1 for _ in store.refresh())
    assert parts > 5
    check(store, entries)
    assert "mfu" not in store.index.series and "row" not in store.index.series
    assert store.axis("hours")[-1] == pytest.approx(1000 * 0.5 / 3600)
    assert store.line(17) == entries[17] and store.entry(17) == 17 and store.entry(1000) is None
    assert store.values("loss/web", 3, 5) == pytest.approx(curve(entries, "loss/web")[3:5])
    check(Levels(str(file), tmp_path / "board"), entries)  # as another process finds them


def test_new_lines_are_appended_and_an_incomplete_one_waits(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    store = Levels(str(file), tmp_path / "board")
    assert list(store.refresh()) == [] and store.index.entries == 0
    entries = lines(400)
    written = 0
    for count in (1, 2, 8, 9, 63, 65, 299, 305, 399):
        write(file, entries[written:count], "a")
        written = count
        list(store.refresh())
        check(store, entries[:count])
    whole = json.dumps(entries[-1])
    with file.open("a") as opened:
        opened.write(whole[:20])
    list(store.refresh())
    assert store.index.entries == 399
    with file.open("a") as opened:
        opened.write(whole[20:] + "\n")
    list(store.refresh())
    check(store, entries)


@pytest.mark.parametrize("kept", [0, 1, 250, 399])
@pytest.mark.parametrize("count", [10, 400])
def test_a_file_that_was_cut_back_is_read_from_the_cut(
    tmp_path: Path, kept: int, count: int
) -> None:
    file = tmp_path / "metrics.jsonl"
    write(file, lines(400))
    store = Levels(str(file), tmp_path / "board", chunk_bytes=20_000)
    list(store.refresh())
    entries = [*lines(400)[:kept], *lines(count, first=kept, seed=1)]
    write(file, entries)
    list(store.refresh())
    check(store, entries)


def test_of_two_processes_one_writes_and_both_see(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    entries = lines(100)
    write(file, entries)
    store, reader = (Levels(str(file), tmp_path / "board") for _ in range(2))
    (tmp_path / "board").mkdir()
    with (tmp_path / "board" / levels.LOCK).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        list(store.refresh())
        assert store.index.entries == 0
    list(store.refresh())
    with (tmp_path / "board" / levels.LOCK).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        list(reader.refresh())
        check(reader, entries)


@pytest.mark.parametrize("damage", [b'{"step": ', b"\0\0", b"[1]", b""])
@pytest.mark.parametrize("place", [0, 1, 30, 39])
def test_an_invalid_line_is_named_and_those_before_it_are_read(
    tmp_path: Path, place: int, damage: bytes
) -> None:
    file, entries = tmp_path / "metrics.jsonl", lines(40)
    write(file, entries)
    kept = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*kept[:place], damage + b"\n", *kept[place + 1 :]]))
    store = Levels(str(file), tmp_path / "board")
    for _ in range(2):
        with pytest.raises(IntegrityError, match=rf"^line {place + 1} of .*metrics\.jsonl is"):
            list(store.refresh())
    assert store.index.entries == place
    if place:
        check(store, entries[:place])
    write(file, entries)
    list(store.refresh())
    check(store, entries)


def test_norms_by_layer_are_curves_with_values_where_a_line_has_them(tmp_path: Path) -> None:
    entries = lines(20)
    for entry in entries[::5]:
        norms = {"weight_norm": 1.0 + entry["step"], "gradient_norm": None, "update_norm": 0.5}
        entry["layers"] = {"blocks.0": norms}
    write(tmp_path / "metrics.jsonl", entries)
    store = Levels(str(tmp_path / "metrics.jsonl"), tmp_path / "levels")
    list(store.refresh())
    result = store.values("weight_norm/blocks.0", 0, 20)
    assert result[::5].tolist() == [1.0, 6.0, 11.0, 16.0] and np.isfinite(result).sum() == 4


def test_a_value_beyond_float32_stays_visible(tmp_path: Path) -> None:
    entries = lines(40)
    entries[21]["loss"], entries[22]["loss"] = 1e39, -1e300
    write(tmp_path / "metrics.jsonl", entries)
    store = Levels(str(tmp_path / "metrics.jsonl"), tmp_path / "board")
    list(store.refresh())
    _, low, high = store.window(["loss"], "step", -1, 99, 2).curves["loss"]
    largest = np.finfo(np.float32).max
    assert (low.min(), high.max()) == (-largest, largest)
