"""Two machines that network namespaces stand in for: each has its own interfaces, address, host
name and ports. Files and processes are those of this machine."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

PORT = 29500
"""A port that is free on each new machine."""


class Host:
    """A machine: `name` is its host name, which both machines know."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.name = f"machine{number}"
        self.space = f"headrace-{os.getpid()}-{number}"
        self.link = f"hr{os.getpid()}n{number}"
        self.address = f"10.213.77.{number + 1}"
        self.settings = Path("/etc/netns", self.space)

    def start(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a command on the machine, with its output in a file."""
        named = f'hostname {self.name} && exec "$@"'
        direct = {name: value for name, value in os.environ.items() if "_proxy" not in name.lower()}
        words = ["ip", "netns", "exec", self.space, "unshare", "--uts", "sh", "-c", named, "sh"]
        with log.open("ab") as file:
            return subprocess.Popen(
                [*words, *command],
                env={**direct, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )

    @property
    def processes(self) -> list[int]:
        result = subprocess.run(
            ["ip", "netns", "pids", self.space], capture_output=True, text=True, check=True
        )
        return [int(word) for word in result.stdout.split()]

    def kill(self) -> None:
        """Kill every process of the machine, as a loss of power does."""
        while processes := self.processes:
            for process in processes:
                try:
                    os.kill(process, signal.SIGKILL)
                except ProcessLookupError:
                    continue

    def cut(self) -> None:
        """Take the link of the machine down: what it sends is lost, and nothing arrives."""
        _ip("-n", self.space, "link", "set", self.link, "down")

    def mend(self) -> None:
        """Take the link up again."""
        _ip("-n", self.space, "link", "set", self.link, "up")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Make two machines with a link between them; kill what runs there in the end."""
    hosts = Host(0), Host(1)
    try:
        for host in hosts:
            _ip("netns", "add", host.space)
            host.settings.mkdir(parents=True)
            lines = ["127.0.0.1 localhost", *(f"{host.address} {host.name}" for host in hosts)]
            (host.settings / "hosts").write_text("\n".join(lines) + "\n")
        first, second = hosts
        pair = ("type", "veth", "peer", "name", second.link, "netns", second.space)
        _ip("-n", first.space, "link", "add", first.link, *pair)
        for host in hosts:
            _ip("-n", host.space, "address", "add", f"{host.address}/24", "dev", host.link)
            for link in ("lo", host.link):
                _ip("-n", host.space, "link", "set", link, "up")
        yield hosts
    finally:
        for host in hosts:
            if host.settings.exists():
                host.kill()
                shutil.rmtree(host.settings)
                subprocess.run(["ip", "netns", "del", host.space], check=True)


def can_make_hosts() -> bool:
    """True if this process may make network namespaces: it needs root and iproute2."""
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return False
    space = f"headrace-{os.getpid()}-try"
    result = subprocess.run(["ip", "netns", "add", space], capture_output=True).returncode == 0
    if result:
        subprocess.run(["ip", "netns", "del", space], check=True)
    return result
