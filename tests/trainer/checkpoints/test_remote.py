"""Checkpoints in a store: complete or absent; only the run's own prefixes are deleted; a killed
save does not block the next."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from support.stores.swift import Swift

from headrace.console.errors import CheckpointError, StorageError
from headrace.dataplane.storage import storage
from headrace.models.config.config import load_model_config
from headrace.models.model.model import Model
from headrace.models.parallel.local_shard import LocalShard
from headrace.trainer.checkpoints import saver, store
from headrace.trainer.checkpoints.fragments import Fragment
from headrace.trainer.checkpoints.policy import CheckpointConfig
from headrace.trainer.checkpoints.store import RunState
from headrace.trainer.folders.folder import RunFolder
from headrace.trainer.layout.groups import Parallel
from headrace.trainer.weights import source as sources

Save = Callable[..., RunFolder]


@pytest.fixture
def url() -> Iterator[str]:
    yield "memory://bucket/run"
    fsspec.filesystem("memory").store.clear()


@pytest.fixture
def model() -> Model:
    result = Model(load_model_config("tiny-transformer", ["vocab_size=64"]))
    result.init_weights(1)
    return result


def save(folder: Path, group: Any, steps: list[int], **policy: Any) -> None:
    keeper = saver.Saver(folder, CheckpointConfig(**policy), group)
    for step in steps:
        where = {"row": step, "tokens": step, "plan_hash": "p", "updates": step, "ledger": ""}
        data = torch.full((30,), float(step))
        fragment = Fragment("master.w", LocalShard((30,)), 0, data)
        keeper.save([fragment], RunState(step=step, seed=1, run="me", **where))
    keeper.wait()


def read(path: Path | str, group: Any) -> float:
    target = torch.zeros(30)
    saver.load(path, [Fragment("master.w", LocalShard((30,)), 0, target)], group)
    assert target.eq(target[0]).all()
    return float(target[0])


def test_files_are_in_the_store_and_a_record_in_the_folder(
    model: Model, checkpoint_of: Save, url: str
) -> None:
    run = checkpoint_of(model, url=url)
    (record,) = store.committed(run.checkpoints)
    names = sorted(path.name for path in record.iterdir())
    assert names == ["manifest.json", "model.yaml", "remote", "state.json"]
    (there,) = store.list_complete(url)
    assert (record / "remote").read_text() == there and there.startswith(f"{url}/step-00000003.")
    for path in (str(run.root), str(record), there, url):  # the last two need no run folder
        result = sources.find(path)
        assert result.model == model.config
        weights = result.weights()
        for name, parameter in model.named_parameters():
            assert torch.equal(weights[name], parameter.detach())


def test_only_checkpoints_named_by_a_record_are_deleted(
    tmp_path: Path, parallel: Parallel, url: str
) -> None:
    group = parallel.checkpoint
    save(tmp_path / "other", group, [1, 2], url=url)
    theirs = store.list_complete(url)
    storage.write(f"{url}/step-00000001.0123/notes.txt", b"a person's")
    save(tmp_path / "mine", group, [1, 2, 3, 4], url=url, keep_last=1, keep_every=2)
    assert [store.parse_step(path) for path in store.committed(tmp_path / "mine")] == [2, 4]
    assert set(theirs) <= set(store.list_complete(url)) and len(store.list_complete(url)) == 4
    assert storage.exists(f"{url}/step-00000001.0123/notes.txt")
    assert [read(path, group) for path in store.committed(tmp_path / "mine")] == [2.0, 4.0]
    assert read(theirs[0], group) == 1.0


def test_damage_in_the_store_is_detected(tmp_path: Path, parallel: Parallel, url: str) -> None:
    save(tmp_path, parallel.checkpoint, [1], url=url)
    (record,) = store.committed(tmp_path)
    (there,) = store.list_complete(url)
    place = f"{there}/tensors/__0_0.distcp"
    data = bytearray(storage.read(place))
    data[len(data) // 2] ^= 1
    storage.write(place, bytes(data))
    for path in (record, there):
        with pytest.raises(CheckpointError, match=r"__0_0\.distcp"):
            read(path, parallel.checkpoint)
    storage.delete(place)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp is missing"):
        read(record, parallel.checkpoint)


def test_incomplete_checkpoints_are_invisible_and_removed_at_the_next_start(
    tmp_path: Path, parallel: Parallel, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, parallel.checkpoint, [1], url=url)
    half = store.temporary(tmp_path, 2, "beef")
    store.begin(half, f"{url}/step-00000002.beef")
    storage.write(f"{url}/step-00000002.beef/tensors/__0_0.distcp", b"half")
    assert len(store.committed(tmp_path)) == len(store.list_complete(url)) == 1

    def silent(*_: object) -> Any:
        raise StorageError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(storage, "list_files", silent)
        store.clean(tmp_path)  # a store that does not respond must not block a start
    assert half.exists()
    store.clean(tmp_path)
    assert not half.exists() and len(storage.list_files(url)) == len(
        storage.list_files(store.list_complete(url)[0])
    )


def test_a_store_failure_fails_the_save_and_leaves_no_files(
    tmp_path: Path, parallel: Parallel, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = storage.write

    def fails(place: str, data: bytes) -> None:
        if place.endswith(store.MANIFEST):
            raise StorageError(f"cannot write {place}: it is full")
        write(place, data)

    monkeypatch.setattr(storage, "write", fails)
    with pytest.raises(StorageError, match="it is full"):
        save(tmp_path, parallel.checkpoint, [1], url=url)
    assert store.list_complete(url) == storage.list_files(url) == list(tmp_path.iterdir()) == []


def test_a_run_that_lost_its_folder_finds_its_checkpoints(
    tmp_path: Path,
    model: Model,
    checkpoint_of: Save,
    url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It adopts all of them, also if it is killed meanwhile."""
    checkpoint_of(model, 3, url=url)
    checkpoint_of(model, 5, url=url)
    new = tmp_path / "new"
    new.mkdir()
    prepared: list[int] = []

    def prepare(state: store.RunState) -> None:
        prepared.append(state.step)

    store.adopt(new, url, "another", prepare)
    assert store.committed(new) == [] and prepared == []
    rename = Path.rename
    for allowed in ([], [1]):  # killed before the first record appears, and before the second

        def dying(path: Path, target: Path, allowed: list[int] = allowed) -> None:
            if not allowed:
                raise KeyboardInterrupt
            allowed.pop()
            rename(path, target)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Path, "rename", dying)
            store.adopt(new, url, "me", prepare)
        store.clean(new)
    store.adopt(new, url, "me", prepare)
    assert prepared == [5, 5, 5]
    assert sorted(path.name for path in new.iterdir()) == [store.name(3), store.name(5)]
    assert store.read_state(store.committed(new)[-1]).step == 5
    assert len(store.list_complete(url)) == 2


