"""How a rank of a GPU starts, without one."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from headrace.trainer.cluster.ranks import initialise
from headrace.trainer.layout.devices import ALLOCATOR, SEGMENTS, set_allocator


@pytest.mark.parametrize("launcher", ["none", "torchrun"])
def test_a_rank_takes_its_gpu_before_it_joins(
    monkeypatch: pytest.MonkeyPatch, launcher: str
) -> None:
    """NCCL connects once, on a device that is named, and splits every other group from there."""
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **named: calls.append(named))
    if launcher == "torchrun":
        for name, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    gpu = torch.device("cuda", 1)
    initialise("cpu:gloo,cuda:nccl", timedelta(minutes=1), device=gpu)
    assert calls[0] == gpu and calls[1]["device_id"] == gpu
    calls.clear()
    initialise("gloo", timedelta(minutes=1), device=torch.device("cpu"))
    assert len(calls) == 1 and "device_id" not in calls[0]


def test_memory_grows_in_segments_unless_a_person_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", chosen)
    set_allocator()
    assert chosen == {ALLOCATOR[0]: SEGMENTS}
    for name in ALLOCATOR:
        chosen.clear()
        chosen[name] = "max_split_size_mb:512"
        set_allocator()
        assert chosen == {name: "max_split_size_mb:512"}
