from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.data.corpora import texts, write_jsonl

from headrace.tokenize.cli import main

TOKENIZER = json.dumps(
    {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "BPE", "vocab": {"</s>": 0, "a": 1}, "merges": []},
    }
)


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_train_build_inspect_verify_and_count(tmp_path: Path) -> None:
    corpus = write_jsonl(tmp_path / "a.jsonl", ["water", *texts(50)])
    tokenizer, out = tmp_path / "t.json", tmp_path / "out"
    run = invoke("train", corpus, "--out", tokenizer, "--vocab-size", 300, "--json")
    assert run.exit_code == 0, run.output
    assert json.loads(run.stdout) == {"out": str(tokenizer), "vocab_size": 300}
    run = invoke(
        *("build", corpus, "--tokenizer", tokenizer, "--out", out, "--workers", 1),
        *("--id-field", "name", "--format", "mds", "--compression", "zstd", "--json"),
    )
    assert run.exit_code == 0, run.output
    (summary,) = json.loads(run.stdout)
    assert summary["documents"] == 51
    run = invoke("inspect", out, "--document", 0)
    assert "water<|endoftext|>" in run.stdout
    assert "a.jsonl:1, id a.jsonl#0" in run.stdout
    run = invoke("inspect", out)
    assert "51 documents" in run.stdout
    run = invoke("inspect", out, "--documents", 2, "--json")
    assert json.loads(run.stdout)["shown"][0]["text"] == "water<|endoftext|>"
    assert invoke("verify", out, "--workers", 1).exit_code == 0
    run = invoke("count", corpus, "--tokenizer", tokenizer, "--workers", 1, "--json")
    assert json.loads(run.stdout)["tokens"] == summary["tokens"]


def test_fields_are_kept_by_one_option_or_by_several(tmp_path: Path) -> None:
    corpus = tmp_path / "a.jsonl"
    corpus.write_text('{"text": "water", "n": 1, "m": 2}\n')
    for name, options in (("one", ["--keep", "n,m"]), ("two", ["--keep", "n", "--keep", "m"])):
        words = ("--tokenizer", "byte", "--out", tmp_path / name, "--workers", 1)
        assert invoke("build", corpus, *words, *options).exit_code == 0
    one_option, two_options = (
        json.loads((tmp_path / x / "manifest.json").read_text()) for x in ("one", "two")
    )
    assert [field["name"] for field in two_options["settings"]["source"]["keep"]] == ["n", "m"]
    assert two_options["settings"] == one_option["settings"]


def test_damage_fails_with_a_hint(tmp_path: Path) -> None:
    corpus, out = write_jsonl(tmp_path / "a.jsonl", texts(5)), tmp_path / "out"
    invoke("build", corpus, "--tokenizer", "byte", "--out", out, "--workers", 1)
    (shard,) = (out / "shards").iterdir()
    shard.write_bytes(shard.read_bytes().replace(b"ARROW1", b"ARROW2"))
    run = invoke("verify", out, "--workers", 1)
    assert run.exit_code == 1
    assert shard.name in run.stderr and "run the build's command again" in run.stderr


def test_verify_and_index_print_json(tmp_path: Path) -> None:
    corpus, out = write_jsonl(tmp_path / "a.jsonl", texts(5)), tmp_path / "out"
    invoke("build", corpus, "--tokenizer", "byte", "--out", out, "--workers", 1)
    head = out / "manifest.json"
    whole = head.read_text()
    head.write_text(whole.replace('"tokens":', '"token":', 1))
    run = invoke("verify", out, "--workers", 1, "--json")
    assert run.exit_code == 1
    (damage,) = json.loads(run.stdout)
    assert damage["name"] == "manifest.json" and "changed after" in damage["what"]
    run = invoke("verify", out, "--workers", 1)
    assert run.exit_code == 1 and "changed after" in run.stderr and not run.stdout
    head.unlink()
    run = invoke("index", out / "shards", "--workers", 1, "--json")
    assert run.exit_code == 0, run.output
    assert json.loads(run.stdout)["documents"] == 5


def test_a_bad_line_is_reported_with_file_and_number(tmp_path: Path) -> None:
    corpus = tmp_path / "a.jsonl"
    corpus.write_text('{"text": "one"}\n{"text": \n{"text": "three"}\n')
    command = ("build", corpus, "--tokenizer", "byte", "--out", tmp_path / "o", "--workers", 1)
    run = invoke(*command)
    assert run.exit_code == 1
    assert "broken JSON" in run.stderr and "a.jsonl, line 2" in run.stderr
    assert not (tmp_path / "o" / "manifest.json").exists()
    run = invoke(*command, "--on-error", "skip")
    assert run.exit_code == 0
    run = invoke("inspect", tmp_path / "o")
    assert "bad: broken JSON: 1" in run.stdout and "documents read: 2" in run.stdout


