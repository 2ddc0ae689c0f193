from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.data.corpora import read_dataset, texts, write_jsonl, write_lines

from headrace.console.errors import InputError
from headrace.dataplane.datasets import manifest
from headrace.tokenize import inspect
from headrace.tokenize.cli import main
from headrace.tokenize.sources.format import SourceConfig

Run = Callable[..., Path]
BY_NAME = SourceConfig(id_field="name")


@pytest.mark.parametrize("options", [{}, {"shuffle": 3, "format": "mds", "compression": "zstd"}])
def test_every_document_is_shown_with_its_origin(
    corpus: Path, run_build: Run, options: dict[str, object]
) -> None:
    out = str(run_build(corpus, source=BY_NAME, **options))
    for number, (origin, text, ids) in enumerate(read_dataset(out)):
        assert inspect.document(out, number) == inspect.ShownDocument(origin, None, ids)
        assert inspect.text(out, ids) == f"{text}<|endoftext|>"


def test_an_unknown_document_number_is_an_error(corpus: Path, run_build: Run) -> None:
    out = str(run_build(corpus))
    for number in (-1, 244):
        with pytest.raises(InputError, match=f"244 documents, and none has number {number}"):
            inspect.document(out, number)


def test_summary_and_description_of_a_dataset(corpus: Path, run_build: Run) -> None:
    out = run_build(corpus, dedup="exact")
    write_jsonl(corpus / "9.jsonl", [*texts(5, seed=9), "twice", "twice"])
    run_build(corpus, dedup="exact")
    output = manifest.load(str(out))
    result = inspect.summary(str(out))
    assert (result["hash"], result["documents"], result["tokens"]) == (
        output.hash,
        250,
        output.tokens,
    )
    first, second = result["generations"]
    assert (first["documents"], second["documents"]) == (244, 6)
    assert second["counts"]["duplicates"] == 1
    assert second["inputs"]["files"] == 1
    text = inspect.describe(str(out))
    assert output.hash in text
    assert f"{output.tokens:,} tokens in 250 documents" in text
    assert "generation 1: 6 documents" in text
    assert "duplicates: 1" in text
    assert "documents end with 256" in text


def test_a_build_says_what_it_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every record that was read is kept, or counts for one reason."""
    monkeypatch.chdir(tmp_path)
    asked = "what turns the wheel when no water runs in the race"
    lines: list[dict[str, object]] = [
        {"id": str(number), "text": text} for number, text in enumerate(texts(30))
    ]
    lines += [lines[4], lines[5], {"id": "q", "text": f"so {asked} then"}, {"id": "e", "text": ""}]
    lines += [{"id": "r", "text": "reject"}, {"id": "b", "text": 7}, {"id": "c"}, {"text": "d"}]
    write_lines(tmp_path / "a.jsonl", lines)
    write_lines(tmp_path / "asked.jsonl", [{"question": asked}])
    (tmp_path / "drop.txt").write_text("7\n8\n9\n")
    (tmp_path / "rules.py").write_text(
        "def keep(text, fields):\n    return 'rejected' if text == 'reject' else None\n"
    )
    command = (
        "build a.jsonl --out o --tokenizer byte --id-field id --on-error skip --dedup exact "
        "--drop drop.txt --filter rules.py:keep --decontaminate asked.jsonl --ngram 8 "
        "--split val=0.2 --workers 1"
    )
    result = CliRunner().invoke(main, command.split())
    assert result.exit_code == 0, result.output
    *_, last = result.stderr.splitlines()
    assert last == (
        "read 38 records, kept 27; left out: 3 bad: missing field, 3 dropped by the list, "
        "2 duplicates, 1 dropped by decontamination, 1 dropped by the filter: rejected, "
        "1 empty documents"
    )
    again = CliRunner().invoke(main, f"{command} --json".split())
    summaries = json.loads(again.stdout)
    assert sum(entry["documents"] for entry in summaries) == 27
    (output,) = summaries[0]["generations"]
    assert output["records_read"] - sum(output["left_out"].values()) == 27


def test_a_document_is_shown_with_the_line_that_editors_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = "water wheel race mill dam sluice gate pond"
    lines = ['{"text": "one"}', "", "", json.dumps({"text": words})]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    write_lines(tmp_path / "asked.jsonl", [{"question": words}])
    for line, code, shown in (
        ("build a.jsonl --out o --tokenizer byte --workers 1", 0, "2 documents"),
        ("inspect o --document 1", 0, "tokens, a.jsonl:4\n"),
        ("contamination o asked.jsonl --ngram 8 --workers 1", 0, "document 1 (a.jsonl:4), "),
        ("build a.jsonl --out p --tokenizer byte --text-field x --workers 1", 1, "line 1"),
    ):
        result = CliRunner().invoke(main, line.split())
        assert result.exit_code == code and shown in result.output, result.output
    shown = json.loads(
        CliRunner().invoke(main, ["inspect", "o", "--document", "1", "--json"]).stdout
    )
    assert shown["shown"][0]["origin"]["position"] == 3
