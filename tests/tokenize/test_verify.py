from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.data.corpora import ONE, snapshot

from headrace.console.errors import InputError
from headrace.dataplane.datasets import manifest
from headrace.tokenize.verify import verify

Run = Callable[..., Path]
BUILDS: dict[str, dict[str, Any]] = {
    "arrow": {},
    "zstd": {"format": "mds", "compression": "zstd:1"},
    "shuffled": {"shuffle": 4, "dedup": "exact", "splits": {"val": 0.2}},
}


@pytest.mark.parametrize("kind", BUILDS)
def test_a_flipped_byte_is_found_and_repaired(corpus: Path, run_build: Run, kind: str) -> None:
    out = run_build(corpus, **BUILDS[kind])
    whole = snapshot(out)
    data = out / "train" if kind == "shuffled" else out
    assert verify(str(data), ONE) == []
    shard = sorted((data / "shards").iterdir())[1]
    octets = bytearray(shard.read_bytes())
    octets[len(octets) // 2] ^= 1
    shard.write_bytes(octets)
    (damage,) = verify(str(data), ONE)
    assert damage.name == f"shards/{shard.name}"
    assert "differ from those that were written" in damage.what
    (entry,) = [
        item
        for item in manifest.load_table(str(data), manifest.load(str(data)).generations[0])
        if damage.name in (item.name, item.stored_name)
    ]
    assert damage.task == entry.task != ""
    shard.unlink()
    run_build(corpus, **BUILDS[kind])
    assert snapshot(out) == whole


def test_lost_and_truncated_shards_are_found(corpus: Path, run_build: Run) -> None:
    out = run_build(corpus)
    lost, cut, *_ = sorted((out / "shards").iterdir())
    lost.unlink()
    cut.write_bytes(cut.read_bytes()[:100])
    result = verify(str(out), ONE)
    assert [item.name for item in result] == sorted([f"shards/{lost.name}", f"shards/{cut.name}"])


def test_only_the_task_of_a_lost_shard_is_run(
    corpus: Path, run_build: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.tokenize.builder import tasks

    out = run_build(corpus)
    shard = sorted((out / "shards").iterdir())[0]
    shard.unlink()
    written = []
    write = tasks.write_shard

    def counting(*args: Any, **options: Any) -> Any:
        written.append(args[3])
        return write(*args, **options)

    monkeypatch.setattr(tasks, "write_shard", counting)
    run_build(corpus)
    assert shard.exists()
    assert len(set(written)) == 1
    assert len(written) < manifest.load(str(out)).generations[0].shards


def test_a_lost_shard_needs_its_inputs(corpus: Path, run_build: Run) -> None:
    out = run_build(corpus)
    sorted((out / "shards").iterdir())[0].unlink()
    (corpus / "0.jsonl").unlink()
    with pytest.raises(InputError, match="not among the inputs"):
        run_build(corpus)


def test_the_streaming_index_is_checked(corpus: Path, run_build: Run) -> None:
    """StreamingDataset's index is a file of its own: it can be wrong on its own."""
    out = run_build(corpus, format="mds")
    assert verify(str(out), ONE) == []
    index = Path(out, "index.json")
    shards = json.loads(index.read_text())["shards"]
    first, *rest = shards
    uncompressed = first["raw_data"]
    for damaged, words in (
        (rest, "documents in 9 shards; the manifest differs"),
        ([rest[0], first, *rest[1:]], "the manifest differs"),
        ([{**first, "samples": first["samples"] + 1}, *rest], "the manifest differs"),
        ([{**first, "raw_data": {**uncompressed, "bytes": 9}}, *rest], "the manifest differs"),
        ([{**first, "format": "jsonl"}, *rest], "other formats than MDS 2"),
        ([{**first, "raw_data": None}, *rest], "not a whole index of MDS shards"),
        (None, "not a whole index of MDS shards"),
        ([{**first, "size_limit": 5}, *rest], "differ from those that the build writes"),
    ):
        index.write_text(json.dumps({"version": 2, "shards": damaged}, sort_keys=True))
        (damage,) = verify(str(out), ONE)
        assert damage.name == "index.json" and words in damage.what
    index.write_text("{")
    (damage,) = verify(str(out), ONE)
    assert "not a whole index of MDS shards" in damage.what
