from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.data.corpora import ONE, read_dataset, snapshot, texts, write_jsonl

from headrace.console.errors import BusyError, InputError
from headrace.dataplane.datasets import manifest
from headrace.dataplane.tokenizers.bpe import BpeConfig
from headrace.dataplane.tokenizers.byte import ByteConfig
from headrace.tokenize.builder.build import BuildConfig
from headrace.tokenize.executors import ExecutorConfig
from headrace.tokenize.sources.format import SourceConfig

Run = Callable[..., Path]
BY_NAME = SourceConfig(id_field="name")


@pytest.mark.parametrize("format", ["arrow", "mds"])
def test_a_dataset_has_every_document_with_its_origin(
    corpus: Path, run_build: Run, format: str
) -> None:
    out = run_build(corpus, format=format, source=BY_NAME)
    result = read_dataset(out)
    expected = []
    for number, count in enumerate((200, 3, 40, 1)):
        file = corpus / f"{number}.jsonl"
        for line, text in enumerate(texts(count, seed=number)):
            expected.append((str(file), line, f"{file.name}#{line}", text))
    assert [(o.file, o.position, o.id, text) for o, text, _ in result] == expected
    output = manifest.load(str(out))
    assert output.documents == 244
    assert output.generations[0].shards > 3
    assert output.generations[0].provenance["counts"]["documents read"] == 244
    assert not (out / "work").exists()


EVERYTHING: dict[str, Any] = {
    "shuffle": 3,
    "dedup": "exact",
    "splits": {"val": 0.1},
    "max_document_tokens": 50,
    "source": SourceConfig(text_documents="line"),
}


@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "everything"])
def test_bytes_are_independent_of_the_number_of_workers(
    corpus: Path, run_build: Run, options: dict[str, Any]
) -> None:
    (corpus / "lines.txt").write_text("\n".join(texts(400)))
    one_worker = run_build(corpus, out="one", engine=ONE, **options)
    two_workers = run_build(corpus, out="two", engine=ExecutorConfig(workers=2), **options)
    assert snapshot(one_worker) == snapshot(two_workers)


def test_a_full_disk_is_an_error_and_leaves_no_temporary_files(
    corpus: Path, tmp_path: Path
) -> None:
    """A file-size limit of 20 KB stands in for a full disk."""
    code = (
        "import resource, signal\nfrom headrace.tokenize.cli import main\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        "for options in (), ('--format', 'mds'), ('--shuffle', '5'):\n"
        " try:\n"
        f"  main(['build', {str(corpus)!r}, '--tokenizer', 'byte', '--workers', '1', '--out',"
        f" {str(tmp_path / 'out')!r}, *options])\n"
        " except SystemExit as end:\n"
        "  assert end.code == 1"
    )
    run = subprocess.run([sys.executable, "-B", "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "Traceback" not in run.stderr and run.stderr.count("error: cannot write") == 3
    assert not list((tmp_path / "out").rglob("*.tmp"))
    assert not list((tmp_path / "out").rglob("manifest.json"))


def test_an_empty_split_is_an_error_before_the_commit(tmp_path: Path, run_build: Run) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", ["one"])
    with pytest.raises(InputError, match=r"no documents for .* \(documents read: 1\)") as caught:
        run_build(file, splits={"test": 0.4, "val": 0.4})
    assert "other fractions" in str(caught.value.hint)
    assert not list((tmp_path / "out").rglob("manifest.json"))


def test_a_build_without_documents_says_what_became_of_them(tmp_path: Path, run_build: Run) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "one"}\n{"text": ""}\n{"text": "two"}\n{"no": 1}\n')
    (tmp_path / "rules.py").write_text("def keep(text, fields):\n    return 'too short'\n")
    with pytest.raises(InputError) as caught:
        run_build(file, filter=f"{tmp_path / 'rules.py'}:keep", on_error="skip")
    assert caught.value.message == (
        f"no documents for {tmp_path / 'out'} (documents read: 2; bad: missing field: 1; "
        "dropped by the filter: too short: 2; empty documents: 1)"
    )
    assert "what leaves the documents out" in str(caught.value.hint)


def test_shuffle_is_a_permutation_that_depends_on_the_seed(corpus: Path, run_build: Run) -> None:
    plain = read_dataset(run_build(corpus, out="plain", source=BY_NAME))
    orders = []
    for out, seed in (("a", 1), ("b", 1), ("c", 2)):
        result = read_dataset(run_build(corpus, out=out, shuffle=seed, source=BY_NAME))
        assert sorted(map(repr, result)) == sorted(map(repr, plain))
        orders.append([repr(origin) for origin, _, _ in result])
    assert orders[0] == orders[1] != orders[2]
    places = {repr(origin): number for number, (origin, _, _) in enumerate(plain)}
    ranks = [places[name] for name in orders[0]]
    correlation = np.corrcoef(ranks, range(len(ranks)))[0, 1]
    assert abs(correlation) < 0.25


def test_splits_depend_on_content_alone(corpus: Path, run_build: Run) -> None:
    run_build(corpus, out="a", splits={"val": 0.1, "test": 0.1})
    (corpus / "0.jsonl").rename(corpus / "moved.jsonl")
    write_jsonl(corpus / "more.jsonl", texts(100, seed=77))
    out = run_build(corpus, out="b", splits={"val": 0.1, "test": 0.1})
    sides = {}
    for build in ("a", "b"):
        for name in ("train", "val", "test"):
            for _, text, _ in read_dataset(out.parent / build / name):
                sides.setdefault(text, set()).add(name)
    assert len(sides) == 344
    assert all(len(names) == 1 for names in sides.values())
    held = [text for text, names in sides.items() if names == {"val"}]
    assert 15 < len(held) < 60


def test_deduplication_keeps_the_first_of_equal_documents(tmp_path: Path, run_build: Run) -> None:
    write_jsonl(tmp_path / "c" / "a.jsonl", ["one", "two", "one", "three "])
    write_jsonl(tmp_path / "c" / "b.jsonl", ["two", "three", "four", "one"])
    out = run_build(tmp_path / "c", dedup="exact", slice_size=50)
    result = [(Path(origin.file).name, text) for origin, text, _ in read_dataset(out)]
    assert result == [
        *(("a.jsonl", text) for text in ("one", "two", "three ")),
        *(("b.jsonl", text) for text in ("three", "four")),
    ]
    counts = manifest.load(str(out)).generations[0].provenance["counts"]
    assert counts["duplicates"] == 3


def test_long_documents_are_split_at_token_counts(tmp_path: Path, run_build: Run) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", ["abcdefghij", "klm", "nop"])
    out = run_build(file, max_document_tokens=4)
    result = read_dataset(out)
    assert [text for _, text, _ in result] == ["abc", "def", "ghi", "j", "klm", "nop"]
    assert [origin.position for origin, _, _ in result] == [0, 0, 0, 0, 1, 2]
    counts = manifest.load(str(out)).generations[0].provenance["counts"]
    assert counts["documents that were split"] == 1


def test_dna_gives_masked_bases_a_lower_weight(tmp_path: Path, run_build: Run) -> None:
    file = tmp_path / "a.fa"
    file.write_text(">chr1 a genome\nACGTacgt\nNNaa\n>chr2\nGGg\n")
    out = run_build(file, byte=ByteConfig(dna=True))
    from headrace.dataplane.datasets.dataset import Dataset

    dataset = Dataset(str(out))
    assert dataset.manifest.weights == (1.0, 0.1)
    tokens, codes = np.empty(17, np.uint16), np.empty(17, np.uint8)
    dataset.fill(0, tokens, codes)
    assert bytes(tokens[:12].astype(np.uint8)) == b"ACGTACGTNNAA"
    assert codes.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 0, 0, 0, 1, 0]
    assert dataset.origins(0, 2)[1].id == "chr2"


