"""A build on a Ray cluster of two machines, one of which is lost in the middle."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.data.corpora import snapshot, texts, write_jsonl
from support.ranks import hosts
from support.ranks.hosts import Host

from headrace.dataplane.datasets import manifest

pytestmark = [
    pytest.mark.server,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not hosts.can_make_hosts(), reason="network namespaces need root"),
]
PORT = 6379
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}
"""Ray's nodes accept no one without it."""
RAY = (sys.executable, "-c", "from ray.scripts.scripts import main; main()")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    """Two machines with a node of one Ray cluster each."""
    pytest.importorskip("ray")
    with hosts.two_hosts() as machines, tempfile.TemporaryDirectory(prefix="ray") as short:
        head = machines[0]
        places = (
            ["--head", "--port", str(PORT), "--include-dashboard=false", "--temp-dir", short],
            ["--address", f"{head.address}:{PORT}"],
        )
        for machine, place in zip(machines, places, strict=True):
            words = ["start", "--num-cpus", "1", "--node-ip-address", machine.address, *place]
            log = tmp_path / f"{machine.name}.log"
            command = [*RAY, *words, "--object-store-memory", "100000000"]
            started = machine.start(command, log, {**TOKEN, "RAY_USAGE_STATS_ENABLED": "0"})
            assert started.wait(300) == 0, log.read_text()
        yield machines
        for machine in machines:
            machine.kill()


def test_a_lost_node_changes_no_byte(tmp_path: Path, cluster: tuple[Host, Host]) -> None:
    for number in range(16):  # a task each
        write_jsonl(tmp_path / "corpus" / f"{number}.jsonl", texts(400, seed=number))
    head, second_node = cluster
    build = [sys.executable, "-c", "from headrace.tokenize.cli import main; main()", "build"]
    build += [str(tmp_path / "corpus"), "--tokenizer", "byte"]
    build += ["--shard-size", "64Ki", "--shuffle", "1", "--out"]
    local, there = tmp_path / "local", tmp_path / "ray"
    subprocess.run([*build, local], check=True, capture_output=True)
    on_ray = ["--engine", "ray", "--address", f"{head.address}:{PORT}"]
    log = tmp_path / "build.log"
    running = head.start([*build, str(there), *on_ray], log, TOKEN)
    tasks = there / "work" / "tasks"
    while not tasks.exists() or len(list(tasks.iterdir())) < 3:
        assert running.poll() is None, log.read_text()
        time.sleep(0.05)
    assert any(b"ray::" in command_of(process) for process in second_node.processes)
    second_node.kill()
    assert running.poll() is None, "the build ended before the node"
    assert running.wait(900) == 0, log.read_text()
    assert manifest.load(str(there)).documents == 6400
    assert snapshot(there) == snapshot(local)


def command_of(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:  # it has ended
        return b""