@pytest.mark.parametrize("separator", ["§", r"\n\t\\", "水車\\0"])
def test_separator_is_used_as_written(separator: str, tmp_path: Path) -> None:
    meant = {r"\n\t\\": "\n\t\\", "水車\\0": "水車\0"}.get(separator, separator)
    corpus = tmp_path / "a.txt"
    corpus.write_text(meant.join(["alpha", "beta", "gamma"]))
    run = invoke(
        *("count", corpus, "--tokenizer", "byte", "--workers", 1, "--json"),
        *("--text-documents", "separator", "--separator", separator),
    )
    assert json.loads(run.stdout)["documents"] == 3


@pytest.mark.parametrize("separator", ["\\", r"a\x"])
def test_an_unknown_escape_in_a_separator_is_misuse(separator: str, tmp_path: Path) -> None:
    corpus = tmp_path / "a.txt"
    corpus.touch()
    run = invoke(
        *("count", corpus, "--tokenizer", "byte"),
        *("--text-documents", "separator", "--separator", separator),
    )
    assert run.exit_code == 2
    assert "a backslash must be followed by" in run.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["build", "x", "--out", "o"], 2, "--tokenizer"),
        (["build", "x", "--out", "o", "--tokenizer", "byte", "--split", "val"], 2, "NAME=FRACTION"),
        *(
            (["build", "x", "--out", "o", "--tokenizer", *wrong], 2, message)
            for wrong, message in (
                (["t.json", "--dna"], "--dna is for --tokenizer byte only"),
                (["t.json", "--special", "<x>"], "--special is for --tokenizer byte only"),
                (["t.json", "--masked-weight", "0"], "--masked-weight is for --tokenizer byte"),
                (["byte", "--masked-weight", "0.3"], "--masked-weight needs --dna"),
                (["byte", "--end-of-document", "</s>"], "--end-of-document is for a tokenizer"),
                (["byte", "--separator", "XX"], "--separator needs --text-documents separator"),
            )
        ),
        (["train", "x", "--out", "t.json", "--special", "<a>,,<b>"], 2, "has an empty name"),
        (["train", "x", "--out", "t.json", "--special", "<a>,<b>", "--special", "<a>"], 2, "twice"),
        (["index", "x", "--tokenizer", "byte", "--end-of-document", "a"], 2, "tokenizer.json only"),
        *(
            (["build", "x", "--out", "o", "--tokenizer", "byte", *wrong], 2, message)
            for wrong, message in (
                (["--split", "work=0.4"], "cannot be called `work`"),
                (["--split", "shards=0.4"], "cannot be called `shards`"),
                (["--split", "train=0.4"], "the name of the rest"),
                (["--split", "=0.4"], "letters, digits"),
                (["--split", "a/b=0.4"], "letters, digits"),
                (["--split", "val=2"], "fractions between 0 and 1"),
                (["--split", "val=nan"], "fractions between 0 and 1"),
                (["--split", "val=0.1", "--split", "val=0.2"], "is given twice"),
            )
        ),
        (["build", "/no/x.txt", "--out", "o", "--tokenizer", "byte"], 1, "no files at /no/x.txt"),
        (
            ["build", "x", "--out", "o", "--tokenizer", "/no.json"],
            1,
            "there is no tokenizer /no.json",
        ),
        (["build", "x", "--out", "o", "--tokenizer", "byte", "--compression", "gz"], 2, "not zstd"),
        (["index", "x", "--end-id", "last"], 2, "must be an id, or none"),
        (["verify", "x", "--workers", "0"], 2, "must be at least 1"),
        (["train", "x", "--out", "o", "--vocab-size", "9"], 2, "bytes and special tokens need"),
        (["build", "a.txt", "--out", "o", "--tokenizer", "byte", "--id-field", "i"], 2, "no input"),
        (["count", "a.txt", "--tokenizer", "t.json", "--end-of-document", "x"], 2, "no token `x`"),
        (["count", "x", "--tokenizer", "byte", "--sample", "0"], 2, "a fraction"),
        (["inspect", "/nowhere"], 1, "no dataset at /nowhere"),
    ],
)
def test_misuse(
    arguments: list[str], code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("words")
    (tmp_path / "t.json").write_text(TOKENIZER)
    run = invoke(*arguments)
    assert run.exit_code == code
    assert message in run.stderr
    assert "Traceback" not in run.output


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom headrace.tokenize.cli import main\n"
        "try: main(['build', '--help'])\nexcept SystemExit: pass\n"
        "print([m for m in ('numpy', 'pyarrow', 'fastokens', 'torch', 'ray') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "[]"
