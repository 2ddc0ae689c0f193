from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from headrace.console.errors import RunError
from headrace.dataplane.loader import loader
from headrace.dataplane.loader.loader import Batch, Loader
from headrace.dataplane.order.plan import Plan

NAMES = ("tokens", "targets", "weights", "cu_seqlens")


def processes() -> list[BaseProcess]:
    found = multiprocessing.active_children()
    return [child for child in found if child.name.startswith("headrace-loader")]


def wait_until(what: object) -> None:
    deadline = time.monotonic() + 300
    while not what():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def equal(one: Batch, other: Batch) -> bool:
    return one.digests == other.digests and all(
        torch.equal(getattr(one, name), getattr(other, name)) for name in NAMES
    )


@pytest.fixture
def short_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot for each step: small ones would all fit into one."""
    monkeypatch.setattr(loader, "SENT_BYTES", 1)


@pytest.mark.parametrize("number", [1, 2, 4])
def test_workers_change_nothing_whether_batches_are_kept_or_dropped(
    two_phases: Plan, number: int
) -> None:
    expected = [batch for step in Loader(two_phases, micro_batch=4) for batch in step]
    dropped = (b for step in Loader(two_phases, micro_batch=4, workers=number) for b in step)
    assert all(equal(one, other) for one, other in zip(dropped, expected, strict=True))
    kept = [b for step in Loader(two_phases, micro_batch=4, workers=number) for b in step]
    assert all(equal(one, other) for one, other in zip(kept, expected, strict=True))


def in_shared_memory(tensor: torch.Tensor) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(word, 16) for word in line.split()[0].split("-"))
        if first <= tensor.data_ptr() < last:
            return line.endswith("(deleted)")
    raise AssertionError("no memory there")


@pytest.mark.usefixtures("short_groups")
def test_what_is_held_is_never_overwritten_and_what_is_dropped_is_not_copied(
    two_phases: Plan,
) -> None:
    expected = [step[0].tokens[2:5, 7:] for step in Loader(two_phases, micro_batch=12)]
    shared, held = [], {}
    for number, (batch,) in enumerate(Loader(two_phases, micro_batch=12, workers=1)):
        shared.append(in_shared_memory(batch.tokens))
        if number in (10, 11, 30, 31):
            held[number] = batch.tokens[2:5, 7:]  # a part of it holds the whole
        if number == 20:
            held.clear()
        assert all(torch.equal(part, expected[kept]) for kept, part in held.items())
    assert len(shared) > 40
    assert all(shared[:10]) and all(shared[23:30]), "nothing else is held: no copy is made"
    assert not any(shared[13:20]), "the worker keeps what it needs"


def test_a_killed_worker_is_an_error_not_a_hang(two_phases: Plan) -> None:
    iterator = iter(Loader(two_phases, micro_batch=4, workers=2))
    next(iterator)
    for child in processes():
        assert child.pid
        os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(RunError, match="worker died"):
        for _ in iterator:
            pass


def test_workers_end_with_their_iterator(two_phases: Plan) -> None:
    iterator: Iterator[list[Batch]] = iter(Loader(two_phases, micro_batch=4, workers=2))
    next(iterator)
    assert processes()
    iterator.close()  # type: ignore[attr-defined]
    wait_until(lambda: not processes())


READER = """
import os, sys, time
from headrace.dataplane.loader.loader import Loader
from headrace.dataplane.order.plan import Plan

if __name__ == "__mp_main__":  # a worker that is about to begin
    os.write(1, b"%d\\n" % os.getpid())  # in one piece: the other one writes there, too
    time.sleep(1)
elif __name__ == "__main__":
    iterator = iter(Loader(Plan.load(sys.argv[1]), micro_batch=4, workers=2))
    next(iterator)
    sys.stdin.read()
"""


@pytest.mark.parametrize("end", ["exit", "kill", "interrupt"])
def test_a_consumer_that_ends_leaves_nothing_behind(
    two_phases: Plan, tmp_path: Path, end: str
) -> None:
    two_phases.save(tmp_path / "plan.json")
    (tmp_path / "reader.py").write_text(READER)
    consumer = subprocess.Popen(
        [sys.executable, tmp_path / "reader.py", tmp_path / "plan.json"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    assert consumer.stdin and consumer.stdout and consumer.stderr
    children = [int(consumer.stdout.readline()) for _ in range(2)]
    if end == "exit":
        consumer.stdin.close()
    elif end == "kill":
        consumer.kill()
    else:
        os.killpg(consumer.pid, signal.SIGINT)  # as a terminal does: the workers get it, too
    code, said = consumer.wait(300), consumer.stderr.read()
    wait_until(lambda: not any(Path(f"/proc/{child}").exists() for child in children))
    if end == "interrupt":
        assert said.count("Traceback") == 1 and "KeyboardInterrupt" in said, said
    else:
        assert said == "" and code == (0 if end == "exit" else -signal.SIGKILL)
