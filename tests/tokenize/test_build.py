from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpora import ONE, read_dataset, snapshot, texts, write_jsonl

from headrace.console.errors import BusyError, InputError, StorageError
from headrace.dataplane import manifest
from headrace.dataplane.tokenizers.bpe import BpeConfig
from headrace.dataplane.tokenizers.byte import ByteConfig
from headrace.tokenize.build import BuildConfig
from headrace.tokenize.engines import EngineConfig
from headrace.tokenize.sources import SourceConfig

Run = Callable[..., Path]
BY_NAME = SourceConfig(id_field="name")


@pytest.mark.parametrize("format", ["arrow", "mds"])
def test_a_dataset_holds_every_document_with_its_origin(
    corpus: Path, run_build: Run, format: str
) -> None:
    out = run_build(corpus, format=format, source=BY_NAME)
    found = read_dataset(out)
    expected = []
    for number, count in enumerate((200, 3, 40, 1)):
        file = corpus / f"{number}.jsonl"
        for line, text in enumerate(texts(count, seed=number)):
            expected.append((str(file), line, f"{file.name}#{line}", text))
    assert [(o.file, o.position, o.id, text) for o, text, _ in found] == expected
    made = manifest.load(str(out))
    assert made.documents == 244
    assert made.generations[0].shards > 3
    assert made.generations[0].provenance["counts"]["documents read"] == 244
    assert not (out / "work").exists()


EVERYTHING: dict[str, Any] = {
    "shuffle": 3,
    "dedup": "exact",
    "splits": {"val": 0.1},
    "max_document_tokens": 50,
    "source": SourceConfig(text_documents="line"),
}


@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "everything"])
def test_the_bytes_do_not_depend_on_the_workers(
    corpus: Path, run_build: Run, options: dict[str, Any]
) -> None:
    (corpus / "lines.txt").write_text("\n".join(texts(400)))
    one = run_build(corpus, out="one", engine=ONE, **options)
    two = run_build(corpus, out="two", engine=EngineConfig(workers=2), **options)
    assert snapshot(one) == snapshot(two)


