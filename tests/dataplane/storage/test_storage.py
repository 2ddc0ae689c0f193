from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.console.errors import StorageError
from headrace.dataplane.storage import storage


@pytest.mark.parametrize("root", ["local", "memory://bucket"])
def test_one_interface_for_disks_and_stores(root: str, tmp_path: Path) -> None:
    base = str(tmp_path) if root == "local" else f"{root}/{os.urandom(4).hex()}"
    url = storage.join(base, "a", "b.bin")
    assert not storage.exists(url)
    storage.write(url, b"0123456789")
    assert storage.exists(url)
    assert storage.size(url) == 10
    assert storage.read(url) == b"0123456789"
    assert storage.read(url, 3, 6) == b"345"
    storage.write(url, b"again")
    assert storage.read(url) == b"again"
    source = tmp_path / "finished"
    source.write_bytes(b"whole")
    storage.put(source, storage.join(base, "c.bin"))
    assert not source.exists()
    assert storage.list_files(base) == ["a/b.bin", "c.bin"]
    storage.delete(url)
    storage.delete(url)
    assert storage.list_files(base) == ["c.bin"]
    with pytest.raises(StorageError, match="does not exist"):
        storage.read(url)


def test_a_failed_write_keeps_the_previous_file(tmp_path: Path) -> None:
    """A limit of 4 KB on file sizes stands in for a full disk."""
    url = str(tmp_path / "file")
    storage.write(url, b"before")
    code = (
        "import signal, resource, sys; from headrace.dataplane.storage import storage\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        f"storage.write({url!r}, b'x' * 10000)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "StorageError" in done.stderr
    assert storage.read(url) == b"before"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


def test_a_folder_that_another_process_removes_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "shared"
    mkdir, cleared = Path.mkdir, []

    def clear_once(path: Path, **options: bool) -> None:
        mkdir(path, **options)
        if not cleared:
            path.rmdir()
            cleared.append(path)

    monkeypatch.setattr(Path, "mkdir", clear_once)
    storage.write(str(folder / "file"), b"data")
    assert cleared == [folder]
    assert [path.name for path in folder.iterdir()] == ["file"]


def test_a_path_that_cannot_hold_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="it is a folder"):
        storage.write(str(tmp_path), b"x")
    with pytest.raises(StorageError, match="its folder cannot be created"):
        storage.write("/proc/none/file", b"x")
    for act in (storage.read, storage.exists, storage.names):
        with pytest.raises(StorageError, match=r"'a\\x00b' is not a path: it contains a NUL"):
            act("a\0b")


def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("loop", "loop/x", "dangling"):
        with pytest.raises(StorageError, match="is a link to nothing, or to itself") as caught:
            storage.check_writable(str(tmp_path / name))
        assert caught.value.hint
    with pytest.raises(StorageError, match="no file can be created in /proc"):
        storage.check_writable("/proc/x")
    storage.check_writable(str(tmp_path / "link" / "x"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "link", "loop"]


def test_a_file_in_place_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").touch()
    for name in ("a.jsonl/x", "a.jsonl/x/y"):
        with pytest.raises(StorageError, match="a component of its path is a file") as caught:
            storage.write(str(tmp_path / name), b"")
        assert caught.value.hint == "choose another folder"
