"""One flipped bit, or a cut, in any file of a dataset or of an unfinished build."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.data.corpora import ONE, read_dataset, snapshot, texts, write_jsonl

from headrace.console.errors import IntegrityError, StorageError
from headrace.dataplane import tokenizers
from headrace.dataplane.datasets import manifest
from headrace.tokenize.builder import build as building
from headrace.tokenize.builder import shuffle
from headrace.tokenize.train import TrainConfig, train
from headrace.tokenize.verify import verify

Run = Callable[..., Path]


def damages(data: bytes) -> Iterator[bytes]:
    middle = len(data) // 2
    yield data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
    yield data[:middle]


def test_every_file_that_the_manifest_reaches_is_verified(tmp_path: Path, run_build: Run) -> None:
    corpus = write_jsonl(tmp_path / "a.jsonl", texts(30))
    bpe = str(tmp_path / "bpe.json")
    train(TrainConfig(inputs=(str(corpus),), out=bpe, vocab_size=300))
    options = {"tokenizer": bpe, "dedup": "exact", "format": "mds"}
    out = run_build(corpus, **options)
    url = str(out)
    whole = snapshot(out)
    assert verify(url, ONE) == []
    endings = {Path(name).suffix for name in whole}
    assert endings == {".arrow", ".digests", ".inputs", ".json", ".mds"}
    for name, data in whole.items():
        for wrong in damages(data):
            (out / name).write_bytes(wrong)
            if name == manifest.NAME:
                with pytest.raises(IntegrityError, match=name):
                    verify(url, ONE)
                continue
            (damage,) = verify(url, ONE)
            assert damage.name == name and damage.hint
            if name.startswith("tokenizers/"):
                with pytest.raises(IntegrityError, match=name):
                    tokenizers.load(manifest.load(url).tokenizer, url)
                run_build(corpus, **options)  # writes it again, as the hint says
                assert (out / name).read_bytes() == data
        (out / name).write_bytes(data)
    (out / "tables").rename(tmp_path / "tables")
    assert len(verify(url, ONE)) == 3, "a missing file is damage too"


@pytest.mark.parametrize("ending", ["digests", "inputs"])
def test_a_build_reads_no_damaged_table(tmp_path: Path, run_build: Run, ending: str) -> None:
    """Before, a flipped bit in the digests let a duplicate in."""
    folder = tmp_path / "corpus"
    documents = texts(50)
    write_jsonl(folder / "0.jsonl", documents)
    out = run_build(folder, dedup="exact")
    write_jsonl(folder / "1.jsonl", [*documents, "new"])
    (file,) = (out / "tables").glob(f"*.{ending}")
    data = file.read_bytes()
    for wrong in damages(data):
        file.write_bytes(wrong)
        with pytest.raises(IntegrityError, match=file.name) as caught:
            run_build(folder, dedup="exact")
        assert "from a copy" in str(caught.value.hint)
    file.write_bytes(data)
    assert len(read_dataset(run_build(folder, dedup="exact"))) == 51


@pytest.mark.parametrize("stage", ["gather", "commit"])
def test_an_unfinished_build_reads_no_damaged_file(
    tmp_path: Path, run_build: Run, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """Interrupt a build, damage one of its work files, and run it again."""
    corpus = write_jsonl(tmp_path / "a.jsonl", [*texts(20), *texts(3)])
    options = {"dedup": "exact", "shuffle": 2}
    whole = snapshot(run_build(corpus, out="whole", **options))

    def interrupt(*_: object) -> None:
        raise StorageError("interrupted")

    with monkeypatch.context() as patch:
        if stage == "gather":
            patch.setattr(shuffle.GatherWorker, "__call__", interrupt)
        else:
            patch.setattr(building, "commit", interrupt)
        with pytest.raises(StorageError, match="interrupted"):
            run_build(corpus, **options)
    out = (tmp_path / "out").rename(tmp_path / "unfinished").with_name("out")
    refused = set()
    for name, data in snapshot(tmp_path / "unfinished").items():
        path = out / name
        if not name.startswith("work/") or "claims" in path.parts:
            continue
        for wrong in damages(data):
            shutil.copytree(tmp_path / "unfinished", out)
            path.write_bytes(wrong)
            try:
                run_build(corpus, **options)
            except IntegrityError as error:
                assert path.name in str(error) and error.hint
                refused.add(path.parent.name)
            else:
                assert snapshot(out) == whole
            shutil.rmtree(out)
    assert refused == {"tasks", "digests"} | ({"spills"} if stage == "gather" else set())
