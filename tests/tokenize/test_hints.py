"""Messages for mistakes of a person at the command line, each through the command."""

from __future__ import annotations

import bz2
import json
import lzma
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from headrace.console.yaml_text import size
from headrace.tokenize.cli import main


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("water")
    return tmp_path


def run(line: str, code: int = 0) -> Result:
    result = CliRunner().invoke(main, line.split())
    assert result.exit_code == code, result.output
    return result


def build(inputs: str, out: str = "o", code: int = 0) -> Result:
    return run(f"build {inputs} --out {out} --tokenizer byte --workers 1", code)


@pytest.mark.parametrize("command", ["build nowhere.txt --tokenizer byte", "train nowhere.txt"])
def test_an_output_below_a_file_and_a_missing_input_are_named_together(command: str) -> None:
    error = run(f"{command} --out a.txt/x/y", code=1).stderr
    assert "no files at nowhere.txt" in error
    assert "cannot write a.txt/x/y" in error and "a.txt is not a folder" in error
    assert "claims" not in error


@pytest.mark.usefixtures("no_aws_credentials")
def test_a_store_without_credentials_is_named() -> None:
    error = build("a.txt", "s3://bucket/o", code=1).stderr
    assert "cannot write s3://bucket/o: the store's credentials are missing" in error


def test_a_tokenizer_may_be_trained_again_into_its_file() -> None:
    for _ in range(2):
        run("train a.txt --out t.json --vocab-size 257")


def test_a_read_only_file_system_is_named(read_only: Path) -> None:
    for line in (
        f"build a.txt --out {read_only}/o --tokenizer byte",
        f"train a.txt --out {read_only}/t.json",
    ):
        error = run(line, code=1).stderr
        assert "read-only" in error and "Errno" not in error


def test_unknown_files_of_a_folder_are_one_line_with_counts(folder: Path) -> None:
    corpus = folder / "corpus"
    corpus.mkdir()
    for number in range(40):
        (corpus / f"{number}.png").touch()
    for name in ("a.xml", "LICENSE", ".hidden.png"):
        (corpus / name).touch()
    for name in ("a.py", "b.md", "c.rst", "d.c", "e.rs", "f.html", "g.tex", "h.CPP", "i.java"):
        (corpus / name).write_text("water")
    shown = build("corpus").stderr
    assert "9 documents" in shown
    (line,) = [text for text in shown.splitlines() if "left out" in text]
    for part in ("42 files", "40 .png", "1 .xml", "1 no ending", "0.png", "--input-format"):
        assert part in line, line


@pytest.mark.parametrize(
    ("text", "json_kind"),
    [
        ('[{"text": "a"}, {"text": "b"}]', "a JSON array"),
        ('[\n  {"text": "a"},\n  {"text": "b"}\n]\n', "a JSON array"),
        ('{\n  "text": "a"\n}\n', "an object takes several lines"),
    ],
)
def test_json_that_is_not_json_lines_is_named(text: str, json_kind: str, folder: Path) -> None:
    (folder / "a.json").write_text(text)
    error = build("a.json", code=1).stderr
    assert json_kind in error and "jq -c" in error and "not JSON:" not in error


def test_a_broken_first_line_is_still_broken_json(folder: Path) -> None:
    (folder / "a.jsonl").write_text('{"text": "a"\n')
    assert "broken JSON: " in build("a.jsonl", code=1).stderr


def test_xz_and_bzip2_are_read_with_all_their_streams(folder: Path) -> None:
    long = "water " * 800_000  # more than one block
    (folder / "a.txt.xz").write_bytes(lzma.compress(b"one ") + bytes(8) + lzma.compress(b"two"))
    (folder / "b.txt.bz2").write_bytes(bz2.compress(long.encode()) + bz2.compress(b"three"))
    (folder / "c.txt").write_bytes(b"BZh is how a text may begin")
    build("a.txt.xz b.txt.bz2 c.txt")
    shown = run("inspect o --documents 3").stdout
    assert "one two<|" in shown and f"{long}three<|" in shown and "BZh is how" in shown


@pytest.mark.parametrize("name", ["a.txt.xz", "a.txt.bz2"])
def test_damaged_xz_and_bzip2_are_errors(name: str, folder: Path) -> None:
    module = lzma if name.endswith("xz") else bz2
    data = module.compress(bytes(range(256)) * 100)
    for damaged in (data[:-9], data[:20] + bytes([data[20] ^ 255]) + data[21:], b"plain text"):
        (folder / name).write_bytes(damaged)
        assert "damaged file" in build(name, code=1).stderr


