from __future__ import annotations

import json
import resource
import tracemalloc
from pathlib import Path

import pytest

from headrace.console.errors import IntegrityError, StorageError
from headrace.dataplane.runlog import writer as lines


def write(path: Path, steps: range, torn: str = "") -> None:
    writer = lines.LineWriter(path)
    for step in steps:
        writer.write({"step": step})
    writer.close()
    with path.open("a") as file:
        file.write(torn)


def test_a_line_cut_off_by_a_full_disk_is_an_error_and_removed_later(tmp_path: Path) -> None:
    """A limit on file sizes cuts a line off as a full disk does."""
    path = tmp_path / "events.jsonl"
    writer = lines.LineWriter(path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        writer.write({"step": 1, "why": "x" * 40})
        for _ in range(2):  # first a part of it fits, then none
            with pytest.raises(StorageError, match=r"cannot write to .*events\.jsonl"):
                writer.write({"step": 2, "why": "x" * 40})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.stat().st_size == 100
    write(path, range(2, 4))
    assert [entry["step"] for entry in lines.read(path)] == [1, 2, 3]


def test_cut_keeps_earlier_steps_and_moves_the_rest_beside(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    write(path, range(5), torn='{"step": 5, "fir')
    whole = path.read_bytes()
    tail = lines.cut(path, 3)
    assert [entry["step"] for entry in lines.read(path)] == [0, 1, 2]
    assert tail is not None and tail.name == "ledger.after-3.jsonl"
    assert tail.read_bytes() == whole[-len(tail.read_bytes()) :]
    assert [entry["step"] for entry in lines.read(tail)] == [3, 4]


def test_a_second_cut_keeps_the_first_tail(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    write(path, range(5))
    lines.cut(path, 3)
    write(path, range(3, 6))
    tail = lines.cut(path, 3)
    assert tail is not None and tail.name == "ledger.after-3-2.jsonl"
    assert (tmp_path / "ledger.after-3.jsonl").exists()


def test_a_cut_killed_halfway_is_repeated(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    write(path, range(5))
    before = path.read_bytes()
    lines.cut(path, 3)
    path.write_bytes(before)  # killed after the tail was written, before the file was cut
    lines.cut(path, 3)
    assert [entry["step"] for entry in lines.read(path)] == [0, 1, 2]
    assert {file.name for file in tmp_path.iterdir()} == {"ledger.jsonl", "ledger.after-3.jsonl"}


@pytest.mark.parametrize("step", [0, 1500, 2999])
def test_a_large_file_is_repaired_and_cut_without_its_memory(tmp_path: Path, step: int) -> None:
    """Files of 12 MB, by blocks of 1 MiB; the bytes are those of slices of the whole."""
    path = tmp_path / "metrics.jsonl"
    whole = [
        json.dumps({"step": n, "pad": "x" * (4000 + n % 7)}).encode() + b"\n" for n in range(3000)
    ]
    peaks = []
    for _ in range(3):  # threads of other tests may allocate at the same time
        path.write_bytes(b"".join(whole) + b"\0" * 30_000 + b"\n" + b"\0" * 30_000)
        tracemalloc.start()
        try:
            writer = lines.LineWriter(path)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
        writer.close()
    tracemalloc.start()
    try:
        tail = lines.cut(path, step)
        cut = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert path.read_bytes() == b"".join(whole[:step])
    assert tail is not None and tail.read_bytes() == b"".join(whole[step:])
    path.write_bytes(b"".join(whole))  # killed before the file was cut
    assert lines.cut(path, step) == tail
    assert path.read_bytes() == b"".join(whole[:step])
    assert min(peaks) < 1 << 18
    assert cut < 3 * lines.BLOCK_BYTES < len(b"".join(whole)) // 3


def test_nothing_to_cut(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    assert lines.cut(path, 3) is None
    write(path, range(3))
    assert lines.cut(path, 3) is None
    assert len(list(lines.read(path))) == 3


def test_an_incomplete_line_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(2), torn='{"step": 2')
    assert [entry["step"] for entry in lines.read(path)] == [0, 1]


@pytest.mark.parametrize("damage", [b'{"step": 1', b"\0\0", b"\xff", b"[1]", b""])
def test_a_damaged_line_before_others_is_named(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "events.jsonl"
    write(path, range(3))
    kept = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(kept[0] + damage + b"\n" + kept[2])
    with pytest.raises(IntegrityError, match=r"line 2 of .*events\.jsonl is damaged"):
        list(lines.read(path))


def test_a_flipped_bit_of_any_byte_is_found(tmp_path: Path) -> None:
    """Within the key of the check, it leaves the entry as it was."""
    path = tmp_path / "evaluations.jsonl"
    entry = {"step": 12, "loss": {"web": 2.5}}
    whole = lines.encode_line(entry)
    assert lines.decode_line(whole) == entry
    for place in range(len(whole)):
        for bit in range(8):
            data = bytearray(whole)
            data[place] ^= 1 << bit
            path.write_bytes(data + whole)
            try:
                first = next(lines.read(path))
            except IntegrityError:
                continue
            assert {key: first[key] for key in entry} == entry, bytes(data)


def test_a_cut_keeps_damaged_lines_before_whole_ones(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(5))
    damaged = path.read_bytes().replace(b'"step": 1', b'"step": 9')
    path.write_bytes(damaged)
    lines.cut(path, 3)
    assert path.read_bytes() == b"".join(damaged.splitlines(keepends=True)[:3])


def test_lines_that_a_power_cut_damaged_are_cut_off_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(2), torn="\0\0\0\n\0\0")
    tail = lines.cut(path, 5)
    assert [entry["step"] for entry in lines.read(path)] == [0, 1]
    assert tail is not None and tail.read_bytes() == b"\0\0\0\n\0\0"


def test_a_writer_removes_lines_that_a_power_cut_damaged(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, range(2), torn="\0\0\0\n\0\n\0")
    write(path, range(2, 3))
    assert [entry["step"] for entry in lines.read(path)] == [0, 1, 2]
    write(path.with_name("empty"), range(0), torn="\0\n")
    write(path.with_name("empty"), range(1))
    assert [entry["step"] for entry in lines.read(path.with_name("empty"))] == [0]


@pytest.mark.parametrize(
    "width", [0, 10, lines.TAIL_BYTES - 20, lines.TAIL_BYTES, 3 * lines.TAIL_BYTES]
)
def test_the_last_line_is_read_from_the_end(tmp_path: Path, width: int) -> None:
    path = tmp_path / "f.jsonl"
    assert lines.read_last(path) is None
    path.write_bytes(b'{"step": 0')
    assert lines.read_last(path) is None
    entries = [{"step": step, "pad": "x" * width} for step in range(3)]
    text = "".join(json.dumps(entry) + "\n" for entry in entries)
    for rest in ("", '{"step": 3, "pad"'):
        path.write_text(text + rest)
        assert lines.read_last(path) == entries[-1]
    path.write_text(text.splitlines(keepends=True)[0])
    assert lines.read_last(path) == entries[0]
