from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest

from headrace.console.errors import CheckpointError
from headrace.trainer.checkpoints import store
from headrace.trainer.checkpoints.policy import CheckpointConfig
from headrace.trainer.checkpoints.store import RunState, StoredFile

STATE = RunState(step=12, row=96, tokens=960, plan_hash="p", updates=12, ledger="ab", seed=1)


def make(folder: Path, step: int = 12) -> Path:
    import hashlib
    from dataclasses import replace

    path = store.temporary(folder, step, "token")
    (path / "tensors").mkdir(parents=True)
    data = bytes(range(200))
    (path / "tensors" / "a").write_bytes(data)
    file = StoredFile("tensors/a", len(data), hashlib.sha256(data).hexdigest())
    target = folder / store.name(step)
    store.commit(path, target, [file], replace(STATE, step=step))
    return target


def test_a_committed_checkpoint_is_complete(tmp_path: Path) -> None:
    path = make(tmp_path)
    store.verify(path, store.read_manifest(path).files)
    assert store.read_state(path) == STATE
    assert store.committed(tmp_path) == [path]
    assert list(tmp_path.glob(".*")) == []


def test_uncommitted_checkpoints_are_invisible_and_removed(tmp_path: Path) -> None:
    store.temporary(tmp_path, 3, "token").mkdir()
    assert store.committed(tmp_path) == []
    store.clean(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["tensors/a", "state.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damage_is_detected_and_names_the_file(tmp_path: Path, name: str, damage: str) -> None:
    path = make(tmp_path)
    place = path / name
    data = bytearray(place.read_bytes())
    if damage == "flip":
        data[7] ^= 1
        place.write_bytes(data)
    elif damage == "cut":
        place.write_bytes(data[:-1])
    else:
        place.unlink()
    with pytest.raises(CheckpointError, match=name) as caught:
        store.verify(path, store.read_manifest(path).files)
    assert "--fallback" in str(caught.value)


def test_a_changed_manifest_is_detected(tmp_path: Path) -> None:
    path = make(tmp_path)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"] = []
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="was changed"):
        store.read_manifest(path)
    (path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        store.read_manifest(path)


def test_retention_keeps_the_last_every_nth_and_listed_steps(tmp_path: Path) -> None:
    for step in range(1, 11):
        make(tmp_path, step)
    policy = CheckpointConfig(keep_last=2, keep_every=4)
    outdated = store.find_outdated(tmp_path, policy, keep=[5])
    assert [store.parse_step(path) for path in outdated] == [1, 2, 3, 6, 7]
    store.prune(tmp_path, policy, keep=[5])
    assert [store.parse_step(path) for path in store.committed(tmp_path)] == [4, 5, 8, 9, 10]


@pytest.mark.parametrize(("there", "kept"), [(4, 4), (5, 5), (7, 5)])
def test_the_latest_abandoned_checkpoints_are_kept(tmp_path: Path, there: int, kept: int) -> None:
    for step in range(there):
        (tmp_path / f"{store.ABANDONED}step-{step:08}").mkdir()
        time.sleep(0.02)  # ordered by time, of which the kernel counts 4 ms
    store.prune(tmp_path, CheckpointConfig(keep_abandoned=5))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"abandoned-step-{step:08}" for step in range(there - kept, there)]


def test_an_abandoned_future_is_set_aside(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        make(tmp_path, step)
    store.set_aside(tmp_path, 2)
    make(tmp_path, 4)
    store.set_aside(tmp_path, 2)
    assert [store.parse_step(path) for path in store.committed(tmp_path)] == [2]
    names = {path.name for path in tmp_path.glob("abandoned-*")}
    assert names == {
        "abandoned-step-00000004",
        "abandoned-step-00000004-1",
        "abandoned-step-00000006",
    }


def test_a_copy_under_the_name_of_another_step_is_refused(tmp_path: Path) -> None:
    copy = tmp_path / store.name(13)
    shutil.copytree(make(tmp_path), copy)
    with pytest.raises(CheckpointError, match="holds the checkpoint of step 12, not that of step"):
        store.read_checkpoint(copy)
    hidden = copy.rename(tmp_path / f"{store.name(12)}.0a1b")
    assert store.read_state(hidden).step == 12, "a prefix in a store"
