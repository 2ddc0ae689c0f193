"""Fingerprints depend on the content of a file, also when they come from the cache."""

from __future__ import annotations

import gzip
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.data.corpora import texts, write_jsonl

from headrace.console.errors import InputError
from headrace.dataplane.datasets import manifest
from headrace.tokenize.corpus import inputs
from headrace.tokenize.corpus.inputs import find_files
from headrace.tokenize.files import file_hashes
from headrace.tokenize.files.checksums import ContentHash
from headrace.tokenize.files.file_hashes import FileState, hash_files
from headrace.tokenize.files.input_file import File
from headrace.tokenize.sources.format import SourceConfig

Run = Callable[..., Path]


def marks(*names: object, rehash: bool = False) -> list[str]:
    files = find_files([str(name) for name in names], SourceConfig())
    return [file.fingerprint for file in hash_files(files, rehash=rehash).files]


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are hashed. Hashes of files of any size are cached here."""
    monkeypatch.setattr(file_hashes, "MIN_CACHED_BYTES", 0)
    names: list[str] = []
    inner = file_hashes._hash_file

    def counting(file: file_hashes.File) -> object:
        names.append(Path(file.name).name)
        return inner(file)

    monkeypatch.setattr(file_hashes, "_hash_file", counting)
    return names


def test_an_unchanged_file_is_hashed_once(tmp_path: Path, hashed: list[str]) -> None:
    first_file, second_file = tmp_path / "1.txt", tmp_path / "2.txt"
    first_file.write_text("one")
    second_file.write_text("two")
    first = marks(first_file, second_file)
    assert first == [hashlib.sha256(name.encode()).hexdigest()[:32] for name in ("one", "two")]
    assert marks(first_file, second_file) == first
    assert hashed == ["1.txt", "2.txt"]
    assert marks(first_file, rehash=True) == first[:1]
    assert hashed == ["1.txt", "2.txt", "1.txt"]


def test_every_change_of_a_file_is_noticed(tmp_path: Path, hashed: list[str]) -> None:
    """The size stays the same, the time of the change is set back, or another file replaces it."""
    file = tmp_path / "a.txt"
    file.write_text("before")
    (first,) = marks(file)
    times = file.stat()
    file.write_text("behind")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    (second,) = marks(file)
    replacement = tmp_path / "other.txt"
    replacement.write_text("beside")
    os.utime(replacement, ns=(times.st_atime_ns, times.st_mtime_ns))
    replacement.replace(file)
    (third,) = marks(file)
    assert len({first, second, third}) == 3
    assert hashed == ["a.txt"] * 3


@pytest.mark.parametrize("ticks", ["fine", "whole seconds"])
def test_a_tick_of_the_file_system_passes_before_a_file_is_read(
    tmp_path: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch, ticks: str
) -> None:
    """A change within the tick of the change before it leaves the file's times as they are: here
    the file system's clock stands still until the pause."""
    file, pauses = tmp_path / "a.txt", list[float]()
    file.write_text("before")
    status = file.stat()
    frozen = status.st_ctime_ns // 1_000_000_000 * 1_000_000_000 + (ticks == "fine")

    def state(stream: BinaryIO) -> FileState:
        stat = (status.st_dev, status.st_ino, status.st_mtime_ns, frozen + len(pauses))
        return FileState(os.fstat(stream.fileno()).st_size, stat=stat)

    monkeypatch.setattr(file_hashes, "_open_file_state", state)
    inner = file_hashes._hash_file

    def writing(of: File) -> object:
        file.write_text("behind")  # after the state was taken, and before the first byte is read
        return inner(of)

    monkeypatch.setattr(file_hashes, "_hash_file", writing)
    monkeypatch.setattr("time.sleep", pauses.append)
    with pytest.raises(InputError, match=r"1 input changed while .*a\.txt"):
        marks(file)
    assert pauses == [file_hashes.TICK if ticks == "fine" else file_hashes.COARSE_TICK]
    assert pauses[0] >= (0.01 if ticks == "fine" else 2)


def test_a_file_that_grew_since_it_was_listed_is_an_error(tmp_path: Path) -> None:
    """Its slices would end where it ended then."""
    file = tmp_path / "a.txt"
    file.write_text("one")
    files = find_files([str(file)], SourceConfig())
    file.write_text("one and two")
    with pytest.raises(InputError, match=r"1 input changed while .*a\.txt"):
        hash_files(files)


