"""The shuffle through buckets gives the order of the shuffle by shard, and reads each byte once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.data.corpora import read_dataset, snapshot, texts

from headrace.console.errors import IntegrityError, StorageError
from headrace.dataplane.datasets import fields, manifest
from headrace.dataplane.storage import storage
from headrace.tokenize.builder import buckets, tasks
from headrace.tokenize.executors import ExecutorConfig
from headrace.tokenize.sources.fields import KeptField
from headrace.tokenize.sources.format import SourceConfig

Run = Callable[..., Path]
OPTIONS: dict[str, Any] = {"shuffle": 3, "shard_size": 5_000, "shuffle_memory": 60_000}


def documents(out: Path) -> list[str]:
    return [repr(item) for item in read_dataset(out)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dedup": "exact", "max_document_tokens": 50},
        {"shuffle_memory": 1 << 30, "slice_size": 1 << 20},
        {"format": "mds", "compression": "zstd"},
    ],
    ids=str,
)
def test_the_order_is_that_of_a_shuffle_by_shard(
    corpus: Path, run_build: Run, options: dict[str, Any]
) -> None:
    """Oracle: the other shuffle, whose order a test compares with sorted keys."""
    values = OPTIONS | options
    out = run_build(corpus, **values)
    plain = run_build(corpus, out="plain", **values | {"shuffle_memory": None})
    assert documents(out) == documents(plain)
    assert not list(out.glob("work/*"))


def test_workers_do_not_matter(corpus: Path, run_build: Run) -> None:
    one_worker = run_build(corpus, out="one", **OPTIONS)
    two_workers = run_build(corpus, out="two", **OPTIONS, engine=ExecutorConfig(workers=2))
    assert snapshot(one_worker) == snapshot(two_workers)


def test_the_second_pass_reads_each_piece_once(
    corpus: Path, run_build: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests for a spill and a bucket; together they read the spills once."""
    requests: list[tuple[str, int, int]] = []
    held: dict[str, int] = {}
    sizes: list[int] = []
    read, take = buckets.read_checked, buckets.reorder

    def reading(url: str, check: Any, start: int, end: int) -> Any:
        requests.append((url, start, end))
        held[url] = storage.size(url)
        return read(url, check, start, end)

    def taking(documents: Any, order: Any) -> Any:
        sizes.append(documents.size)
        return take(documents, order)

    monkeypatch.setattr(buckets, "read_checked", reading)
    monkeypatch.setattr(buckets, "reorder", taking)
    monkeypatch.chdir(corpus.parent)  # a document's bucket depends on the name of its file
    run_build(corpus.name, **OPTIONS)
    assert len(held) > 3
    assert sum(end - start for _, start, end in requests) == sum(held.values())
    count = -(-126_000 // (OPTIONS["shuffle_memory"] // 4))  # the corpus has 63,000 tokens
    assert len(requests) <= 2 * len(held) * count
    assert max(sizes) < 2 * OPTIONS["shuffle_memory"] // 4


class Killed(BaseException):
    """The end of the process: no handler of the build catches it."""


def killed(run: Callable[[], Path], owner: Any, name: str, at: int) -> bool:
    """Build, and die at the call number `at` of a function; return True if it was reached."""
    real, calls = getattr(owner, name), 0

    def dying(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > at:
            raise Killed
        return real(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, dying)
        try:
            run()
        except Killed:
            return True
    return False


@pytest.mark.parametrize("step", ["a write", "a spill", "a shard", "a manifest"])
def test_a_killed_build_resumes_with_equal_bytes(corpus: Path, run_build: Run, step: str) -> None:
    """It dies again and again, each time a few calls later than before."""
    whole = snapshot(run_build(corpus, out="whole", **OPTIONS))
    owner, name, stride = {
        "a write": (storage, "write", 7),
        "a spill": (tasks, "write_bucketed_spill", 2),
        "a shard": (buckets, "write_shard", 3),
        "a manifest": (manifest, "save", 0),
    }[step]
    deaths = 0
    while deaths < (1 if stride == 0 else 50):
        if not killed(lambda: run_build(corpus, **OPTIONS), owner, name, stride):
            break
        deaths += 1
    assert deaths >= (1 if stride == 0 else 3)
    assert snapshot(run_build(corpus, **OPTIONS)) == whole


def test_fields_and_lost_shards(tmp_path: Path, run_build: Run) -> None:
    """Fields follow their documents; a lost shard is built again."""
    lines = [{"text": text, "n": n} for n, text in enumerate(texts(300))]
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    keep: dict[str, Any] = {"source": SourceConfig(keep=(KeptField(name="n", type="int"),))}
    out = run_build(file, **OPTIONS, **keep)
    seen = []
    for shard in manifest.load_table(str(out), manifest.load(str(out)).generations[0]):
        field_table = fields.fields_file(shard)
        assert field_table is not None
        rows = fields.FieldsReader(str(out), field_table).rows(0, shard.documents)
        seen += rows["n"].to_pylist()
    held = read_dataset(out)
    assert [text for _, text, _ in held] == [lines[n]["text"] for n in seen]
    whole = snapshot(out)
    for name in [name for name in whole if name.startswith(("shards/", "fields/"))][::3]:
        (out / name).unlink()
    run_build(file, **OPTIONS, **keep)
    assert snapshot(out) == whole


@pytest.mark.parametrize("place", [0.3, 0.99])
def test_a_damaged_spill_is_an_error(corpus: Path, run_build: Run, place: float) -> None:
    """In a piece, and in the table of pieces."""
    assert killed(lambda: run_build(corpus, **OPTIONS), buckets, "write_shard", 0)
    (path, *_) = sorted(corpus.parent.glob("out/work/spills/*.spill"))
    data = bytearray(path.read_bytes())
    middle = int(len(data) * place)
    data[middle : middle + 40] = bytes(40)
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match="is damaged") as caught:
        run_build(corpus, **OPTIONS)
    assert "remove the folder work" in str(caught.value.hint)


def test_settings_that_do_not_fit_are_errors(corpus: Path, run_build: Run) -> None:
    with pytest.raises(ValueError, match="shuffle_memory needs shuffle"):
        run_build(corpus, shuffle_memory=1 << 20)
    with pytest.raises(ValueError, match="at least four times"):
        run_build(corpus, shuffle=1, shuffle_memory=40_000)
    run_build(corpus, **OPTIONS)
    with pytest.raises(StorageError, match="shuffle_memory was 60000, is not given"):
        run_build(corpus, **OPTIONS | {"shuffle_memory": None})
