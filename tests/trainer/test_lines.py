from __future__ import annotations

from pathlib import Path

from headrace.trainer import lines


def write(path: Path, steps: range, torn: str = "") -> None:
    writer = lines.LineWriter(path)
    for step in steps:
        writer.write({"step": step})
    writer.close()
    with path.open("a") as file:
        file.write(torn)


def test_a_cut_keeps_what_is_before_the_step_and_the_rest_beside(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    write(path, range(5), torn='{"step": 5, "fir')
    tail = lines.cut(path, 3)
    assert [entry["step"] for entry in lines.read(path)] == [0, 1, 2]
    assert tail is not None and tail.name == "ledger.after-3.jsonl"
    assert tail.read_text().splitlines() == ['{"step": 3}', '{"step": 4}', '{"step": 5, "fir']


def test_a_second_cut_does_not_overwrite_the_first_tail(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    write(path, range(5))
    lines.cut(path, 3)
    write(path, range(3, 6))
    tail = lines.cut(path, 3)
    assert tail is not None and tail.name == "ledger.after-3-2.jsonl"
    assert (tmp_path / "ledger.after-3.jsonl").exists()


def test_nothing_to_cut(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    assert lines.cut(path, 3) is None
    write(path, range(3))
    assert lines.cut(path, 3) is None
    assert len(list(lines.read(path))) == 3


def test_a_torn_line_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(2), torn='{"step": 2')
    assert [entry["step"] for entry in lines.read(path)] == [0, 1]
