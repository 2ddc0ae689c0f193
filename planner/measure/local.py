"""Ranks on this machine for measurements, with or without a launcher."""

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
from ...trainer.cluster.ranks import is_rank, threads_per_rank
from ...trainer.layout.devices import count_gpus
from .collectives import join_world

Work = Callable[..., None]
CPU_PROCESSES = 2


def count_processes(kind: Literal["cpu", "cuda"], processes: int | None) -> int:
    """Return the number of ranks on this machine: `processes`, one per GPU, or two on a CPU."""
    if is_rank():
        return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    gpus = count_gpus() if kind == "cuda" else 0
    if processes is not None and gpus and processes > gpus:
        raise MisuseError(
            f"{processes} processes, and this machine has {gpus} GPUs",
            hint=f"--processes {gpus}, or --device cpu",
        )
    return processes or gpus or CPU_PROCESSES


def run(work: Work, kind: Literal["cpu", "cuda"], processes: int, *arguments: Any) -> None:
    """Call `work(world, *arguments)` on all ranks: the launcher's, or new local processes."""
    if is_rank():
        torch.set_num_threads(threads_per_rank(processes))
        _work_in_world(work, kind, None, arguments)
        return
    if processes < 2:
        raise MisuseError(
            "collectives need two ranks or more, and this machine would have one",
            hint="use several GPUs, torchrun, or --device cpu --processes 2",
        )
    with tempfile.TemporaryDirectory() as folder:
        options = (work, kind, processes, folder, arguments)
        context = start_processes(
            _run_rank, args=options, nprocs=processes, join=False, start_method="spawn"
        )
        try:
            while not context.join():
                pass
        except Exception:
            error_file = Path(folder) / "error"
            if error_file.exists():
                error: UserError = pickle.loads(error_file.read_bytes())
                raise error from None
            raise


def _run_rank(
    rank: int, work: Work, kind: Literal["cpu", "cuda"], processes: int, folder: str, arguments: Any
) -> None:
    torch.set_num_threads(threads_per_rank(processes))
    os.environ.update(dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)))
    os.environ.update(dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(processes)))
    try:
        _work_in_world(work, kind, f"{folder}/store", arguments)
    except UserError as error:
        (Path(folder) / "error").write_bytes(pickle.dumps(error))
        raise


def _work_in_world(
    work: Work, kind: Literal["cpu", "cuda"], store: str | None, arguments: Any
) -> None:
    world = join_world(kind, store)
    try:
        work(world, *arguments)
        world.slowest(0.0)
    finally:
        dist.destroy_process_group()
