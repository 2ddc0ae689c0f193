from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.data.small_data import plan_of, random_documents, threads_of_loaders, write_dataset

from headrace.console.errors import IntegrityError
from headrace.dataplane.datasets.chunks import CHUNK_BYTES
from headrace.dataplane.loader.loader import Batch, Loader
from headrace.dataplane.loader.rows import RowReader
from headrace.dataplane.order.plan import Plan

NAMES = ("tokens", "targets", "weights", "cu_seqlens")


def equal(left: Batch, right: Batch) -> bool:
    return left.digests == right.digests and all(
        torch.equal(getattr(left, name), getattr(right, name)) for name in NAMES
    )


@pytest.mark.parametrize("number", [0, 1, 2, 4])
@pytest.mark.parametrize("room", [1, 1 << 20])
def test_batches_do_not_depend_on_workers_whether_kept_or_dropped(
    two_phases: Plan, number: int, room: int
) -> None:
    """All memory is fresh where all batches are kept, and used again where they are dropped."""
    expected = [batch for step in Loader(two_phases, micro_batch=4) for batch in step]
    options: dict[str, Any] = {"micro_batch": 4, "workers": number, "group_bytes": room}
    dropped = (batch for step in Loader(two_phases, **options) for batch in step)
    assert all(
        equal(batch, expected_batch)
        for batch, expected_batch in zip(dropped, expected, strict=True)
    )
    kept = [batch for step in Loader(two_phases, **options) for batch in step]
    assert all(
        equal(batch, expected_batch) for batch, expected_batch in zip(kept, expected, strict=True)
    )


@pytest.mark.parametrize("number", [0, 1])
def test_held_batches_are_never_overwritten_and_the_memory_of_dropped_ones_is_used_again(
    two_phases: Plan, number: int
) -> None:
    expected = [step[0].tokens[2:5, 7:] for step in Loader(two_phases, micro_batch=12)]
    places, held = [], {}
    short = Loader(two_phases, micro_batch=12, workers=number, group_bytes=1)  # a step in a group
    for step, (batch,) in enumerate(short):
        places.append(batch.tokens.data_ptr())
        if step in (10, 11, 30, 31):
            held[step] = batch.tokens[2:5, 7:]  # a view holds the memory of its group
        if step == 20:
            held.clear()
        assert all(torch.equal(part, expected[kept]) for kept, part in held.items())
    assert len(places) > 40
    assert len(set(places[:10])) <= 3 + number
    assert not set(places[10:12]) & set(places[12:20]), "memory in use was given again"


@pytest.mark.parametrize("number", [0, 1, 3])
def test_an_error_is_raised_at_its_step_with_its_cause(tmp_path: Path, number: int) -> None:
    """A chunk is damaged: the steps that do not read it are given, as without workers."""
    url = str(tmp_path / "web")
    write_dataset(url, random_documents(5, 700, longest=1000), shard_documents=700)
    phase = {"tokens": 30_000, "seq_len": 64, "batch": 256, "weights": {"one": 1}}
    plan = plan_of({"sources": {"one": {"data": url}}, "phases": {"all": phase}})
    reader = RowReader(plan)
    pieces = reader.find(reader.stream.locate(np.arange(plan.rows))).pieces
    row = next(
        low // pieces.row_bytes for *_, last, low, _ in pieces.tokens.columns.tolist() if last == 2
    )
    (shard,) = Path(url, "shards").iterdir()
    data = bytearray(shard.read_bytes())
    data[2 * CHUNK_BYTES - 1000] ^= 1
    shard.write_bytes(data)
    iterator = iter(Loader(plan, micro_batch=4, workers=number, group_bytes=1))
    for _ in range(row // 4):
        next(iterator)
    with pytest.raises(IntegrityError, match="is damaged") as caught:
        next(iterator)
    assert any("shard_file" in str(entry.path) for entry in caught.traceback)
    assert next(iterator, None) is None and not threads_of_loaders(60)


@pytest.mark.parametrize("end", ["close", "drop"])
def test_workers_end_with_their_iterator(two_phases: Plan, end: str) -> None:
    iterator: Iterator[list[Batch]] = iter(Loader(two_phases, micro_batch=4, workers=2))
    next(iterator)
    assert sum(item.name == "headrace-read" for item in threading.enumerate()) == 1
    if end == "close":
        iterator.close()  # type: ignore[attr-defined]
    else:
        del iterator
    assert not threads_of_loaders(60)


READER = """
import sys
from headrace.dataplane.datasets.cache import Cache
from headrace.dataplane.loader.loader import Loader
from headrace.dataplane.order.plan import Plan

iterator = iter(Loader(Plan.load(sys.argv[1]), micro_batch=4, workers=2, cache=Cache(sys.argv[2])))
next(iterator)
print("begun", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("end", ["exit", "interrupt"])
def test_the_interpreter_ends_while_workers_read_a_store(tmp_path: Path, end: str) -> None:
    write_dataset(str(tmp_path / "web"), random_documents(5, 900, longest=2000))
    phase = {"tokens": 300_000, "seq_len": 64, "batch": 1024, "weights": {"one": 1}}
    url = f"local://{tmp_path}/web"  # fsspec's own scheme, which is handled like a store
    plan = plan_of({"sources": {"one": {"data": url}}, "phases": {"all": phase}})
    plan.save(tmp_path / "plan.json")
    consumer = subprocess.Popen(
        [sys.executable, "-c", READER, tmp_path / "plan.json", tmp_path / "cache"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    assert consumer.stdin and consumer.stdout and consumer.stderr
    assert consumer.stdout.readline() == "begun\n"
    if end == "exit":
        consumer.stdin.close()
    else:
        os.killpg(consumer.pid, signal.SIGINT)  # as a terminal does
    code, stderr = consumer.wait(300), consumer.stderr.read()
    if end == "interrupt":
        assert stderr.count("Traceback") == 1 and "KeyboardInterrupt" in stderr, stderr
    else:
        assert (code, stderr) == (0, "")