def test_a_second_build_at_once_is_an_error(corpus: Path, run_build: Run, tmp_path: Path) -> None:
    from headrace.tokenize.builder.lock import BuildLock

    with (
        BuildLock(str(tmp_path / "out" / "work" / "claims")),
        pytest.raises(BusyError, match="another build is writing here"),
    ):
        run_build(corpus)
    run_build(corpus)


def test_a_corpus_without_documents_is_an_error(tmp_path: Path, run_build: Run) -> None:
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(InputError, match="no documents"):
        run_build(tmp_path / "empty.jsonl")


def test_streaming_dataset_reads_an_mds_build(corpus: Path, run_build: Run) -> None:
    from streaming import StreamingDataset

    out = run_build(corpus, format="mds", compression="zstd", shuffle=1)
    expected = read_dataset(out)
    local = out.parent / "local"
    dataset = StreamingDataset(remote=str(out), local=str(local), batch_size=1)
    assert len(dataset) == len(expected)
    for number in (0, 5, 100, 243):
        origin, _, ids = expected[number]
        assert dataset[number]["tokens"].tolist() == ids
        assert dataset[number]["file"] == origin.file


def test_masked_weight_without_dna_is_an_error() -> None:
    with pytest.raises(ValueError, match="masked_weight needs dna"):
        ByteConfig(masked_weight=0.3)


def test_invalid_settings_are_errors() -> None:
    common = {"inputs": ("a",), "out": "b", "tokenizer": "byte"}
    for wrong, message in (
        ({"compression": "zstd"}, "the arrow format cannot be compressed"),
        ({"compression": "lz4", "format": "mds"}, "not zstd"),
        ({"splits": {"val": 1.0}}, "fractions between 0 and 1"),
        ({"splits": {"train": 0.1}}, "the name of the rest"),
        ({"splits": {"work": 0.1}}, "cannot be called `work`"),
        ({"splits": {"": 0.1}}, "letters, digits"),
        ({"max_document_tokens": 1}, "at least 2"),
        ({"inputs": ()}, "inputs is empty"),
        ({"shard_size": 0}, "shard_size is 0"),
        ({"slice_size": -1}, "slice_size is -1"),
        ({"bpe": BpeConfig()}, "`bpe` is for a tokenizer's JSON file"),
        ({"tokenizer": "t.json", "byte": ByteConfig()}, "`byte` is for the tokenizer `byte`"),
    ):
        with pytest.raises(ValueError, match=message):
            BuildConfig(**{**common, **wrong})  # type: ignore[arg-type]