def test_a_record_emptied_by_a_power_cut_deletes_nothing(tmp_path: Path) -> None:
    half = store.temporary(tmp_path, 2, "beef")
    store.begin(half, "memory://bucket/run")
    assert store.locate_files(half) == "memory://bucket/run"
    (half / store.REMOTE).write_text("")
    with pytest.raises(CheckpointError, match="names no store"):
        store.clean(tmp_path)


def test_a_url_must_name_a_store() -> None:
    with pytest.raises(ValueError, match="must name a store"):
        CheckpointConfig(url="checkpoints/here")


@pytest.mark.server
@pytest.mark.timeout(900)
def test_a_run_survives_kills_during_saves_to_s3(
    swift: Swift, trainer: Any, tmp_path: Path
) -> None:
    """Two ranks on a real server: killed at random moments, the last time the folder is lost."""
    import random
    import shutil

    whole, url = tmp_path / "whole", "s3://runs/one"
    more = ["--processes", "2", "synthetic.steps=24", "checkpoints.every=3"]
    trainer.run(*more, out=whole)
    more.append(f"checkpoints.url={url}")
    generator = random.Random(2)
    for kill in range(3):
        process = trainer.start(*more)
        goal = (kill + 1) * 5
        metrics = trainer.out / "metrics.jsonl"
        while not metrics.exists() or len(metrics.read_text().splitlines()) < goal:
            assert process.poll() is None, (tmp_path / "started.log").read_text()
            time.sleep(0.02)
        time.sleep(generator.random() * 0.2)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    shutil.rmtree(trainer.out)
    trainer.run(*more)
    events = trainer.lines("events.jsonl")
    assert events[0]["event"] == "resume" and events[0]["step"] > 0
    ledger = trainer.lines("ledger.jsonl", whole)
    assert trainer.lines("ledger.jsonl") == ledger[events[0]["step"] - 1 :]
    assert trainer.losses() == trainer.losses(whole)[events[0]["step"] :]
    kept = {(path / "remote").read_text() for path in store.committed(trainer.out / "checkpoints")}
    assert kept <= set(store.list_complete(url))
    manifests = [json.loads(storage.read(f"{place}/manifest.json")) for place in kept]
    assert max(manifest["step"] for manifest in manifests) == 24
