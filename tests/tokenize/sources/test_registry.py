"""A corpus format is a file and a line in CORPUS_FORMATS: nothing else lists the formats."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.data.corpora import read_dataset

import headrace
from headrace.tokenize.cli import main
from headrace.tokenize.sources import CORPUS_FORMATS, corpus_format
from headrace.tokenize.sources.format import SourceConfig


@pytest.fixture
def dummy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a file of the format `dummy`, which is registered for this test."""
    monkeypatch.setitem(CORPUS_FORMATS, "dummy", "support.data.dummy_corpus")
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.dummy").write_text("water\n%%\nwheel\nmill\n%%\nstream")
    return folder


def build(tmp_path: Path, *arguments: object) -> Result:
    words = ["build", *map(str, arguments), "--tokenizer", "byte", "--workers", "1"]
    return CliRunner().invoke(main, [*words, "--out", str(tmp_path / "out")])


def documents(tmp_path: Path) -> list[tuple[str, int, str | None]]:
    return [
        (text, origin.position, origin.id) for origin, text, _ in read_dataset(tmp_path / "out")
    ]


def test_build_a_dataset_with_a_registered_format(tmp_path: Path, dummy: Path) -> None:
    (dummy / "a.dummy").rename(dummy / "a.data")
    run = build(tmp_path, dummy / "a.data", "--input-format", "dummy", "--id-field", "d")
    assert run.exit_code == 0, run.output
    assert documents(tmp_path) == [
        ("water", 0, "d0"),
        ("wheel\nmill", 1, "d1"),
        ("stream", 2, "d2"),
    ]


def test_find_files_of_a_registered_format_by_ending(tmp_path: Path, dummy: Path) -> None:
    run = build(tmp_path, dummy)
    assert run.exit_code == 0, run.output
    assert [text for text, _, _ in documents(tmp_path)] == ["water", "wheel\nmill", "stream"]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("a.dummy", ["--text-field", "body"], "--text-field is for jsonl, parquet, arrow"),
        ("a.txt", ["--id-field", "d"], "--id-field is for jsonl, parquet, arrow, csv, warc, dummy"),
        ("a.dummy.gz", [], "compressed dummy file"),
        (
            "a.dummy",
            ["--input-format", "x"],
            "text, fasta, csv, warc, d",
        ),
        ("a.bin", [], "text, fasta, csv, warc, dummy)"),
    ],
)
def test_errors_know_a_registered_format(
    tmp_path: Path, dummy: Path, name: str, options: list[str], message: str
) -> None:
    (dummy / "a.dummy").rename(dummy / name)
    run = build(tmp_path, dummy / name, *options)
    assert run.exit_code in (1, 2)
    assert message in run.stderr


def test_an_unregistered_format_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.dummy").touch()
    run = build(tmp_path, tmp_path / "a.dummy", "--input-format", "dummy")
    assert run.exit_code == 2
    assert "no such format" in run.stderr


def test_help_lists_every_format() -> None:
    run = CliRunner().invoke(main, ["build", "--help"], terminal_width=400)
    assert ", ".join(CORPUS_FORMATS) in run.stdout


def test_formats_declare_distinct_endings_and_real_settings() -> None:
    endings = [ending for name in CORPUS_FORMATS for ending in corpus_format(name).endings]
    assert len(endings) == len(set(endings))
    fields = vars(SourceConfig())
    for name in CORPUS_FORMATS:
        assert corpus_format(name).endings
        assert set(corpus_format(name).settings) <= set(fields)


@pytest.mark.parametrize("page", ["limits.md", "first-hour.md", "tokenize.md"])
def test_the_pages_name_every_format(page: str) -> None:
    text = (Path(headrace.__file__).parent / "docs" / page).read_text().lower()
    words = {name: (name,) for name in CORPUS_FORMATS} | {"warc": ("warc", "wet")}
    assert all(any(word in text for word in words[name]) for name in CORPUS_FORMATS)
