"""The number of a rank that was lost, by the port that gloo names."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
from support.ranks.ranks import forkserver

from headrace.trainer.cluster.lost_ranks import (
    LostRankError,
    gather_ports,
    local_ports,
    naming_lost_ranks,
)

WORLD, LOST = 3, 2


def lose(rank: int, store: str, answers: Any) -> None:
    """Join two groups, and lose a rank before a collective of the second."""
    import torch
    import torch.distributed as dist

    options = {"init_method": f"file://{store}", "rank": rank, "world_size": WORLD}
    dist.init_process_group("gloo", **options)
    group = dist.new_group(range(WORLD))
    ports = gather_ports(dist.group.WORLD)
    dist.barrier()
    if rank == LOST:
        os._exit(1)
    for known in (ports, []):
        try:
            with naming_lost_ranks(f"rank {rank}", known):
                dist.all_reduce(torch.ones(9), group=group)
        except LostRankError as error:
            answers.put((rank, bool(known), error.message))
    time.sleep(0.5)  # or the end of this rank would be another loss
    os._exit(0)


def test_a_lost_rank_is_named_among_ranks_of_one_address(tmp_path: Any) -> None:
    context = forkserver()
    answers = context.SimpleQueue()
    arguments = [(rank, str(tmp_path / "store"), answers) for rank in range(WORLD)]
    processes = [context.Process(target=lose, args=argument) for argument in arguments]
    for process in processes:
        process.start()
    said = [answers.get() for _ in range(2 * (WORLD - 1))]
    for process in processes:
        process.join()
    for rank, known, message in said:
        peer = f"rank {LOST} at" if known else "another rank at"
        assert message.startswith(f"rank {rank} lost its connection to {peer} "), message


def test_a_message_without_a_port_names_no_rank() -> None:
    message = "NCCL error: remote process exited or there was a network error"
    said = "its connection to another rank: that rank has ended"
    with pytest.raises(LostRankError, match=said), naming_lost_ranks("rank 0", [local_ports()]):
        raise RuntimeError(message)
