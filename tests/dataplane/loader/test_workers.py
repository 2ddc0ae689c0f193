from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import chain
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch
from small_data import plan_of, random_documents, write_dataset

from headrace.console.errors import RunError
from headrace.dataplane.loader import fork_server, loader
from headrace.dataplane.loader.loader import Batch, Loader
from headrace.dataplane.order.plan import Plan

NAMES = ("tokens", "targets", "weights", "cu_seqlens")


def children(parent: int | str) -> list[int]:
    """Return the process numbers of a process's children that are our servers and workers."""
    found = []
    for thread in Path(f"/proc/{parent}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            for child in (thread / "children").read_text().split():
                if b"headrace-loader" in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(int(child))
    return found


def processes(consumer: int | str = "self") -> list[int]:
    """Return the process numbers of a consumer's workers."""
    return [worker for server in children(consumer) for worker in children(server)]


def wait_until(condition: object) -> None:
    deadline = time.monotonic() + 300
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def equal(left: Batch, right: Batch) -> bool:
    return left.digests == right.digests and all(
        torch.equal(getattr(left, name), getattr(right, name)) for name in NAMES
    )


@pytest.fixture
def short_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step per slot; otherwise all steps fit into one slot."""
    monkeypatch.setattr(loader, "SENT_BYTES", 1)


@pytest.mark.parametrize("number", [1, 2, 4])
def test_batches_do_not_depend_on_workers_whether_kept_or_dropped(
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
def test_held_batches_are_never_overwritten_and_dropped_ones_not_copied(
    two_phases: Plan,
) -> None:
    expected = [step[0].tokens[2:5, 7:] for step in Loader(two_phases, micro_batch=12)]
    shared, held = [], {}
    for number, (batch,) in enumerate(Loader(two_phases, micro_batch=12, workers=1)):
        shared.append(in_shared_memory(batch.tokens))
        if number in (10, 11, 30, 31):
            held[number] = batch.tokens[2:5, 7:]  # a view holds the whole slot
        if number == 20:
            held.clear()
        assert all(torch.equal(part, expected[kept]) for kept, part in held.items())
    assert len(shared) > 40
    assert all(shared[:10]) and all(shared[23:30]), "no other slot is held: nothing is copied"
    assert not any(shared[13:20]), "the worker keeps the slots that it needs"


def test_a_killed_worker_is_an_error_not_a_hang(two_phases: Plan) -> None:
    iterator = iter(Loader(two_phases, micro_batch=4, workers=2))
    next(iterator)
    assert len(processes()) == 2
    for child in processes():
        os.kill(child, signal.SIGKILL)
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
import sys
from headrace.dataplane.loader.loader import Loader
from headrace.dataplane.order.plan import Plan

iterator = iter(Loader(Plan.load(sys.argv[1]), micro_batch=4, workers=2))
next(iterator)
print("begun", flush=True)
sys.stdin.read()
"""
"""It has no guard: workers do not import it."""


@pytest.mark.parametrize("end", ["exit", "kill", "interrupt", "kill at the start"])
def test_workers_end_with_their_consumer(two_phases: Plan, tmp_path: Path, end: str) -> None:
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
    wait_until(lambda: len(processes(consumer.pid)) == 2)
    children = processes(consumer.pid)
    if end != "kill at the start":
        assert consumer.stdout.readline() == "begun\n"
    if end == "exit":
        consumer.stdin.close()
    elif end.startswith("kill"):
        consumer.kill()
    else:
        os.killpg(consumer.pid, signal.SIGINT)  # as a terminal does: the workers receive it as well
    code, stderr = consumer.wait(300), consumer.stderr.read()
    wait_until(lambda: not any(Path(f"/proc/{child}").exists() for child in children))
    if end == "interrupt":
        assert stderr.count("Traceback") == 1 and "KeyboardInterrupt" in stderr, stderr
    else:
        assert stderr == "" and code == (0 if end == "exit" else -signal.SIGKILL)


def test_workers_of_all_loaders_are_forks_of_one_process(two_phases: Plan) -> None:
    first = iter(Loader(two_phases, micro_batch=4, workers=2))
    second = iter(Loader(two_phases, micro_batch=4, workers=1))
    next(first), next(second)
    (server,) = children("self")
    assert len(children(server)) == 3
    first.close(), second.close()  # type: ignore[attr-defined]
    wait_until(lambda: not processes())
    next(iter(Loader(two_phases, micro_batch=4, workers=1)))
    assert children("self") == [server]


def test_a_killed_server_is_replaced(two_phases: Plan) -> None:
    expected = [batch.digests for step in Loader(two_phases, micro_batch=4) for batch in step]
    iterator = iter(Loader(two_phases, micro_batch=4, workers=1))
    seen = [batch.digests for batch in next(iterator)]
    for server in children("self"):
        os.kill(server, signal.SIGKILL)
    again = Loader(two_phases, micro_batch=4, workers=2)
    assert [batch.digests for step in again for batch in step] == expected
    seen += [batch.digests for step in iterator for batch in step]
    assert seen == expected, "workers outlive it"


def test_workers_know_the_folder_of_the_consumer(
    two_phases: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of now, not that in which the server was started."""
    next(iter(Loader(two_phases, micro_batch=4, workers=1)))
    monkeypatch.chdir(tmp_path)
    write_dataset("data", random_documents(5, 100))
    phase = {"tokens": 6000, "seq_len": 64, "batch": 1024, "weights": {"one": 1}}
    plan = plan_of({"sources": {"one": {"data": "data"}}, "phases": {"all": phase}})
    alone, helped = (Loader(plan, micro_batch=4, workers=number) for number in (0, 1))
    assert all(equal(*pair) for pair in zip(chain(*alone), chain(*helped), strict=True))


def test_workers_write_where_the_consumer_writes_now(
    two_phases: Plan, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    next(iter(Loader(two_phases, micro_batch=4, workers=1)))
    ours, theirs = Pipe()
    before = os.dup(1)
    with (tmp_path / "out").open("w+b") as out, (tmp_path / "memory").open("w+b") as memory:
        os.dup2(out.fileno(), 1)
        try:
            worker = fork_server.start(theirs.fileno(), memory.fileno())
        finally:
            os.dup2(before, 1)
            os.close(before)
    theirs.close()
    ours.send(fork_server.Place.here())
    ours.send(partial(print, "written"))
    assert worker.exit_code() == 0
    assert (tmp_path / "out").read_text().startswith("written") and not capfd.readouterr().out


def test_a_fork_of_the_consumer_leaves_its_workers_alone(two_phases: Plan) -> None:
    iterator = iter(Loader(two_phases, micro_batch=4, workers=1))
    next(iterator)
    before = processes()
    child = os.fork()
    if not child:
        iterator.close()  # type: ignore[attr-defined]
        os._exit(0 if fork_server._current is None else 1)  # it would start another
    assert os.waitpid(child, 0)[1] == 0
    assert processes() == before
    for _ in iterator:
        pass