def test_hashes_of_small_files_are_not_cached(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    marks(tmp_path / "a.txt")
    assert (
        not file_hashes.HashCache(file_hashes.cache_file())
        .database.execute("select * from block_checksums")
        .fetchall()
    )


def test_files_are_hashed_without_a_cache(
    tmp_path: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "no folder").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no folder"))
    (tmp_path / "a.txt").write_text("x")
    assert marks(tmp_path / "a.txt") == marks(tmp_path / "a.txt")
    assert len(hashed) == 2


def test_a_growing_build_hashes_new_files_only(
    corpus: Path, run_build: Run, hashed: list[str]
) -> None:
    out = run_build(corpus)
    assert len(hashed) == 4
    hashed.clear()
    write_jsonl(corpus / "9.jsonl", texts(30, seed=9))
    run_build(corpus)
    assert hashed == ["9.jsonl"]
    assert manifest.load(str(out)).documents == 274
    run_build(corpus, rehash=True)
    assert len(hashed) == 6


@pytest.mark.parametrize("written", ["during", "before", "never"])
@pytest.mark.parametrize("wrong", [-3600, 0, 3600])
def test_a_file_written_during_a_build_is_an_error_whatever_the_clock_says(
    corpus: Path, run_build: Run, monkeypatch: pytest.MonkeyPatch, written: str, wrong: int
) -> None:
    """The file's size and mtime stay. A file that was written just before is no error."""
    from headrace.tokenize.builder import build

    make, clock, file = build.run_tasks, time.time, corpus / "1.jsonl"
    monkeypatch.setattr("time.time", lambda: clock() + wrong)

    def overwrite() -> None:
        times = file.stat()
        with file.open("r+b") as opened:
            opened.seek(12)
            opened.write(b"X")
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))

    def writing(*args: object, **options: object) -> object:
        result = make(*args, **options)  # type: ignore[arg-type]
        if written == "during":
            overwrite()
        return result

    monkeypatch.setattr(build, "run_tasks", writing)
    if written == "before":
        overwrite()
    if written == "during":
        with pytest.raises(InputError, match=r"1 input changed while .*1\.jsonl"):
            run_build(corpus)
    else:
        run_build(corpus)
    assert (corpus.parent / "out" / "manifest.json").exists() is (written != "during")


@pytest.mark.parametrize("name", ["1.jsonl", "a.parquet", "a.arrow", "a.txt.gz"])
@pytest.mark.parametrize("cached", [True, False])
def test_an_input_whose_content_changes_is_an_error_where_times_tell_nothing(
    tmp_path: Path, run_build: Run, monkeypatch: pytest.MonkeyPatch, name: str, cached: bool
) -> None:
    """A file system that keeps no times. The content is put back before the build ends."""
    from headrace.tokenize.builder import build

    monkeypatch.setattr(file_hashes, "MIN_CACHED_BYTES", 0)
    state = FileState(len(write_corpus(tmp_path / name)), stat=(1, 2, 3, 4))
    monkeypatch.setattr(file_hashes, "_open_file_state", lambda _: state)
    make, file = build.run_tasks, tmp_path / name
    before = file.read_bytes()
    at = before.find(b"naive") if b"naive" in before else len(before) // 2
    after = before[:at] + bytes([before[at] ^ 1]) + before[at + 1 :]

    def changing(*args: object, **options: object) -> object:
        file.write_bytes(after)
        try:
            return make(*args, **options)  # type: ignore[arg-type]
        finally:
            file.write_bytes(before)

    if cached:
        hash_files(find_files([str(file)], SourceConfig()))
    with monkeypatch.context() as patch:
        patch.setattr(build, "run_tasks", changing)
        with pytest.raises(InputError, match=rf"1 input changed while .*{name}"):
            run_build(file)
    run_build(file)


def write_corpus(path: Path) -> bytes:
    """Write a file of the format that its ending names; return its bytes."""
    table = pa.table({"text": [f"{text} naive" for text in texts(40)]})
    if path.suffix == ".jsonl":
        write_jsonl(path, table["text"].to_pylist())
    elif path.suffix == ".parquet":
        pq.write_table(table, path, compression="none", use_dictionary=False)
    elif path.suffix == ".arrow":
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    else:
        path.write_bytes(gzip.compress("\n".join(table["text"].to_pylist()).encode()))
    return path.read_bytes()


def test_objects_without_a_version_are_hashed() -> None:
    import fsspec

    fs = fsspec.filesystem("memory")
    names = ["memory://versions/a.txt", "memory://versions/b.txt", "memory://versions/c.txt"]
    for name, data in zip(names, (b"one", b"two", b"one"), strict=True):
        fs.pipe_file(name, data)
    first, second, again = marks(*names)
    assert first == again != second


@pytest.mark.parametrize("said", ["ETag", "Last-Modified"])
def test_equal_versions_of_two_names_do_not_make_equal_files(
    said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (inputs, file_hashes):
        monkeypatch.setattr(module, "information", lambda name: {"size": 3, said: "the same"})
    monkeypatch.setattr(inputs, "_list_matches", lambda name, *_: [name])
    http, second_http, object, copy = marks(
        *(f"{scheme}://host/{file}.txt" for scheme in ("http", "s3") for file in "ab")
    )
    assert http != second_http
    assert (object == copy) is (said == "ETag")


@pytest.mark.parametrize("key", ["ETag", "size"])
def test_an_object_overwritten_during_a_build_is_an_error(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a server sends no version, the size is compared."""
    facts = {name: {"size": 3, "ETag": "1"} for name in ("a.txt", "b.txt")}
    if key == "size":
        facts = {name: {"size": 3} for name in facts}
    monkeypatch.setattr(
        file_hashes, "_hash_file", lambda file: (ContentHash("0" * 32), file_hashes._state(file))
    )
    for module in (inputs, file_hashes):
        monkeypatch.setattr(module, "information", lambda name: facts[name.rpartition("/")[2]])
    monkeypatch.setattr(inputs, "_list_matches", lambda name, *_: [name])
    hashed = hash_files(find_files(["s3://host/a.txt", "https://host/b.txt"], SourceConfig()))
    hashed.check_unchanged(hashed.files)
    facts["a.txt"][key] = 2
    hashed.check_unchanged(hashed.files[1:])
    with pytest.raises(InputError, match=r"1 input changed while .*s3://host/a\.txt"):
        hashed.check_unchanged(hashed.files)
