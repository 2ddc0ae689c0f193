"""Near-duplicates: planted ones of known similarity, and the drop list in a build."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from support.data.corpora import ONE, read_dataset, snapshot, texts, write_jsonl

from headrace.console.errors import InputError, IntegrityError, MissingError, MisuseError
from headrace.tokenize.chat.config import ChatFields
from headrace.tokenize.cli import main
from headrace.tokenize.executors import ExecutorConfig
from headrace.tokenize.neardup import bands, find, pairs, results, show, signatures
from headrace.tokenize.neardup.clusters import connect_clusters
from headrace.tokenize.neardup.find import NeardupConfig, find_neardups
from headrace.tokenize.neardup.job import TaskSizes
from headrace.tokenize.neardup.lsh import LshConfig, choose_bands
from headrace.tokenize.neardup.pairs import PAIR, find_pairs

pytest.importorskip("rensa")

WORDS = 100
SIMILARITIES = (0.2, 0.4, 0.6, 0.8, 0.9)
PAIRS = 150
CURVE = LshConfig(ngram=3, bands=8, rows=4, seed=5)


def fresh(count: int) -> list[str]:
    """Return words that no other document has."""
    return [f"w{next(NUMBERS)}" for _ in range(count)]


NUMBERS = iter(range(10_000_000))


def pair_of(similarity: float, ngram: int) -> tuple[list[str], list[str], float]:
    """Return two documents of WORDS words whose first words are equal, and their similarity."""
    runs = WORDS - ngram + 1
    shared = round(2 * runs * similarity / (1 + similarity))
    document = fresh(WORDS)
    duplicate = document[: shared + ngram - 1] + fresh(WORDS - shared - ngram + 1)
    return document, duplicate, shared / (2 * runs - shared)


def search(
    inputs: Iterable[Path], out: Path, sizes: TaskSizes | None = None, **options: Any
) -> results.Results:
    values: dict[str, Any] = {"engine": ONE, "slice_size": 20_000, **options}
    config = NeardupConfig(inputs=tuple(map(str, inputs)), out=str(out), **values)
    return find_neardups(config, sizes)


def dropped(out: Path) -> list[tuple[str, int]]:
    table = pq.read_table(out).to_pylist()
    return [(Path(row["file"]).name, row["record"]) for row in table]


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[float, list[int]]]:
    """A corpus whose documents 2k and 2k + 1 are a pair, and the numbers of the second ones by
    similarity."""
    rng = random.Random(0)
    similarities = [s for s in SIMILARITIES for _ in range(PAIRS)]
    rng.shuffle(similarities)
    documents: list[str] = []
    of: dict[float, list[int]] = {}
    for similarity in similarities:
        document, duplicate, exact = pair_of(similarity, CURVE.ngram)
        of.setdefault(exact, []).append(len(documents) + 1)
        documents += [" ".join(document), " ".join(duplicate)]
    path = write_jsonl(tmp_path_factory.mktemp("planted") / "corpus.jsonl", documents)
    return path, of


def test_pairs_are_found_as_often_as_the_curve_says(
    planted: tuple[Path, dict[float, list[int]]], tmp_path: Path
) -> None:
    corpus, of = planted
    search([corpus], tmp_path / "drop.parquet", lsh=CURVE)
    result = {record for _, record in dropped(tmp_path / "drop.parquet")}
    assert all(record % 2 for record in result)  # no pair of documents that share nothing
    for exact, numbers in of.items():
        p = 1 - (1 - exact**CURVE.rows) ** CURVE.bands
        assert p == pytest.approx(CURVE.probability(exact))
        share = len(result & set(numbers)) / len(numbers)
        assert abs(share - p) < 4 * math.sqrt(p * (1 - p) / len(numbers)) + 1 / len(numbers), exact


def test_a_search_with_other_settings_finds_others(
    planted: tuple[Path, dict[float, list[int]]], tmp_path: Path
) -> None:
    """The curve is that of the settings: fewer rows find nearly all pairs, more find few."""
    corpus, of = planted
    shares = []
    for rows in (1, 16):
        out = tmp_path / f"{rows}.parquet"
        search([corpus], out, lsh=LshConfig(ngram=3, bands=8, rows=rows))
        (low,) = [numbers for exact, numbers in of.items() if 0.35 < exact < 0.45]
        shares.append(len({record for _, record in dropped(out)} & set(low)) / len(low))
    assert shares[0] > 0.9
    assert shares[1] < 0.05


@pytest.fixture
def copies(tmp_path: Path) -> list[Path]:
    """Three files with exact copies, copies in other letters, and documents without words."""
    documents = [*texts(150, seed=1), "??", "!", "", "one two"]
    rng = random.Random(2)
    again = [rng.choice(documents[:150]) for _ in range(40)]
    last = [" ".join(text.upper().split()) + "." for text in again[:20]] + ["??", "One, two!", "?"]
    names = ("a.jsonl", "b.jsonl", "c.jsonl")
    parts = (documents, again, last)
    return [
        write_jsonl(tmp_path / "corpus" / n, part) for n, part in zip(names, parts, strict=True)
    ]


def exact_duplicates(paths: list[Path]) -> list[tuple[str, int]]:
    """Return all but the first of the documents with equal words (or equal texts, without any)."""
    seen, result = set(), []
    for path in paths:
        for number, line in enumerate(path.read_text().splitlines()):
            text = json.loads(line)["text"]
            if not text:
                continue
            folded = re.sub(r"[^\w\s]", "", text.lower()).split()
            key = " ".join(folded).replace("水", " 水 ").split() or text
            if str(key) in seen:
                result.append((path.name, number))
            seen.add(str(key))
    return result


@pytest.mark.parametrize("workers", [1, 2])
def test_exact_duplicates_are_all_found(copies: list[Path], tmp_path: Path, workers: int) -> None:
    out = tmp_path / "drop.parquet"
    engine = ExecutorConfig(workers=workers)
    result = search(copies, out, engine=engine, slice_size=5_000, lsh=LshConfig(rows=40))
    assert dropped(out) == exact_duplicates(copies)
    assert result.duplicates == len(dropped(out))
    assert result.documents == 153 + 40 + 23
    assert result.counts["empty documents"] == 1
    clusters = results.read_table(str(out), result, "clusters").to_pylist()
    assert sum(row["kept"] for row in clusters) == result.clusters
    for row in clusters:
        assert row["kept"] == (row["cluster"] == row["document"])
        assert row["cluster"] <= row["document"]


def test_a_build_drops_what_the_list_names(
    copies: list[Path], tmp_path: Path, run_build: Callable[..., Path]
) -> None:
    folder, out = copies[0].parent, tmp_path / "drop.parquet"
    drop_list = folder / "drop.parquet"
    counted = [search([folder], list).documents for list in (out, drop_list, drop_list)]
    assert counted == [216, 216, 216]  # its own list and tables are no inputs
    shutil.rmtree(folder / "drop.neardup")
    drop_list.unlink()
    whole = [
        (Path(o.file).name, o.position) for o, _, _ in read_dataset(run_build(folder, out="a"))
    ]
    build = run_build(folder, drop=(str(out),), out="b")
    kept = [(Path(o.file).name, o.position) for o, _, _ in read_dataset(build)]
    gone = set(dropped(out))
    assert len(gone) > 50
    assert kept == [place for place in whole if place not in gone]


def test_a_search_does_not_depend_on_workers_kills_and_segments(
    copies: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def files(name: str) -> dict[str, bytes]:
        folder = snapshot(tmp_path / f"{name}.neardup")
        return {**folder, "list": (tmp_path / f"{name}.parquet").read_bytes()}

    search(copies, tmp_path / "a.parquet", slice_size=5_000)
    whole = files("a")
    names = ["list", "neardup.json", "results", "results"]
    assert sorted(name.split("/")[0] for name in whole) == names
    search(copies, tmp_path / "b.parquet", slice_size=5_000, engine=ExecutorConfig(workers=2))
    assert files("b") == whole
    places = ((bands, "save_state", 2), (pairs, "save_state", 2), (results, "save", 0))
    for module, name, at in places:
        with monkeypatch.context() as patched:
            save, calls = getattr(module, name), iter(range(3))

            def killed(*arguments: Any, save: Any = save, calls: Any = calls, at: int = at) -> None:
                if next(calls) == at:
                    raise KeyboardInterrupt
                save(*arguments)

            patched.setattr(module, name, killed)
            with pytest.raises(KeyboardInterrupt):
                search(copies, tmp_path / "c.parquet", slice_size=5_000)
    search(copies, tmp_path / "c.parquet", slice_size=5_000)
    assert files("c") == whole
    sizes = TaskSizes(segment_bytes=1_000, pair_entries=50, part_documents=30)
    last = search(copies, tmp_path / "d.parquet", sizes, slice_size=5_000)
    assert last.settings["segments"] == 64
    assert files("d")["list"] == whole["list"]


def test_a_second_search_has_nothing_to_do_unless_something_changed(
    copies: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "drop.parquet"
    first = search(copies, out)
    half = ("work/claims/.0.tmp", ".neardup.json.tmp", "results/.0.tmp")
    leftovers = [*(f"drop.neardup/{name}" for name in half), ".drop.parquet.tmp", ".other.tmp"]
    (tmp_path / "drop.neardup/work/claims").mkdir(parents=True)
    for name in leftovers:
        (tmp_path / name).touch()
    with monkeypatch.context() as patched:
        patched.setattr(find, "_finish", None)
        assert search(copies, out) == first
    assert [name for name in leftovers if (tmp_path / name).exists()] == [".other.tmp"]
    assert not (tmp_path / "drop.neardup/work").exists()
    assert search(copies[:2], out).duplicates < first.duplicates
    assert len(list((tmp_path / "drop.neardup" / "results").iterdir())) == 2
    out.write_bytes(out.read_bytes()[:-1])
    assert search(copies[:2], out).drop_list != first.drop_list
    assert pq.read_table(out).num_rows < first.duplicates


@pytest.mark.parametrize("list_too", [True, False], ids=["list too", "list whole"])
@pytest.mark.parametrize("lost", [True, False], ids=["lost", "damaged"])
def test_a_second_search_makes_lost_and_damaged_tables_again(
    copies: list[Path], tmp_path: Path, lost: bool, list_too: bool
) -> None:
    out = tmp_path / "drop.parquet"
    first, whole = search(copies, out), snapshot(tmp_path / "drop.neardup")
    for name in first.files.values():
        table = tmp_path / "drop.neardup" / name
        data = bytearray(table.read_bytes())
        data[len(data) // 2] ^= 1
        table.write_bytes(data)
        if lost:
            table.unlink()
    if list_too:
        out.unlink()
    assert search(copies, out) == first
    assert snapshot(tmp_path / "drop.neardup") == whole


def test_a_damaged_part_is_named(
    copies: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(find.PairWorker, "plan", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            search(copies, tmp_path / "drop.parquet")
    parts = sorted((tmp_path / "drop.neardup" / "work" / "parts").glob("*.bands"))
    data = bytearray(parts[0].read_bytes())
    data[len(data) // 2] ^= 1
    parts[0].write_bytes(data)
    with pytest.raises(IntegrityError, match=f"{parts[0].name} is damaged"):
        search(copies, tmp_path / "drop.parquet")


def test_wrong_inputs_are_errors(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(MisuseError, match="another ending"):
        search([tmp_path], tmp_path / "drop.txt")
    empty = write_jsonl(tmp_path / "empty.jsonl", [""])
    with pytest.raises(InputError, match="have no documents"):
        search([empty], tmp_path / "drop.parquet")
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"tex\n')
    with pytest.raises(InputError, match="broken JSON") as caught:
        search([tmp_path / "bad.jsonl"], tmp_path / "drop.parquet")
    assert "bad.jsonl, line 2" in str(caught.value)
    file, copy = (write_jsonl(tmp_path / name, ["a b", "c d"]) for name in ("1.jsonl", "2.jsonl"))
    copy.write_bytes(file.read_bytes())
    assert search([file, copy], tmp_path / "drop.parquet").duplicates == 0
    assert "2.jsonl is left out: it is a copy of" in caplog.text


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rensa", None)
    signatures.import_rensa.cache_clear()
    with pytest.raises(MissingError, match="rensa") as caught:
        search([write_jsonl(tmp_path / "a.jsonl", ["a"])], tmp_path / "drop.parquet")
    assert caught.value.hint == "pip install 'headrace[neardup]'"


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=60), st.integers(1, 4))
def test_clusters_are_those_that_pairs_connect(edges: list[tuple[int, int]], blocks: int) -> None:
    output = np.array([(min(e), max(e)) for e in edges], PAIR)
    result = connect_clusters(lambda: np.array_split(output, blocks))
    groups = {number: {number} for edge in edges for number in edge}
    for first, second in edges:
        union = groups[first] | groups[second]
        groups |= dict.fromkeys(union, union)
    assert result.documents.tolist() == sorted(groups)
    assert result.firsts.tolist() == [min(groups[number]) for number in sorted(groups)]


@given(st.lists(st.integers(0, 5), max_size=30))
def test_pairs_are_of_the_first_document_with_a_key(keys: list[int]) -> None:
    rng = random.Random(len(keys))
    documents = rng.sample(range(100), len(keys))
    result = find_pairs(np.array(keys, np.uint64), np.array(documents, np.int64))
    of: dict[int, list[int]] = {}
    for key, document in zip(keys, documents, strict=True):
        of.setdefault(key, []).append(document)
    expected = {(min(ids), item) for ids in of.values() for item in ids if item > min(ids)}
    assert result.tolist() == sorted(expected)


def test_bands_for_a_threshold_have_their_step_there() -> None:
    for threshold in (0.5, 0.7, 0.9):
        number, rows = choose_bands(threshold, 128)
        assert number * rows <= 128
        config = LshConfig(bands=number, rows=rows)
        assert config.probability(threshold - 0.15) < 0.5 < config.probability(threshold + 0.1)


def test_the_commands(copies: list[Path], tmp_path: Path) -> None:
    out = str(tmp_path / "drop.parquet")
    command = ["neardup", *map(str, copies), "--out", out, "--workers", "1"]
    result = CliRunner().invoke(main, [*command, "--threshold", "0.8", "--permutations", "64"])
    assert result.exit_code == 0, result.output
    assert re.search(r"\d+ of 216 documents .* in \d+ clusters", result.output)
    assert "0.8: " in result.output
    shown = CliRunner().invoke(main, ["duplicates", out, "--count", "2"])
    assert shown.output.count("stays: ") == 2
    data = json.loads(CliRunner().invoke(main, ["duplicates", out, "--json"]).stdout)
    for cluster in data:
        first, *duplicates = cluster["members"]
        assert first["kept"]
        assert first["document"] == cluster["cluster"]
        for duplicate in duplicates:
            path = next(path for path in copies if str(path) == duplicate["file"])
            line = path.read_text().splitlines()[duplicate["record"]]
            assert duplicate["text"] == json.loads(line)["text"]
            assert duplicate["similarity"] > 0.4
    assert (
        "no cluster has the number 7777"
        in CliRunner().invoke(main, ["duplicates", out, "--cluster", "7777"]).output
    )
    for words, message in (
        (["--permutations", "9"], "needs --threshold"),
        (["--threshold", "0.5", "--bands", "9"], "leave --bands"),
        (["--threshold", "1.5"], "between 0 and 1"),
        (["--bands", "0"], "bands is 0"),
        (["--ngram", "0"], "ngram is 0"),
    ):
        result = CliRunner().invoke(main, [*command, *words])
        assert (result.exit_code, message in result.output) == (2, True), result.output


def test_similarity_is_that_of_sets_of_runs() -> None:
    document, duplicate, exact = pair_of(0.6, 5)
    assert show.similarity(" ".join(document), " ".join(duplicate), 5) == pytest.approx(exact)
    assert show.similarity("a b", "A, B!", 5) == 1
    assert show.similarity("a b", "a c", 5) == 0


def test_conversations_are_compared_by_their_contents(tmp_path: Path) -> None:
    words = [" ".join(fresh(30)) for _ in range(4)]
    turns = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        for question, answer in ((words[0], words[1]), (words[2], words[3]), (words[1], words[3]))
    ]
    other_names = [{"from": "human", "value": words[2]}, {"from": "gpt", "value": words[3]}]
    records: list[dict[str, Any]] = [{"messages": item} for item in (*turns, other_names)]
    records.append({"prompt": words[0], "response": words[1] + " more"})
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    out = tmp_path / "drop.parquet"
    result = search([tmp_path / "talks.jsonl"], out, conversations=ChatFields())
    assert (result.documents, result.duplicates, result.clusters) == (5, 2, 2)
    assert pq.read_table(out).column("record").to_pylist() == [3, 4]
    texts = [
        [member.text for member in cluster.members] for cluster in show.show_clusters(str(out))
    ]
    assert texts[0][0] == f"{words[0]}\n{words[1]}"
    with pytest.raises(InputError, match="no field `talk`") as caught:
        search([tmp_path / "talks.jsonl"], out, conversations=ChatFields(messages="talk"))
    assert caught.value.hint is not None
    assert "--messages-field" in caught.value.hint


def test_conversations_are_refused_by_name(tmp_path: Path) -> None:
    record = {"messages": [{"role": "user", "content": "a"}]}
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n")
    with pytest.raises(InputError, match="no field `text`") as caught:
        search([tmp_path / "a.jsonl"], tmp_path / "drop.parquet")
    assert "other commands read one field of text" in (caught.value.hint or "")
