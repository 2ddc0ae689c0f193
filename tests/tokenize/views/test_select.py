"""Views: datasets without tokens of their own, in every reader of datasets."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from support.data.corpora import ONE, read_dataset, snapshot, texts
from support.data.small_data import plan_of

from headrace.console.errors import (
    ConfigError,
    InputError,
    IntegrityError,
    MisuseError,
    StorageError,
)
from headrace.dataplane.datasets import manifest
from headrace.dataplane.datasets.dataset import Dataset
from headrace.dataplane.loader.rows import RowReader
from headrace.mixtures.audit.auditor import Auditor
from headrace.mixtures.planning.open_plan import open_plan
from headrace.tokenize import inspect
from headrace.tokenize.card import card
from headrace.tokenize.cli import main
from headrace.tokenize.executors import ExecutorConfig
from headrace.tokenize.sources.fields import KeptField
from headrace.tokenize.sources.format import SourceConfig
from headrace.tokenize.verify import verify
from headrace.tokenize.views.pack import PackConfig, pack
from headrace.tokenize.views.select import SelectConfig, describe_share, select

Run = Callable[..., Path]
FIELDS = ("language", "score", "good")
LANGUAGES = ("en", "de", None)


def write(path: Path, count: int, seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        {
            "text": text,
            "language": LANGUAGES[rng.integers(3)],
            "score": int(rng.integers(0, 10)) / 10,
            "good": bool(rng.integers(2)),
        }
        for text in texts(count, seed=seed)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def base(tmp_path: Path, run_build: Run) -> Callable[..., Path]:
    def make(**options: Any) -> Path:
        write(tmp_path / "c" / "0.jsonl", 300)
        keep = tuple(KeptField(name=name) for name in FIELDS)
        return run_build(tmp_path / "c", source=SourceConfig(keep=keep), **options)

    return make


def view(base: Path, where: str, out: Path, workers: int = 1) -> manifest.Manifest:
    engine = ExecutorConfig(workers=workers)
    return select(SelectConfig(dataset=str(base), where=where, out=str(out), engine=engine))


def chosen(base: Path, holds: Callable[[dict[str, Any]], bool]) -> list[int]:
    rows = Dataset(str(base)).fields(0, len(read_dataset(base)))
    return [number for number, row in enumerate(rows) if holds(row)]


BIN = "language == 'en' and score >= 0.5"


def in_bin(row: dict[str, Any]) -> bool:
    return row["language"] == "en" and row["score"] >= 0.5


@pytest.mark.parametrize(
    "options",
    [{}, {"format": "mds"}, {"shuffle": 1}, {"format": "mds", "compression": "zstd"}],
    ids=str,
)
def test_a_view_has_the_chosen_documents(
    tmp_path: Path, base: Callable[..., Path], options: dict[str, Any]
) -> None:
    out = base(**options)
    result = view(out, BIN, tmp_path / "view")
    numbers = chosen(out, in_bin)
    whole = read_dataset(out)
    assert 0 < len(numbers) < 100
    assert read_dataset(tmp_path / "view") == [whole[number] for number in numbers]
    assert (result.documents, result.tokens) == (
        len(numbers),
        sum(len(whole[number][2]) for number in numbers),
    )
    rows = Dataset(str(out)).fields(0, 300)
    opened = Dataset(str(tmp_path / "view"))
    assert opened.fields(0, len(numbers)) == [rows[number] for number in numbers]
    assert opened.base_positions(0, len(numbers)) == [(n, 0) for n in numbers]
    assert not list(tmp_path.glob("view/shards/*"))
    if options.get("format") != "mds":
        assert verify(str(tmp_path / "view")) == []


def test_any_span_of_a_view_is_right(tmp_path: Path, base: Callable[..., Path]) -> None:
    view(base(), "good", tmp_path / "view")
    ids = [id for _, _, document in read_dataset(tmp_path / "view") for id in document]
    opened = Dataset(str(tmp_path / "view"))
    rng = np.random.default_rng(0)
    for _ in range(200):
        start, end = np.sort(rng.integers(0, len(ids), 2)).tolist()
        out = np.empty(end - start, np.int64)
        opened.fill(start, out)
        assert out.tolist() == ids[start:end]


def test_bins_are_sources_of_a_mixture(tmp_path: Path, base: Callable[..., Path]) -> None:
    out = base()
    bins = {"high": "score >= 0.5", "low": "score < 0.5"}
    for name, where in bins.items():
        view(out, where, tmp_path / name)
    plan = plan_of(
        {
            "seed": 1,
            "sources": {name: {"data": str(tmp_path / name)} for name in bins},
            "phases": {
                "all": {
                    "tokens": 12_800,
                    "seq_len": 64,
                    "batch": 640,
                    "weights": {"high": 0.75, "low": 0.25},
                }
            },
        }
    )
    reader = RowReader(plan)
    rows = np.arange(plan.end_row)
    located = reader.stream.locate(rows)
    block = reader.read(reader.find(located))
    counts = np.bincount(located.sources)
    assert counts.tolist() == [150, 50]
    for number, name in enumerate(bins):
        ids = [id for _, _, document in read_dataset(tmp_path / name) for id in document]
        seen = np.zeros(len(ids), int)
        for row in rows[located.sources == number]:
            first = int(located.tokens[row])
            assert block.arrays.tokens[row].tolist() == ids[first : first + 65]
            seen[first : first + 64] += 1
        assert seen.max() == 1


def test_the_audit_names_the_document_its_tokens_and_the_view(
    tmp_path: Path, base: Callable[..., Path]
) -> None:
    out = base()
    view(out, BIN, tmp_path / "view")
    mixture = tmp_path / "m.yaml"
    mixture.write_text(
        f"sources:\n  bin: {{data: {tmp_path / 'view'}}}\n"
        "phases:\n  all: {tokens: 640, seq_len: 64, batch: 64, weights: {bin: 1}}\n"
    )
    auditor = Auditor(open_plan(str(mixture), ()))
    whole, rows = read_dataset(out), Dataset(str(out)).fields(0, 300)
    for row in auditor.rows(range(10)):
        data = json.loads(row.format_json())
        tokens: list[int] = []
        for document in data["documents"]:
            origin, _, ids = whole[document["view"]["document"]]
            assert document["view"] == {
                "dataset": str(out),
                "document": document["view"]["document"],
                "where": BIN,
            }
            assert (document["file"], document["position"]) == (origin.file, origin.position)
            assert document["fields"] == rows[document["view"]["document"]]
            tokens += ids[document["first"] : document["first"] + document["tokens"]]
        located = auditor.reader.stream.locate(np.array([row.row]))
        read = auditor.reader.read(auditor.reader.find(located)).arrays.tokens[0]
        assert read[:64].tolist() == tokens
        assert f"through the view {BIN}" in row.format_text()


def test_a_view_of_a_view_is_a_view_of_the_dataset(
    tmp_path: Path, base: Callable[..., Path]
) -> None:
    out = base()
    view(out, "language == 'en'", tmp_path / "en")
    view(tmp_path / "en", "good", tmp_path / "good")
    numbers = chosen(out, lambda row: row["language"] == "en" and row["good"])
    opened = Dataset(str(tmp_path / "good"))
    assert opened.base_positions(0, len(numbers)) == [(n, 0) for n in numbers]
    assert opened.view is not None
    assert (opened.view.url, opened.view.where) == (str(out), "(language == 'en') and (good)")
    whole = read_dataset(out)
    assert read_dataset(tmp_path / "good") == [whole[number] for number in numbers]


def test_document_counts_in_the_view_that_it_is_selected_from(
    tmp_path: Path, base: Callable[..., Path]
) -> None:
    out = base()
    view(out, "language == 'en'", tmp_path / "en")
    half = view(tmp_path / "en", "document < 50", tmp_path / "half")
    numbers = chosen(out, lambda row: row["language"] == "en")[:50]
    opened = Dataset(str(tmp_path / "half"))
    assert [number for number, _ in opened.base_positions(0, 50)] == numbers
    assert opened.view is not None
    assert opened.view.steps == ("language == 'en'", "document < 50")
    text = "where (language == 'en') then (document < 50)"
    assert opened.view.text == text
    assert half.settings["view"]["where"] == ["language == 'en'", "document < 50"]
    described = inspect.describe(str(tmp_path / "half"))
    assert f"view of {out}: its documents {text}" in described
    assert f"{50 / 300:.1%} of its 300 documents" in described
    assert describe_share(half).startswith("50 of 300 documents")

    # The expressions that are recorded, run one after another on the dataset, give the same view.
    view(out, opened.view.steps[0], tmp_path / "one")
    again = view(tmp_path / "one", opened.view.steps[1], tmp_path / "two")
    assert again.hash == half.hash

    view(tmp_path / "half", "good", tmp_path / "good")
    good = Dataset(str(tmp_path / "good")).view
    assert good is not None
    assert good.steps == ("language == 'en'", "(document < 50) and (good)")
    pack(PackConfig(dataset=str(tmp_path / "half"), length=64, out=str(tmp_path / "packed")))
    packed = Dataset(str(tmp_path / "packed")).view
    assert packed is not None
    assert packed.text == f"{text}, packed to 64 tokens"
    with pytest.raises(InputError, match=r"no document of .*half is chosen: 0 of 50"):
        view(tmp_path / "half", "document > 60", tmp_path / "none")


def test_a_view_grows_with_its_dataset(tmp_path: Path, base: Callable[..., Path]) -> None:
    out = base()
    first = view(out, BIN, tmp_path / "view")
    write(tmp_path / "c" / "1.jsonl", 100, seed=1)
    base()
    second = view(out, BIN, tmp_path / "view")
    assert second.generations[0] == first.generations[0]
    assert len(second.generations) == 2
    assert second.documents == len(chosen(out, in_bin)) > first.documents
    before = snapshot(tmp_path / "view")
    assert view(out, BIN, tmp_path / "view") == second
    assert snapshot(tmp_path / "view") == before
    with pytest.raises(StorageError, match=r"a view of .* where language == 'en' and"):
        view(out, "good", tmp_path / "view")
    with pytest.raises(StorageError, match="there is another dataset at"):
        view(tmp_path / "view", "good", out)


def test_a_killed_run_and_parallel_tasks_leave_the_same_bytes(
    tmp_path: Path, base: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = base()
    view(out, BIN, tmp_path / "view")
    with monkeypatch.context() as patched:
        patched.setattr(manifest, "save", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            view(out, BIN, tmp_path / "again")
    (tmp_path / "again/views" / ("0" * 32 + ".bits")).write_bytes(b"x")
    view(out, BIN, tmp_path / "again", workers=2)
    assert snapshot(tmp_path / "again") == snapshot(tmp_path / "view")


def test_dataset_and_view_can_be_moved_together(tmp_path: Path, base: Callable[..., Path]) -> None:
    out = base()
    view(out, BIN, tmp_path / "view")
    before = read_dataset(tmp_path / "view")
    (tmp_path / "moved").mkdir()
    shutil.move(out, tmp_path / "moved/out")
    shutil.move(tmp_path / "view", tmp_path / "moved/view")
    assert read_dataset(tmp_path / "moved/view") == before


def test_a_missing_dataset_is_named_with_its_view(
    tmp_path: Path, base: Callable[..., Path]
) -> None:
    out, target = base(), str(tmp_path / "view")
    view(out, "good", tmp_path / "view")
    view(tmp_path / "view", "language == 'en'", tmp_path / "en")
    pack(PackConfig(dataset=target, length=64, out=str(tmp_path / "packed")))
    mixture = tmp_path / "m.yaml"
    names = ("view", "en", "packed")
    sources = ", ".join(f"{name}: {{data: {tmp_path / name}}}" for name in names)
    mixture.write_text(
        f"sources: {{{sources}}}\n"
        "phases:\n  all: {tokens: 640, seq_len: 64, batch: 64, "
        "weights: {view: 0.5, en: 0.25, packed: 0.25}}\n"
    )
    plan = open_plan(str(mixture), ()).plan
    out.rename(tmp_path / "elsewhere")
    missing = f"its dataset is missing: there is none at {out}"
    with pytest.raises(ConfigError) as caught:
        open_plan(str(mixture), ())
    assert {problem.path for problem in caught.value.problems} == {
        f"sources.{name}.data" for name in names
    }
    for problem, name in zip(caught.value.problems, names, strict=True):
        assert f"{tmp_path / name} is a view, and {missing}" in problem.message
    reader = RowReader(plan)
    with pytest.raises(StorageError, match=f"is a view, and {missing}"):
        reader.read(reader.find(reader.stream.locate(np.arange(plan.end_row))))
    for read in (verify, card):
        with pytest.raises(StorageError, match=missing):
            read(target)
    assert f"view of {out}: " in inspect.describe(target)


def test_a_damaged_view_is_an_error(tmp_path: Path, base: Callable[..., Path]) -> None:
    view(base(), BIN, tmp_path / "view")
    bits = next((tmp_path / "view/views").iterdir())
    bits.write_bytes(bytes([bits.read_bytes()[0] ^ 1]) + bits.read_bytes()[1:])
    with pytest.raises(IntegrityError, match="does not match the hash in its name"):
        read_dataset(tmp_path / "view")
    (damage,) = verify(str(tmp_path / "view"), ONE)
    assert damage.name == f"views/{bits.name}"
    assert "make the view again" in damage.hint


def test_a_damaged_dataset_is_named_by_its_view(tmp_path: Path, base: Callable[..., Path]) -> None:
    out = base()
    view(out, BIN, tmp_path / "view")
    shard = next((out / "shards").iterdir())
    shard.write_bytes(shard.read_bytes()[:-1])
    damage = verify(str(tmp_path / "view"), ONE)
    assert [item.name for item in damage] == [str(shard)]
    assert f"tokenize verify {out}" in damage[0].hint


def test_an_empty_view_is_an_error_with_counts(tmp_path: Path, base: Callable[..., Path]) -> None:
    out = base()
    nulls = len(chosen(out, lambda row: row["language"] is None))
    with pytest.raises(InputError) as caught:
        view(out, "language == 'fr'", tmp_path / "view")
    assert caught.value.message == (
        f"no document of {out} is chosen: 0 of 300; documents without language: {nulls}"
    )
    assert not list((tmp_path / "view").rglob("*"))


def test_the_command_makes_and_describes_a_view(tmp_path: Path, base: Callable[..., Path]) -> None:
    out, target = base(), str(tmp_path / "view")
    result = CliRunner().invoke(main, ["select", str(out), "--where", BIN, "--out", target])
    assert result.exit_code == 0
    numbers = chosen(out, in_bin)
    assert f"{len(numbers)} of 300 documents" in result.output
    described = inspect.describe(target)
    assert f"view of {out}: its documents where {BIN}" in described
    assert f"{len(numbers) / 300:.1%} of its 300 documents, " in described
    shown = inspect.document(target, 1)
    assert shown == inspect.document(str(out), numbers[1])
    with pytest.raises(MisuseError, match="no field `size`"):
        view(out, "size > 3", tmp_path / "other")
    with pytest.raises(MisuseError, match="cannot lie where its dataset lies"):
        view(out, "good", out)
