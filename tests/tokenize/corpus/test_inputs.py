"""Files of a corpus: names, globs, folders and URLs, and files that do not belong to it."""

from __future__ import annotations

import gzip
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.console.errors import InputError, MisuseError
from headrace.tokenize.corpus.inputs import find_files
from headrace.tokenize.sources import corpus_format
from headrace.tokenize.sources.format import SourceConfig


def test_files_globs_folders_and_ignored_files(tmp_path: Path) -> None:
    for name in (
        *("a.jsonl", "b/c.txt.zst", "b/d.PARQUET", "b/.hidden.txt", "_x/y.txt", "n.bin"),
        *("odd/a?b=c.txt", "odd/[1] #2*.txt", "odd/水 \n.fa"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    config = SourceConfig()

    def names(*inputs: str) -> list[str]:
        files = find_files([str(tmp_path / item) for item in inputs], config)
        return [str(Path(file.name).relative_to(tmp_path)) for file in files]

    odd = ["odd/[1] #2*.txt", "odd/a?b=c.txt", "odd/水 \n.fa"]
    assert names(".") == ["a.jsonl", "b/c.txt.zst", "b/d.PARQUET", *odd]
    assert names(*odd) == odd
    assert names("b/*.zst", "a.jsonl", "*.jsonl") == ["b/c.txt.zst", "a.jsonl"]
    with pytest.raises(InputError, match="no files at"):
        names("nothing-*.jsonl")
    with pytest.raises(InputError, match="names no known format"):
        names("n.bin")
    with pytest.raises(InputError, match="3 problems with the inputs") as caught:
        names("n.bin", "nothing", "a.jsonl", "no.txt")
    assert str(caught.value).count("no files at") == 2
    assert find_files([str(tmp_path / "n.bin")], SourceConfig(format="text"))[0].format == "text"


def test_links_to_folders_and_special_files_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A link to a folder is not followed: it may form a loop."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "a.txt").touch()
    (tmp_path / "b.txt").touch()
    (corpus / "link.txt").symlink_to(tmp_path / "b.txt")
    (corpus / "broken.txt").symlink_to(tmp_path / "c.txt")
    (corpus / "circle").symlink_to(corpus)
    os.mkfifo(corpus / "pipe.txt")
    result = find_files([str(corpus)], SourceConfig())
    assert [Path(file.name).name for file in result] == ["a.txt", "link.txt"]
    (line,) = caplog.messages
    assert "3 links to folders or special files" in line
    with pytest.raises(InputError, match="is not a regular file"):
        find_files([str(corpus / "pipe.txt")], SourceConfig())


@pytest.fixture
def as_nobody() -> Iterator[Path]:
    """A folder that everybody may enter; the test is another user than root."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        for place in ("a/open", "a/closed/below", "a/.hidden"):
            Path(name, place).mkdir(parents=True)
            Path(name, place, "x.jsonl").touch()
        Path(name, "a/closed").chmod(0o700)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)
        else:
            Path(name, "a/closed").chmod(0o000)
        yield Path(name)
        os.seteuid(user)
        Path(name, "a/closed").chmod(0o700)


@pytest.mark.parametrize("place", ["", "a", "a/**/*.jsonl", "a/*/x.jsonl", "*/*/*/x.jsonl"])
def test_a_folder_that_cannot_be_listed_is_an_error(as_nobody: Path, place: str) -> None:
    with pytest.raises(InputError, match=r"cannot list .*a/closed: access is denied") as caught:
        find_files([f"{as_nobody}/{place}"], SourceConfig())
    assert caught.value.hint


@pytest.mark.parametrize("place", ["a/open", "a/open/*", "a/o*/x.jsonl", "a/open/**/*"])
def test_folders_beside_the_inputs_may_be_closed(as_nobody: Path, place: str) -> None:
    (file,) = find_files([f"{as_nobody}/{place}"], SourceConfig())
    assert file.name.endswith("a/open/x.jsonl")


def test_a_file_name_that_is_not_utf8_is_an_error(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/caf\xe9.txt"
    Path(os.fsdecode(path)).write_text("x")
    with pytest.raises(InputError, match=r"/caf\\xe9.txt: its name is not UTF-8"):
        find_files([str(tmp_path)], SourceConfig())


def test_files_in_the_output_are_not_inputs(tmp_path: Path) -> None:
    """Otherwise a second build would read the output of the first."""
    for name in ("a.jsonl", "out/manifest.json", "out/work/claims/x.json", "outer/b.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    out = str(tmp_path / "out")
    for given_ in (tmp_path, tmp_path / "**" / "*.json*", f"file://{tmp_path}"):
        files = find_files([str(given_)], SourceConfig(), out)
        assert [Path(file.name).name for file in files] == ["a.jsonl", "b.jsonl"]
    for given_ in (out, tmp_path / "out" / "*.json", tmp_path / "out" / "manifest.json"):
        with pytest.raises(MisuseError, match="is in the output folder"):
            find_files([str(given_)], SourceConfig(), out)
    with pytest.raises(MisuseError, match="is in the output folder"):
        find_files([str(tmp_path)], SourceConfig(), str(tmp_path))


def test_urls_of_another_file_system(tmp_path: Path) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.pipe("/corpus/a.jsonl", b'{"text": "one"}\n{"text": "two"}\n')
    memory.pipe("/corpus/b.jsonl.gz", gzip.compress(b'{"text": "three"}\n'))
    memory.pipe("/corpus/c?d=e #1.jsonl", b'{"text": "four"}\n')
    config = SourceConfig()
    for given_ in ("memory://corpus", "memory://corpus/*.jsonl*"):
        files = find_files([given_], config)
        result = [
            text
            for file in files
            for part in corpus_format(file.format).cut(file, config, 20)
            for block in corpus_format(file.format).read(part, config)
            for text in block.texts
        ]
        assert result == ["one", "two", "three", "four"]


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("a.txt", {"text_field": "body"}),
        ("a.fa", {"id_field": "name"}),
        ("a.jsonl", {"text_documents": "line"}),
    ],
)
def test_a_setting_that_no_input_uses_is_an_error(
    tmp_path: Path, name: str, option: dict[str, Any]
) -> None:
    (tmp_path / name).touch()
    with pytest.raises(MisuseError, match="and no input is one"):
        find_files([str(tmp_path)], SourceConfig(**option))
    for file_name in ("b.txt", "b.jsonl"):
        (tmp_path / file_name).touch()
    assert len(find_files([str(tmp_path)], SourceConfig(**option))) == 3
