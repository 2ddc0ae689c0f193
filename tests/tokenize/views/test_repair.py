"""Lost and damaged files of views: the command that made a view makes them again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.data.corpora import ONE, snapshot, texts, write_jsonl

from headrace.console.errors import IntegrityError
from headrace.dataplane.datasets.dataset import Dataset
from headrace.dataplane.datasets.manifest import Manifest, Shard
from headrace.tokenize import verify as verifying
from headrace.tokenize.train import TrainConfig, train
from headrace.tokenize.verify import verify
from headrace.tokenize.views import pack as packing
from headrace.tokenize.views.pack import PackConfig, pack
from headrace.tokenize.views.select import SelectConfig, select

Run = Callable[..., Path]


@pytest.fixture
def dataset(tmp_path: Path, run_build: Run) -> Path:
    """A dataset of two generations, with a tokenizer in a file."""
    path = write_jsonl(tmp_path / "c" / "0.jsonl", texts(60))
    tokenizer = str(tmp_path / "t.json")
    train(TrainConfig(inputs=(str(path),), out=tokenizer, vocab_size=300))
    run_build(tmp_path / "c", tokenizer=tokenizer)
    write_jsonl(tmp_path / "c" / "1.jsonl", texts(30, seed=1))
    return run_build(tmp_path / "c", tokenizer=tokenizer)


def make(kind: str, dataset: Path) -> Manifest:
    base, out = str(dataset), str(dataset.parent / "view")
    if kind == "packed":
        return pack(PackConfig(dataset=base, length=64, out=out, engine=ONE))
    return select(SelectConfig(dataset=base, where="tokens > 40", out=out, engine=ONE))


def damage(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("folder", ["views", "tables", "tokenizers"])
@pytest.mark.parametrize("spoil", [Path.unlink, damage], ids=["lost", "damaged"])
@pytest.mark.parametrize("kind", ["packed", "selected"])
def test_the_same_command_makes_lost_and_damaged_files_again(
    dataset: Path, folder: str, spoil: Callable[[Path], None], kind: str
) -> None:
    output, out = make(kind, dataset), dataset.parent / "view"
    whole = snapshot(out)
    file = sorted((out / folder).iterdir())[-1]
    spoil(file)
    (result,) = verify(str(out), ONE)
    assert result.name == f"{folder}/{file.name}"
    assert "make the view again" in result.hint
    assert make(kind, dataset) == output
    assert snapshot(out) == whole
    assert verify(str(out), ONE) == []


@pytest.mark.parametrize("kind", ["packed", "selected"])
def test_half_written_files_of_killed_runs_are_removed(dataset: Path, kind: str) -> None:
    """Also if nothing else is to do."""
    make(kind, dataset)
    out = dataset.parent / "view"
    whole = snapshot(out)
    for name in ("claims/.0.json", ".manifest.json", "views/.0.bits", "tables/.0", "tokenizers/.0"):
        half = out / ("work" if name.startswith("claims") else "") / f"{name}.tmp"
        half.parent.mkdir(parents=True, exist_ok=True)
        half.write_bytes(b"{")
    make(kind, dataset)
    assert snapshot(out) == whole
    assert not (out / "work").exists()


@pytest.mark.parametrize("file", ["inputs", "an unused shard", "a used shard", "bits"])
def test_a_deep_check_of_a_view_follows_it_into_its_dataset(
    dataset: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """Each shard is read once. Without --deep, files that the view does not use are not."""
    out, result = dataset, str(dataset.parent / "view")
    opened, views = Dataset(str(out)), dataset.parent / "view/views"
    select(SelectConfig(dataset=str(out), where="document < 3", out=result, engine=ONE))
    used = {shard.name for shard in Dataset(result).shards}
    unused = sorted({shard.name for shard in opened.shards} - used)
    name = {
        "inputs": opened.generations[0].provenance["inputs"]["name"],
        "an unused shard": unused[0],
        "a used shard": min(used),
        "bits": next(path.name for path in views.iterdir()),
    }[file]
    assert verify(result, ONE, deep=True) == [] == verify(str(out), ONE, deep=True)
    damaged = views / name if file == "bits" else out / name
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    read: list[str] = []
    inner = verifying.read_shard

    def reading(url: str, shard: Shard, check: Any) -> Any:
        read.append(shard.name)
        return inner(url, shard, check)

    monkeypatch.setattr(verifying, "read_shard", reading)
    places = [item.name for item in verify(result, ONE, deep=True)]
    assert len(read) == len(set(read)) == len(opened.shards)
    assert (f"views/{name}" if file == "bits" else str(damaged)) in places
    assert bool(verify(result, ONE)) is (file in ("a used shard", "bits"))


def test_files_that_cannot_be_made_again_are_an_error(
    dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make("packed", dataset)
    damage(next((dataset.parent / "view" / "views").iterdir()))
    whole = packing.PackedPieces.encode
    monkeypatch.setattr(packing.PackedPieces, "encode", lambda pieces: whole(pieces) + b" ")
    with pytest.raises(IntegrityError, match="this version of headrace makes others"):
        make("packed", dataset)
