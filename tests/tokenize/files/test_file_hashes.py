"""Fingerprints depend on the content of a file, also when they come from the cache."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from corpora import texts, write_jsonl

from headrace.console.errors import InputError
from headrace.dataplane.datasets import manifest
from headrace.tokenize.corpus import inputs
from headrace.tokenize.corpus.inputs import find_files
from headrace.tokenize.files import file_hashes
from headrace.tokenize.files.file_hashes import check_unchanged, with_fingerprints
from headrace.tokenize.sources.format import SourceConfig

Run = Callable[..., Path]


def marks(*names: object, rehash: bool = False) -> list[str]:
    files = find_files([str(name) for name in names], SourceConfig())
    return [file.fingerprint for file in with_fingerprints(files, rehash=rehash)]


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are hashed. Hashes of files of any size and age are cached here."""
    monkeypatch.setattr(file_hashes, "MIN_CACHED_BYTES", 0)
    monkeypatch.setattr(file_hashes, "CLOCK_RESOLUTION", -1)
    names: list[str] = []
    inner = file_hashes._fingerprint

    def counting(file: file_hashes.File) -> object:
        names.append(Path(file.name).name)
        return inner(file)

    monkeypatch.setattr(file_hashes, "_fingerprint", counting)
    return names


def test_an_unchanged_file_is_hashed_once(tmp_path: Path, hashed: list[str]) -> None:
    one, two = tmp_path / "1.txt", tmp_path / "2.txt"
    one.write_text("one")
    two.write_text("two")
    first = marks(one, two)
    assert first == [hashlib.sha256(name.encode()).hexdigest()[:32] for name in ("one", "two")]
    assert marks(one, two) == first
    assert hashed == ["1.txt", "2.txt"]
    assert marks(one, rehash=True) == first[:1]
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
    other = tmp_path / "other.txt"
    other.write_text("beside")
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
    other.replace(file)
    (third,) = marks(file)
    assert len({first, second, third}) == 3
    assert hashed == ["a.txt"] * 3


def test_hashes_of_recently_changed_files_are_not_cached(
    tmp_path: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second change may happen within the same clock tick."""
    monkeypatch.setattr(file_hashes, "CLOCK_RESOLUTION", 60)
    file = tmp_path / "a.txt"
    file.write_text("x")
    assert marks(file) == marks(file)
    assert len(hashed) == 2
    later = time.time() + 100
    monkeypatch.setattr(time, "time", lambda: later)
    assert marks(file) == marks(file)
    assert len(hashed) == 3


def test_hashes_of_small_files_are_not_cached(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    marks(tmp_path / "a.txt")
    assert (
        not file_hashes.HashCache(file_hashes.cache_file())
        .database.execute("select * from files")
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


def test_a_file_written_during_a_build_is_an_error(
    corpus: Path, run_build: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.tokenize.build import build

    make = build.make

    def writing(*args: object, **options: object) -> object:
        made = make(*args, **options)  # type: ignore[arg-type]
        time.sleep(0.02)
        with (corpus / "1.jsonl").open("a") as file:
            file.write("{}")
        return made

    monkeypatch.setattr(build, "make", writing)
    with pytest.raises(InputError, match=r"1 inputs changed while .*1\.jsonl"):
        run_build(corpus)
    assert not (corpus.parent / "out" / "manifest.json").exists()
    check_unchanged(find_files([str(corpus)], SourceConfig()), time.time() + 1)


def test_objects_without_a_version_are_hashed() -> None:
    import fsspec

    fs = fsspec.filesystem("memory")
    names = ["memory://versions/a.txt", "memory://versions/b.txt", "memory://versions/c.txt"]
    for name, data in zip(names, (b"one", b"two", b"one"), strict=True):
        fs.pipe_file(name, data)
    one, two, again = marks(*names)
    assert one == again != two


@pytest.mark.parametrize("said", ["ETag", "Last-Modified"])
def test_equal_versions_of_two_names_do_not_make_equal_files(
    said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (inputs, file_hashes):
        monkeypatch.setattr(module, "information", lambda name: {"size": 3, said: "the same"})
    monkeypatch.setattr(inputs, "_expand", lambda given, *_: [given])
    http, other, object, copy = marks(
        *(f"{scheme}://host/{file}.txt" for scheme in ("http", "s3") for file in "ab")
    )
    assert http != other
    assert (object == copy) is (said == "ETag")


def test_an_object_overwritten_during_a_build_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tags = {"a.txt": "1", "b.txt": "1"}
    for module in (inputs, file_hashes):
        monkeypatch.setattr(
            module, "information", lambda name: {"size": 3, "ETag": tags[name.rpartition("/")[2]]}
        )
    monkeypatch.setattr(inputs, "_expand", lambda given, *_: [given])
    files = with_fingerprints(find_files(["s3://host/a.txt", "https://host/b.txt"], SourceConfig()))
    check_unchanged(files, 0)
    tags["a.txt"] = "2"
    with pytest.raises(InputError, match=r"1 inputs changed while .*s3://host/a\.txt"):
        check_unchanged(files, 0)
