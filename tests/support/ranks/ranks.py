"""Pools of ranks that wait for work: started once, they serve every test of a session.

    ranks = Ranks(4, Path("work.py"))
    ranks.run("task", …)              each rank calls `task(…)` of work.py and returns its result
    ranks.run("others.task", …)       … of the module support.tasks.others, which may import `work`

A rank that fails returns its traceback, the others time out, and the pool is restarted.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import multiprocessing
import multiprocessing.forkserver
import os
import sys
import tempfile
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any
from unittest import mock

PATIENCE = 300.0
"""Timeout of collectives in seconds."""
IMPORTED = [
    "torch._dynamo",
    "headrace.trainer.cli",
    "headrace.trainer.launch.start",
    "headrace.trainer.launch.worker",
    "headrace.reports.report.write",
    "deepspeed",
]
"""Modules that the server of all forks imports once. (torch imports torch._dynamo when a model is
first sharded.)"""


ENVIRONMENT = {**os.environ, "DS_ACCELERATOR": "cpu"}
"""That of the server. DeepSpeed would ask CUDA for GPUs, after which ranks are not forked."""


def forkserver() -> ForkServerContext:
    """Return the context of processes that have imported these modules."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with mock.patch.dict(os.environ, ENVIRONMENT, clear=True):  # not that of the first test
        multiprocessing.forkserver.ensure_running()
    return context


class Ranks:
    def __init__(self, size: int, script: Path) -> None:
        self.size = size
        self.script = script
        self.start()

    def start(self) -> None:
        context = forkserver()
        self.folder = tempfile.TemporaryDirectory()
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            arguments = (rank, self.size, str(self.script), f"{self.folder.name}/store", theirs)
            process = context.Process(target=serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, task: str, *arguments: Any, **options: Any) -> list[Any]:
        """Return the result of each rank."""
        for pipe in self.pipes:
            pipe.send((task, arguments, options))
        answers = [pipe.recv() for pipe in self.pipes]
        failures = [f"rank {rank}: {text}" for rank, (ok, text) in enumerate(answers) if not ok]
        if failures:
            self.stop()
            self.start()
            raise AssertionError("\n".join(failures))
        return [answer for _, answer in answers]

    def stop(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.close()
            process.kill()
            process.join()
        self.folder.cleanup()


def serve(rank: int, size: int, script: str, store: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    gc.freeze()  # DeepSpeed collects garbage often: not among the modules of the server
    torch.set_num_threads(1)
    share_polling()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=PATIENCE),
    )
    spec = importlib.util.spec_from_file_location("work", script)
    assert spec is not None and spec.loader is not None
    work = sys.modules["work"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(work)
    while True:
        try:
            task, arguments, options = pipe.recv()
        except EOFError:
            return
        try:
            module, _, name = task.rpartition(".")
            act = getattr(
                importlib.import_module(f"support.tasks.{module}") if module else work, name
            )
            pipe.send((True, act(*arguments, **options)))
        except Exception:
            pipe.send((False, traceback.format_exc()))


def share_polling() -> None:
    """Give all process groups of this process one gloo device.

    The thread of a device wakes 100 times a second, and a rank of a pool keeps the groups of all
    layouts that it has seen: with a device for each, idle ranks take a good part of the CPU.
    """
    from torch.distributed import ProcessGroupGloo, distributed_c10d

    device = ProcessGroupGloo.create_default_device()

    def create(asked: Any, _: object) -> ProcessGroupGloo:
        options = ProcessGroupGloo._Options()
        options._devices, options._timeout = [device], asked.timeout
        options.global_ranks_in_group = asked.global_ranks_in_group
        options.group_name = asked.group_id
        return ProcessGroupGloo(asked.store, asked.group_rank, asked.group_size, options)

    assert hasattr(distributed_c10d, "_create_gloo_process_group")
    distributed_c10d._create_gloo_process_group = create
