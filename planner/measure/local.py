"""Ranks on this machine, for measurements without a launcher."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from ...console.errors import MisuseError, UserError
from ...trainer.cluster.ranks import joined, threads_per_rank
from ...trainer.layout.devices import count_gpus
from .collectives import join

Work = Callable[..., None]
CPU_PROCESSES = 2


def processes_of(kind: Literal["cpu", "cuda"], asked: int | None) -> int:
    """Return the number of ranks on this machine: as asked, the GPUs, or two on a CPU."""
    if joined():
        return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    gpus = count_gpus() if kind == "cuda" else 0
    if asked is not None and gpus and asked > gpus:
        raise MisuseError(
            f"{asked} processes, and this machine has {gpus} GPUs",
            hint=f"--processes {gpus}, or --device cpu",
        )
    return asked or gpus or CPU_PROCESSES


def run(work: Work, kind: Literal["cpu", "cuda"], processes: int, *arguments: Any) -> None:
    """Call `work(world, *arguments)` on each rank: of the launcher, or of new local processes."""
    if joined():
        torch.set_num_threads(threads_per_rank(processes))
        _act(work, kind, None, arguments)
        return
    if processes < 2:
        raise MisuseError(
            "collectives need two ranks or more, and this machine would have one",
            hint="use several GPUs, torchrun, or --device cpu --processes 2",
        )
    with tempfile.TemporaryDirectory() as folder:
        options = (work, kind, processes, folder, arguments)
        context = start_processes(
            _serve, args=options, nprocs=processes, join=False, start_method="spawn"
        )
        try:
            while not context.join():
                pass
        except Exception:
            failed = Path(folder) / "error"
            if failed.exists():
                error: UserError = pickle.loads(failed.read_bytes())
                raise error from None
            raise


def _serve(
    rank: int, work: Work, kind: Literal["cpu", "cuda"], processes: int, folder: str, words: Any
) -> None:
    torch.set_num_threads(threads_per_rank(processes))
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    os.environ.update({name: str(value) for name, value in own.items()})
    try:
        _act(work, kind, f"{folder}/store", words)
    except UserError as error:
        (Path(folder) / "error").write_bytes(pickle.dumps(error))
        raise


def _act(work: Work, kind: Literal["cpu", "cuda"], store: str | None, words: Any) -> None:
    world = join(kind, store)
    try:
        work(world, *words)
        world.slowest(0.0)
    finally:
        dist.destroy_process_group()