def test_a_missing_package_of_a_url_is_named() -> None:
    error = build("gs://bucket/a.txt", code=1).stderr
    assert "pip install gcsfs" in error and "scheme" not in error
    assert "did you mean s3://?" in build("s33://bucket/a.txt", code=1).stderr


@pytest.mark.parametrize(
    "url", ["https://nowhere.invalid/a.txt", f"hf://datasets/no/where@{'0' * 40}/a.txt"]
)
def test_an_unknown_host_is_one_error_without_retries(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import socket

    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)  # some networks answer every name
    error = build(url, code=1).stderr
    host = "huggingface.co" if url.startswith("hf") else "nowhere.invalid"
    assert f"there is no host {host}" in error and "Errno" not in error and "MaxRetry" not in error
    assert "retrying" not in error


def test_a_port_without_a_server_is_one_error_without_retries() -> None:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        error = build(f"http://127.0.0.1:{free.getsockname()[1]}/a.jsonl", code=1).stderr
    assert "no server answers there: the connection is refused" in error
    assert "hint:  check the host and the port" in error
    assert "Errno" not in error and "retrying" not in error


def test_a_folder_of_splits_and_a_mistyped_path_are_named(folder: Path) -> None:
    for number in range(20):
        (folder / f"{number}.txt").write_text(f"water {number}")
    run("build *.txt --out data/web --tokenizer byte --workers 1 --split val=0.3")
    error = run("contamination data/web 0.txt", code=1).stderr
    assert "data/web/train, data/web/val" in error
    error = run("inspect data/web --document 0", code=2).stderr
    assert "name one: data/web/train, data/web/val" in error
    assert "did you mean data/web/train?" in run("inspect dta/web/trian", code=1).stderr
    assert "tokenize build" in run("inspect data/genomes", code=1).stderr


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("64MB", 64_000_000), ("64 MB", 64_000_000), ("64M", 64_000_000), ("1.5GB", 1.5e9)),
        *(("64MiB", 64 << 20), ("64 MiB", 64 << 20), ("64Mi", 64 << 20), ("500_000", 500_000)),
    ],
)
def test_sizes_are_accepted_as_they_are_printed(text: str, number: float) -> None:
    assert size(text) == number


@pytest.mark.parametrize("text", ["64B", "64 apples", "MB", "-1MB", "0.3K5", ""])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size in bytes"):
        size(text)


def test_a_build_takes_a_size_with_its_unit(folder: Path) -> None:
    for number in range(9):
        (folder / f"{number}.txt").write_text("water " * 200)
    run("build *.txt --out o --tokenizer byte --workers 1 --shuffle 1 --shard-size=5KB")
    assert len(list((folder / "o" / "shards").iterdir())) > 2


def test_special_tokens_are_a_list_that_may_be_given_several_times() -> None:
    special = "--special <|endoftext|>,<|pre|> --special <|suf|>"
    run(f"train a.txt --out t.json --vocab-size 260 {special}")
    run("build a.txt --tokenizer t.json --out bpe --workers 1")  # it finds the end of documents
    tokens = json.loads(Path("t.json").read_text())["added_tokens"]
    assert [token["content"] for token in tokens] == ["<|endoftext|>", "<|pre|>", "<|suf|>"]
    build(f"a.txt {special}", "bytes")
    assert "byte of 259 ids" in run("inspect bytes").stdout
    for command in ("train", "build"):
        assert "may be given several" in run(f"{command} --help").stdout


def test_only_formats_of_evaluations_are_named_for_them(folder: Path) -> None:
    (folder / "e.fasta").touch()
    for name in ("evls/*", "e.fasta", "e.docx"):
        (folder / "e.docx").touch()
        error = build(f"a.txt --decontaminate {name}", code=1).stderr
        assert "parquet" in error.lower() and "json" in error.lower()
        assert "csv" not in error and "warc" not in error


def test_views_of_much_padding_and_tiny_shards_are_named(folder: Path) -> None:
    (folder / "a.jsonl").write_text('{"text": "%s"}\n' % ("x" * 599) * 300)
    build("a.jsonl", "o")
    few = run("pack o --length 1000000 --out few").stderr
    assert "82.0% of the bins of few are padding" in few and "its shards fill 1 bin each" in few
    long = run("pack o --length 1000 --out long").stderr
    assert "40.0% of the bins of long are padding" in long and "documents of 600 tokens" in long
    assert "are padding, which" not in run("pack o --length 1200 --out right").stderr
    (folder / "b.jsonl").write_text('{"text": "%s"}\n' % ("x" * 599) * 3)
    tiny = build("b.jsonl --shard-size 1", "tiny").stderr
    assert "--shard-size 1 byte makes up to 1.84K files" in tiny
    assert "--shard-size" not in build("b.jsonl --shard-size 4Ki", "small").stderr
