"""Fixtures of tests that train: the command `trainer`, pools of ranks, jobs, a store, a browser."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import fsspec
import pytest
import torch.distributed as dist
from support.configs import CONFIGS
from support.pages import chromium
from support.ranks import forked
from support.ranks.ports import free_ports
from support.ranks.ranks import Ranks
from support.stores.swift import Swift, install

from headrace.console import config as reader
from headrace.dataplane.runlog import writer
from headrace.models.model.model import Model
from headrace.models.parallel.local_shard import LocalShard
from headrace.trainer.checkpoints import store
from headrace.trainer.checkpoints.fragments import Fragment
from headrace.trainer.checkpoints.kinds import MASTER, tensor_key
from headrace.trainer.checkpoints.policy import CheckpointConfig
from headrace.trainer.checkpoints.saver import Saver
from headrace.trainer.cluster import ranks as group
from headrace.trainer.engines import deepspeed
from headrace.trainer.engines.optimizers.states import ADAM
from headrace.trainer.folders.folder import RunFolder
from headrace.trainer.layout.config import LayoutConfig
from headrace.trainer.layout.groups import Parallel, create_groups
from headrace.trainer.run.job import Job
from headrace.trainer.run.request import RunRequest
from headrace.trainer.run.resolve import resolve

TINY = CONFIGS / "tiny.yaml"
TASKS = Path(__file__).parents[1] / "tasks"
LAYOUTS = TASKS / "layouts.py"
AGREEING = TASKS / "agreeing.py"


@pytest.fixture(scope="session")
def work() -> ModuleType:
    """layouts.py, for one process, whose tests keep the buckets of DeepSpeed."""
    spec = importlib.util.spec_from_file_location("work", LAYOUTS)
    assert spec is not None and spec.loader is not None
    module = sys.modules["work"] = importlib.util.module_from_spec(spec)
    with mock.patch.dict(deepspeed.LARGEST_BUCKET):
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """Pools of processes that run the tasks of layouts.py."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def pool(size: int) -> Ranks:
            result = Ranks(size, LAYOUTS)
            stack.callback(result.stop)
            return result

        yield pool


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """Two processes that run the tasks of agreeing.py."""
    pool = Ranks(2, AGREEING)
    yield pool
    pool.stop()


@pytest.fixture
def in_processes(tmp_path: Path, ranks: Callable[[int], Ranks]) -> Callable[..., Any]:
    """Run a task of layouts.py on several ranks and return the result of rank 0."""

    def run(processes: int, task: str, folder: Path | None = None, **arguments: Any) -> Any:
        return ranks(processes).run(task, folder or tmp_path, **arguments)[0]

    return run


@pytest.fixture(scope="module")
def parallel() -> Iterator[Parallel]:
    """This process as the only rank."""
    group.initialise("gloo", timedelta(minutes=5))
    yield create_groups(LayoutConfig(), "cpu", timedelta(minutes=5))
    dist.destroy_process_group()


class Trainer:
    """The command with a tiny model, FSDP2 (which starts fast) and synthetic rows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out = folder / "run"

    def command(self, *words: str, out: Path | None = None) -> list[str]:
        steps = ["synthetic.steps=6", "synthetic.seq_len=16", "synthetic.batch_rows=4"]
        small = ["engine.kind=fsdp2", "optimizer.lr=1e-2", "checkpoints.every=2", "threads=1"]
        quiet = ["watch.tensorboard=false"]
        return [
            *(sys.executable, "-m", "headrace.trainer.cli", "run", "--model", str(TINY)),
            *("--out", str(out or self.out), *steps, *small, *quiet, *words),
        ]

    def run(self, *words: str, out: Path | None = None, code: int | None = 0) -> str:
        """Run the command, as forks, and return its stderr."""
        done = forked.run(self.command(*words, out=out))
        assert code is None or done.returncode == code, done.stderr
        return done.stderr

    def join(self, *words_of: list[str], out: Path | None = None) -> list[tuple[int, str]]:
        """Run the command as two ranks, which another launcher starts; rank 1 has the folder `out`.
        Return their exit codes and stderr."""
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports())}
        world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", **address}
        commands = [
            forked.Command(
                self.command(*words, out=out if rank else None),
                env={**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank, words in enumerate(words_of)
        ]
        done = [command.wait() for command in commands]
        return [(item.returncode, item.stderr) for item in done]

    def start(self, *words: str, out: Path | None = None) -> subprocess.Popen[bytes]:
        """Start the command in its own process group, so that all of it can be killed."""
        with (self.folder / "started.log").open("wb") as log:
            return subprocess.Popen(
                self.command(*words, out=out), stdout=log, stderr=log, start_new_session=True
            )

    def lines(self, name: str, out: Path | None = None) -> list[dict[str, Any]]:
        return list(writer.read((out or self.out) / name))

    def losses(self, out: Path | None = None) -> list[float]:
        return [entry["loss"] for entry in self.lines("metrics.jsonl", out)]


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    assert "WORLD_SIZE" not in os.environ
    return Trainer(tmp_path)


@pytest.fixture(scope="session")
def trainer_in() -> type[Trainer]:
    """Make a trainer in a folder, for a fixture of a wider scope."""
    return Trainer


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Return the folder of an undisturbed run on so many ranks; each is trained once."""

    @functools.cache
    def run(processes: int) -> Path:
        trainer = Trainer(tmp_path_factory.mktemp("whole"))
        trainer.run("--processes", str(processes))
        return trainer.out

    return run


@pytest.fixture
def ask(tmp_path: Path) -> Callable[..., Job]:
    """Resolve a run of synthetic rows."""

    def ask(*overrides: str, out: Path | None = None, **more: Any) -> Job:
        words = ["synthetic.steps=6", "synthetic.batch_rows=4", "synthetic.seq_len=16"]
        asked = {"model": str(TINY), "out": str(out or tmp_path / "run")}
        return resolve(RunRequest(**{**asked, "overrides": [*words, *overrides], **more}))

    return ask


@pytest.fixture
def checkpoint_of(tmp_path: Path, parallel: Parallel) -> Callable[..., RunFolder]:
    """Save a model in a run's folder, as a run of one rank does."""

    def save(model: Model, step: int = 3, *, url: str | None = None) -> RunFolder:
        folder = RunFolder(tmp_path / "run")
        folder.checkpoints.mkdir(parents=True, exist_ok=True)
        folder.model.write_text(reader.dump(model.config))
        folder.run.touch()
        fragments = [
            Fragment(
                tensor_key(kind, name),
                LocalShard(tuple(p.shape)),
                0,
                p.detach().float().reshape(-1),
            )
            for kind in (MASTER, *ADAM)
            for name, p in model.named_parameters()
        ]
        texts = {store.MODEL: reader.dump(model.config)}
        config = CheckpointConfig(url=url)
        keeper = Saver(folder.checkpoints, config, parallel.checkpoint, texts=texts)
        zero = {"plan_hash": "p", "updates": step, "ledger": "", "seed": 1, "run": "me"}
        keeper.save(fragments, store.RunState(step=step, row=step, tokens=step, **zero))
        keeper.wait()
        return folder

    return save


@pytest.fixture(scope="module")
def browser() -> Iterator[chromium.Chromium]:
    """Chromium, installed with apt-get where it is missing."""
    chromium.install()
    with chromium.Chromium() as started:
        yield started


@pytest.fixture
def swift(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Swift]:
    assert request.config.cache is not None
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    server = Swift(install(request.config.cache.mkdir("swift")), tmp_path / "swift")
    server.start()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    fsspec.filesystem("s3").mkdir("runs")
    yield server
    server.stop(signal.SIGKILL)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
