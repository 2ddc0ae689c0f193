"""Filters: which documents stay, and how the others are counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.data.corpora import counts_of, ids_of, read_dataset, snapshot, texts, write_jsonl

from headrace.console.errors import InputError, MisuseError, StorageError
from headrace.dataplane.datasets import manifest
from headrace.tokenize.cli import main
from headrace.tokenize.executors import ExecutorConfig
from headrace.tokenize.sources.fields import KeptField
from headrace.tokenize.sources.format import SourceConfig

Run = Callable[..., Path]
NAMED = SourceConfig(id_field="name")
TWO = ExecutorConfig(workers=2)


RULES = """
def keep(text, fields, *, shortest=0, letter=""):
    if len(text) < shortest:
        return "too short"
    if fields.get("name", "").endswith(letter or "never"):
        return False
"""


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "rules.py"
    path.write_text(RULES)
    return path


KEEP = SourceConfig(id_field="name", keep=(KeptField(name="name"),))


@pytest.mark.parametrize("engine", [ExecutorConfig(workers=1), TWO], ids=["one", "two"])
def test_a_filter_drops_by_text_and_fields(
    corpus: Path, run_build: Run, rules: Path, engine: ExecutorConfig
) -> None:
    whole = [(o.id or "", text) for o, text, _ in read_dataset(run_build(corpus, source=KEEP))]
    settings = {"shortest": 100, "letter": "5"}
    options: dict[str, Any] = {
        "source": KEEP,
        "filter": f"{rules}:keep",
        "filter_settings": settings,
        "engine": engine,
        "shuffle": 1,
    }
    out = run_build(corpus, out="filtered", **options)
    stay = {id for id, text in whole if len(text) >= 100 and not id.endswith("5")}
    assert set(ids_of(out)) == stay
    short = sum(len(text) < 100 for _, text in whole)
    assert counts_of(out)["dropped by the filter: too short"] == short
    reason = "dropped by the filter: no reason given"
    assert counts_of(out)[reason] == len(whole) - short - len(stay)
    settled = manifest.load(str(out)).settings["filter"]
    assert (settled["name"], settled["settings"]) == ("rules.py:keep", settings)


def test_a_duplicate_is_one_of_a_document_that_stays(
    tmp_path: Path, run_build: Run, rules: Path
) -> None:
    first = write_jsonl(tmp_path / "a.jsonl", ["twice", "other"])
    second = write_jsonl(tmp_path / "b.jsonl", ["once", "twice", "twice"])
    (tmp_path / "drops.txt").write_text("a.jsonl#0")
    out = run_build(
        first,
        second,
        source=KEEP,
        dedup="exact",
        drop=(str(tmp_path / "drops.txt"),),
        filter=f"{rules}:keep",
        filter_settings={"letter": "#1"},
    )
    assert ids_of(out) == ["b.jsonl#0", "b.jsonl#2"]
    assert counts_of(out)["dropped by the list"] == 1
    assert "duplicates" not in counts_of(out)


def test_a_killed_build_resumes_with_the_same_bytes(
    corpus: Path, run_build: Run, rules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {
        "source": KEEP,
        "filter": f"{rules}:keep",
        "filter_settings": {"shortest": 150},
        "shuffle": 2,
        "dedup": "exact",
    }
    whole = snapshot(run_build(corpus, out="whole", **options))
    with monkeypatch.context() as patched:
        patched.setattr(manifest, "save", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run_build(corpus, **options)
    assert snapshot(run_build(corpus, **options)) == whole


def test_another_filter_is_another_build(
    tmp_path: Path, corpus: Path, run_build: Run, rules: Path
) -> None:
    run_build(corpus, filter=f"{rules}:keep")
    with pytest.raises(StorageError, match="other settings: filter was"):
        run_build(corpus, filter=f"{rules}:keep", filter_settings={"shortest": 3})
    rules.write_text(rules.read_text() + "\n# changed\n")
    with pytest.raises(StorageError, match="other settings: filter was"):
        run_build(corpus, filter=f"{rules}:keep")
    with pytest.raises(StorageError, match=r"other settings: filter was .*, is not given"):
        run_build(corpus)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return {'good': None}[text]", "raised KeyError: 'bad'"),
        ("return None if text == 'good' else sys.exit(3)", "raised SystemExit: 3"),
    ],
)
@pytest.mark.parametrize("engine", [ExecutorConfig(workers=1), TWO], ids=["one", "two"])
def test_an_exception_names_the_file_and_the_record(
    tmp_path: Path, run_build: Run, rules: Path, body: str, message: str, engine: ExecutorConfig
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["good", "good", "bad"])
    rules.write_text(f"import sys\ndef keep(text, fields):\n    {body}\n")
    with pytest.raises(InputError, match=message) as caught:
        run_build(path, filter=f"{rules}:keep", on_error="skip", engine=engine)
    assert caught.value.where == f"{path}, record 3"


def test_a_module_that_ends_the_program_cannot_be_imported(
    corpus: Path, run_build: Run, rules: Path
) -> None:
    rules.write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(MisuseError, match="cannot be imported: SystemExit: 3"):
        run_build(corpus, filter=f"{rules}:keep")


@pytest.mark.parametrize(
    ("body", "message"),
    [("return 5", "returned 5"), ("return ''", "returned ''"), ("return text", "100 different")],
)
def test_answers_that_are_no_reasons_are_errors(
    corpus: Path, run_build: Run, rules: Path, body: str, message: str
) -> None:
    rules.write_text(f"def keep(text, fields):\n    text = text[:30]\n    {body}\n")
    with pytest.raises(InputError, match=message):
        run_build(corpus, filter=f"{rules}:keep", slice_size=1 << 20)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("rules.py:keep", {"longest": 1}, "cannot be called with .*longest"),
        ("rules.py:other", {}, "has no function other"),
        ("rules.py", {}, "names no function"),
        ("missing.py:keep", {}, "cannot be imported: FileNotFoundError"),
        ("no_such_module:keep", {}, "cannot be imported: ModuleNotFoundError"),
    ],
)
def test_a_filter_that_cannot_be_called_is_misuse(
    corpus: Path,
    run_build: Run,
    rules: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    settings: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.chdir(rules.parent)
    with pytest.raises(MisuseError, match=message):
        run_build(corpus, filter=name, filter_settings=settings)


def test_the_command_shows_the_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = texts(30)
    write_jsonl(tmp_path / "a.jsonl", lines)
    (tmp_path / "rules_of_the_command.py").write_text(RULES)
    command = ["build", "a.jsonl", "--tokenizer", "byte", "--out", "out", "--workers", "1"]
    command += ["--filter", "rules_of_the_command:keep", "--filter-set", "shortest=200"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    short = Counter(len(text) < 200 for text in lines)[True]
    shown = CliRunner().invoke(main, ["inspect", "out"]).output
    assert f"dropped by the filter: too short: {short}" in shown
    assert CliRunner().invoke(main, [*command[:-4], "--filter-set", "x=1"]).exit_code == 2