@pytest.mark.parametrize("options", [{}, {"shuffle": 1, "dedup": "exact", "splits": {"val": 0.1}}])
def test_a_build_that_fails_anywhere_goes_on_to_the_same_bytes(
    corpus: Path, run_build: Run, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """A fault at every single write and removal of the build, one after another."""
    from headrace.dataplane import storage

    whole = snapshot(run_build(corpus, out="whole", **options))
    left = 0

    def failing(act: Callable[..., None]) -> Callable[..., None]:
        def fail(url: str, *data: bytes) -> None:
            nonlocal left
            if "/claims/" not in url:
                if left == 0:
                    raise StorageError("the disk is gone")
                left -= 1
            act(url, *data)

        return fail

    for name in ("write", "delete"):
        monkeypatch.setattr(storage, name, failing(getattr(storage, name)))
    for allowed in range(1000):
        left = allowed
        try:
            run_build(corpus, out="again", **options)
        except StorageError:
            continue
        break
    assert allowed > 3
    assert snapshot(corpus.parent / "again") == whole


def test_finished_shards_are_not_built_again(
    corpus: Path, run_build: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.tokenize import tasks

    written = []
    write_shard = tasks.write_shard

    def counting(*args: Any, **options: Any) -> Any:
        if len(written) == 5:
            raise KeyboardInterrupt
        written.append(args[3])
        return write_shard(*args, **options)

    monkeypatch.setattr(tasks, "write_shard", counting)
    with pytest.raises(KeyboardInterrupt):
        run_build(corpus)
    first = list(written)
    written.clear()
    monkeypatch.setattr(tasks, "write_shard", write_shard)
    stat = {path.name: path.stat().st_mtime_ns for path in (corpus.parent / "out").rglob("*.arrow")}
    out = run_build(corpus)
    assert len(first) == len(stat) == 5
    for name, when in stat.items():
        assert (out / "shards" / name).stat().st_mtime_ns == when


def test_a_disk_that_fills_up_is_told_and_hides_nothing(corpus: Path, tmp_path: Path) -> None:
    """Files that may not grow beyond 20 KB stand in for a full disk."""
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
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "Traceback" not in run.stderr and run.stderr.count("error: cannot write") == 3
    assert not list((tmp_path / "out").rglob("*.tmp"))
    assert not list((tmp_path / "out").rglob("manifest.json"))


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--shuffle", "5", "--dedup", "exact"]])
def test_kill_9_at_any_moment(tmp_path: Path, options: list[str]) -> None:
    for number in range(3):
        write_jsonl(tmp_path / "corpus" / f"{number}.jsonl", texts(4000, seed=number))
    command = [
        *(sys.executable, "-c", "from headrace.tokenize.cli import main; main()", "build"),
        *(str(tmp_path / "corpus"), "--tokenizer", "byte", "--shard-size", "64Ki"),
        *("--workers", "2", *options, "--out"),
    ]
    subprocess.run([*command, str(tmp_path / "whole")], check=True, capture_output=True)
    rng = random.Random(0)
    out = tmp_path / "killed"
    for _ in range(6):
        process = subprocess.Popen(
            [*command, str(out)], start_new_session=True, stderr=subprocess.PIPE
        )
        try:
            process.wait(rng.uniform(0.2, 2.5))
            break
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if (out / "manifest.json").exists():
            manifest.load(str(out))  # whole, or not there
    run = subprocess.run([*command, str(out)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert snapshot(out) == snapshot(tmp_path / "whole")


@pytest.mark.slow
def test_workers_end_when_their_build_is_killed(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "corpus.jsonl", texts(60_000))
    code = (
        "from headrace.tokenize.build import *\n"
        "if __name__ == '__main__':\n"
        f" build(BuildConfig(inputs=({str(tmp_path / 'corpus.jsonl')!r},), tokenizer='byte',"
        f" out={str(tmp_path / 'out')!r}, engine=EngineConfig(workers=2), slice_size=100_000))\n"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    process = subprocess.Popen([sys.executable, str(script)], start_new_session=True)
    deadline = time.monotonic() + 300
    while not (tmp_path / "out" / "work" / "tasks").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()  # the parent alone
    process.wait()
    while _group(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _group(process.pid)


def _group(number: int) -> list[str]:
    """Processes of a process group."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == number and fields[0] != "Z":
            found.append(path.parent.name)
    return found


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


def test_a_build_killed_between_two_manifests_goes_on_before_new_files(
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
    found = []
    for name in ("train", "test", "val"):
        assert len(manifest.load(str(out / name)).generations) == 2
        found += [text for _, text, _ in read_dataset(out / name)]
    assert len(found) == len(set(found)) == 120


def test_a_split_without_documents_is_told_before_anything_is_committed(
    tmp_path: Path, run_build: Run
) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", ["one"])
    with pytest.raises(InputError, match="no documents for"):
        run_build(file, splits={"test": 0.4, "val": 0.4})
    assert not list((tmp_path / "out").rglob("manifest.json"))


def test_a_file_that_has_changed_is_refused(corpus: Path, run_build: Run) -> None:
    run_build(corpus)
    write_jsonl(corpus / "1.jsonl", ["something else"])
    with pytest.raises(InputError, match=r"1\.jsonl has changed since"):
        run_build(corpus)


def test_a_change_of_a_few_bytes_is_a_change(tmp_path: Path, run_build: Run) -> None:
    """Anywhere in a file, and under another name."""
    file = write_jsonl(tmp_path / "a.jsonl", ["x" * 200 + f"{k:08}" for k in range(3000)])
    other = tmp_path / "b.jsonl"
    data = file.read_bytes()
    other.write_bytes(data[:50_000] + data[50_000:].replace(b"x", b"y", 1))
    assert other.stat().st_size == file.stat().st_size
    out = run_build(file)
    run_build(file, other)
    assert manifest.load(str(out)).documents == 6000
    file.write_bytes(other.read_bytes().replace(b"y", b"z", 1))
    with pytest.raises(InputError, match=r"a\.jsonl has changed since"):
        run_build(file, other)


def test_a_copy_of_a_file_is_not_built_twice(corpus: Path, run_build: Run) -> None:
    out = run_build(corpus)
    (corpus / "copy.jsonl").write_bytes((corpus / "0.jsonl").read_bytes())
    run_build(corpus)
    assert manifest.load(str(out)).documents == 244


def test_other_settings_are_refused_by_name(corpus: Path, run_build: Run) -> None:
    run_build(corpus)
    with pytest.raises(StorageError, match="shard_size was 15000, is 99"):
        run_build(corpus, shard_size=99)
    with pytest.raises(StorageError, match="tokenizer was"):
        run_build(corpus, byte=ByteConfig(special_tokens=("<end>",)))


def test_shuffling_is_a_permutation_decided_by_the_seed(corpus: Path, run_build: Run) -> None:
    plain = read_dataset(run_build(corpus, out="plain", source=BY_NAME))
    orders = []
    for out, seed in (("a", 1), ("b", 1), ("c", 2)):
        found = read_dataset(run_build(corpus, out=out, shuffle=seed, source=BY_NAME))
        assert sorted(map(repr, found)) == sorted(map(repr, plain))
        orders.append([repr(origin) for origin, _, _ in found])
    assert orders[0] == orders[1] != orders[2]
    places = {repr(origin): number for number, (origin, _, _) in enumerate(plain)}
    ranks = [places[name] for name in orders[0]]
    correlation = np.corrcoef(ranks, range(len(ranks)))[0, 1]
    assert abs(correlation) < 0.25


def test_splits_are_decided_by_content(corpus: Path, run_build: Run) -> None:
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
    found = [(Path(origin.file).name, text) for origin, text, _ in read_dataset(out)]
    assert found == [
        *(("a.jsonl", text) for text in ("one", "two", "three ")),
        *(("b.jsonl", text) for text in ("three", "four")),
    ]
    counts = manifest.load(str(out)).generations[0].provenance["counts"]
    assert counts["duplicates"] == 3


def test_long_documents_are_split_at_token_counts(tmp_path: Path, run_build: Run) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", ["abcdefghij", "klm", "nop"])
    out = run_build(file, max_document_tokens=4)
    found = read_dataset(out)
    assert [text for _, text, _ in found] == ["abc", "def", "ghi", "j", "klm", "nop"]
    assert [origin.position for origin, _, _ in found] == [0, 0, 0, 0, 1, 2]
    counts = manifest.load(str(out)).generations[0].provenance["counts"]
    assert counts["documents that were split"] == 1


def test_dna_weighs_masked_bases_less(tmp_path: Path, run_build: Run) -> None:
    file = tmp_path / "a.fa"
    file.write_text(">chr1 a genome\nACGTacgt\nNNaa\n>chr2\nGGg\n")
    out = run_build(file, byte=ByteConfig(dna=True))
    from headrace.dataplane.dataset import Dataset

    dataset = Dataset(str(out))
    assert dataset.manifest.weights == (1.0, 0.1)
    tokens, codes = np.empty(17, np.uint16), np.empty(17, np.uint8)
    dataset.fill(0, tokens, codes)
    assert bytes(tokens[:12].astype(np.uint8)) == b"ACGTACGTNNAA"
    assert codes.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 0, 0, 0, 1, 0]
    assert dataset.origins(0, 2)[1].id == "chr2"


def test_two_builds_at_once(corpus: Path, run_build: Run, tmp_path: Path) -> None:
    from headrace.tokenize.claim import Claim

    with (
        Claim(str(tmp_path / "out" / "work" / "claims")),
        pytest.raises(BusyError, match="at work"),
    ):
        run_build(corpus)
    run_build(corpus)


def test_the_second_build_of_a_corpus_without_documents_is_refused(
    tmp_path: Path, run_build: Run
) -> None:
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(InputError, match="no documents"):
        run_build(tmp_path / "empty.jsonl")


def test_streaming_dataset_reads_what_was_built(corpus: Path, run_build: Run) -> None:
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


def test_masked_weight_without_dna_is_told() -> None:
    with pytest.raises(ValueError, match="masked_weight needs dna"):
        ByteConfig(masked_weight=0.3)


def test_misuse_is_told_by_name() -> None:
    common = {"inputs": ("a",), "out": "b", "tokenizer": "byte"}
    for wrong, message in (
        ({"compression": "zstd"}, "only the mds format"),
        ({"compression": "lz4", "format": "mds"}, "not zstd"),
        ({"splits": {"val": 1.0}}, "shares between 0 and 1"),
        ({"splits": {"train": 0.1}}, "what the splits leave over"),
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
