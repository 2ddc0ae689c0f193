"""Builds of datasets that exist already: new files, lost shards, other settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.data.corpora import read_dataset, snapshot, texts, write_jsonl

from headrace.console.errors import InputError, StorageError
from headrace.dataplane.datasets import manifest
from headrace.dataplane.tokenizers.byte import ByteConfig
from headrace.tokenize.builder import build
from headrace.tokenize.sources.format import SourceConfig

Run = Callable[..., Path]


def test_new_files_become_a_new_generation(corpus: Path, run_build: Run) -> None:
    out = run_build(corpus, dedup="exact", shuffle=1)
    first = manifest.load(str(out))
    before = snapshot(out)
    write_jsonl(corpus / "9.jsonl", [*texts(30, seed=9), texts(200, seed=0)[7], "x", "x"])
    run_build(corpus, dedup="exact", shuffle=1)
    second = manifest.load(str(out))
    assert second.generations[0] == first.generations[0]
    assert len(second.generations) == 2
    assert second.generations[1].documents == 31
    assert second.generations[1].provenance["counts"]["duplicates"] == 2
    after = snapshot(out)
    assert all(after[name] == data for name, data in before.items() if "manifest" not in name)
    run_build(corpus, dedup="exact", shuffle=1)
    assert snapshot(out) == after


def test_each_generation_is_built_from_its_own_files(
    tmp_path: Path, run_build: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut: list[list[str]] = []
    make = build.run_tasks

    def noting(config: Any, job: Any, files: Any, *rest: Any, **options: Any) -> Any:
        cut.append([Path(file.name).name for file in files])
        return make(config, job, files, *rest, **options)

    monkeypatch.setattr(build, "run_tasks", noting)
    corpus = tmp_path / "corpus"
    for number in range(3):
        write_jsonl(corpus / f"{number}.jsonl", texts(20, seed=number))
        out = run_build(corpus, shuffle=1)
    assert cut == [["0.jsonl"], ["1.jsonl"], ["2.jsonl"]]
    sizes = [generation.documents for generation in manifest.load(str(out)).generations]
    assert sizes == [20, 20, 20]
    result = [Path(origin.file).name for origin, _, _ in read_dataset(out)]
    assert [set(result[k : k + 20]) for k in (0, 20, 40)] == [{f"{k}.jsonl"} for k in range(3)]


def test_duplicates_are_dropped_across_generations(tmp_path: Path, run_build: Run) -> None:
    first = write_jsonl(tmp_path / "c" / "1.jsonl", ["a", "b", "c"])
    second = write_jsonl(tmp_path / "c" / "2.jsonl", ["c", "d", "a", "d"])
    third = write_jsonl(tmp_path / "c" / "3.jsonl", ["d", "b", "e"])
    for inputs in ((first,), (first, second), (third, second, first)):
        out = run_build(*inputs, dedup="exact")
    assert [text for _, text, _ in read_dataset(out)] == ["a", "b", "c", "d", "e"]
    duplicates = [
        generation.provenance["counts"].get("duplicates", 0)
        for generation in manifest.load(str(out)).generations
    ]
    assert duplicates == [0, 3, 2]


def test_a_lost_shard_is_rebuilt_from_its_generation_s_files(
    tmp_path: Path, run_build: Run
) -> None:
    for number in range(2):
        write_jsonl(tmp_path / "c" / f"{number}.jsonl", texts(60, seed=number))
        out = run_build(tmp_path / "c", dedup="exact", shuffle=2)
    whole = snapshot(out)
    for name in whole:
        if name.startswith("shards/"):
            (out / name).unlink()
    run_build(tmp_path / "c", dedup="exact", shuffle=2)
    assert snapshot(out) == whole


def test_removed_inputs_change_nothing(corpus: Path, run_build: Run) -> None:
    """The input files of a dataset are needed only to rebuild lost shards."""
    out = run_build(corpus)
    before = snapshot(out)
    (corpus / "2.jsonl").unlink()
    run_build(corpus)
    assert snapshot(out) == before


def test_other_settings_and_changed_files_are_errors(corpus: Path, run_build: Run) -> None:
    out = run_build(corpus)
    before = snapshot(out)
    write_jsonl(corpus / "9.jsonl", texts(5))
    for options, message in (
        ({"shuffle": 1}, "shuffle was not given, is 1"),
        ({"on_error": "skip"}, "skipping bad records was False, is True"),
        ({"source": SourceConfig(text_field="body")}, "text_field was text, is body"),
        ({"dedup": "exact"}, "dedup was False, is True"),
        ({"max_document_tokens": 9}, "max_document_tokens was not given, is 9"),
        ({"format": "mds"}, "format was arrow, is mds"),
        ({"shard_size": 99}, "shard_size was 15000, is 99"),
        ({"byte": ByteConfig(special_tokens=("<end>",))}, "tokenizer was"),
    ):
        with pytest.raises(StorageError, match=message):
            run_build(corpus, **options)
    write_jsonl(corpus / "1.jsonl", ["other"])
    with pytest.raises(InputError, match="has changed since it was built"):
        run_build(corpus)
    assert snapshot(out) == before


def test_a_build_killed_between_manifests_is_finished_first(
    tmp_path: Path, run_build: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = write_jsonl(tmp_path / "c" / "1.jsonl", [f"document {k}" for k in range(60)])
    options: dict[str, Any] = {"splits": {"test": 0.3, "val": 0.3}, "dedup": "exact"}
    save = manifest.save

    def dying(url: str, new: manifest.Manifest) -> None:
        if not url.endswith("val"):
            raise KeyboardInterrupt
        save(url, new)

    monkeypatch.setattr(manifest, "save", dying)
    with pytest.raises(KeyboardInterrupt):
        run_build(first, **options)
    monkeypatch.setattr(manifest, "save", save)
    second = write_jsonl(tmp_path / "c" / "2.jsonl", [f"other {k}" for k in range(60)])
    with pytest.raises(InputError, match=r"needs .*1\.jsonl again"):
        run_build(second, **options)
    out = run_build(first, second, **options)
    result = []
    for name in ("train", "test", "val"):
        assert len(manifest.load(str(out / name)).generations) == 2
        result += [text for _, text, _ in read_dataset(out / name)]
    assert len(result) == len(set(result)) == 120


def test_a_change_of_a_few_bytes_is_noticed(tmp_path: Path, run_build: Run) -> None:
    """The change may be anywhere in a file, also in a file of another name."""
    file = write_jsonl(tmp_path / "a.jsonl", ["x" * 200 + f"{k:08}" for k in range(3000)])
    changed_file = tmp_path / "b.jsonl"
    data = file.read_bytes()
    changed_file.write_bytes(data[:50_000] + data[50_000:].replace(b"x", b"y", 1))
    assert changed_file.stat().st_size == file.stat().st_size
    out = run_build(file)
    run_build(file, changed_file)
    assert manifest.load(str(out)).documents == 6000
    file.write_bytes(changed_file.read_bytes().replace(b"y", b"z", 1))
    with pytest.raises(InputError, match=r"a\.jsonl has changed since"):
        run_build(file, changed_file)


def test_a_copy_of_a_file_is_not_built_twice(corpus: Path, run_build: Run) -> None:
    out = run_build(corpus)
    (corpus / "copy.jsonl").write_bytes((corpus / "0.jsonl").read_bytes())
    run_build(corpus)
    assert manifest.load(str(out)).documents == 244
