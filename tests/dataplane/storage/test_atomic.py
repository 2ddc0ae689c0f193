from __future__ import annotations

import fcntl
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from headrace.dataplane.storage import storage


def test_a_write_reuses_the_temporary_file_of_a_killed_one(tmp_path: Path) -> None:
    (tmp_path / ".file.tmp").write_bytes(b"a much longer file, cut off")
    storage.write(str(tmp_path / "file"), b"data")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"data"


def test_temporary_files_in_use_are_not_touched(tmp_path: Path) -> None:
    """Neither one that a living process has locked, nor a symbolic link."""
    held = tmp_path / ".file.tmp"
    with held.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(b"half")
        storage.write(str(tmp_path / "file"), b"data")
    assert held.read_bytes() == b"half" and (tmp_path / "file").read_bytes() == b"data"
    (tmp_path / ".other.tmp").symlink_to(held)
    storage.write(str(tmp_path / "other"), b"more")
    assert held.read_bytes() == b"half" and (tmp_path / "other").read_bytes() == b"more"


def test_of_concurrent_writes_one_wins(tmp_path: Path) -> None:
    kinds = [bytes([number]) * 10_000 * number for number in range(1, 7)]

    def write(data: bytes) -> None:
        for _ in range(30):
            storage.write(str(tmp_path / "file"), data)
            assert (tmp_path / "file").read_bytes() in kinds

    with ThreadPoolExecutor(len(kinds)) as pool:
        list(pool.map(write, kinds))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
