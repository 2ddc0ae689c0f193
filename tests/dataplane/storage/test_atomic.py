from __future__ import annotations

import fcntl
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from headrace.dataplane.storage import storage


def test_what_a_killed_write_has_left_is_taken_up_by_the_next(tmp_path: Path) -> None:
    (tmp_path / ".file.tmp").write_bytes(b"what was to be much longer")
    storage.write(str(tmp_path / "file"), b"data")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"data"


def test_what_is_somebody_s_is_let_alone(tmp_path: Path) -> None:
    """Held by a process that is writing, or a link to anywhere."""
    held = tmp_path / ".file.tmp"
    with held.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(b"half")
        storage.write(str(tmp_path / "file"), b"data")
    assert held.read_bytes() == b"half" and (tmp_path / "file").read_bytes() == b"data"
    (tmp_path / ".other.tmp").symlink_to(held)
    storage.write(str(tmp_path / "other"), b"more")
    assert held.read_bytes() == b"half" and (tmp_path / "other").read_bytes() == b"more"


def test_many_write_the_same_file_and_one_wins(tmp_path: Path) -> None:
    kinds = [bytes([number]) * 10_000 * number for number in range(1, 7)]

    def write(data: bytes) -> None:
        for _ in range(30):
            storage.write(str(tmp_path / "file"), data)
            assert (tmp_path / "file").read_bytes() in kinds

    with ThreadPoolExecutor(len(kinds)) as pool:
        list(pool.map(write, kinds))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
