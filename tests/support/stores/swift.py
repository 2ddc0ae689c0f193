"""An S3 server for tests: OpenStack Swift with its s3api, one node on 127.0.0.1.

It is installed once, into a folder that pytest keeps between runs. It can be killed by SIGKILL and
restarted on the same data, and it can throttle requests.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from support.ranks.ports import free_ports

PACKAGES = ["liberasurecode1", "liberasurecode-dev", "memcached"]
SERVERS = ("account", "container", "object")

PIPELINE = (
    "catch_errors gatekeeper healthcheck cache listing_formats s3api tempauth {throttle} copy bulk "
    "slo dlo versioned_writes symlink proxy-server"
)
PROXY = """
[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
workers = 2
user = {user}
swift_dir = {etc}
log_address = {run}/nolog
[pipeline:main]
pipeline = {pipeline}
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
allow_account_management = true
[filter:tempauth]
use = egg:swift#tempauth
user_test_tester = testing .admin
[filter:s3api]
use = egg:swift#s3api
location = us-east-1
s3_acl = false
[filter:ratelimit]
use = egg:swift#ratelimit
clock_accuracy = 1000
max_sleep_time_seconds = 0.1
log_sleep_time_seconds = 0
rate_buffer_seconds = 1
container_ratelimit_0 = {writes}
[filter:cache]
use = egg:swift#memcache
memcache_servers = 127.0.0.1:{cache}
[filter:versioned_writes]
use = egg:swift#versioned_writes
allow_object_versioning = true
"""
PLAIN_FILTERS = (
    "catch_errors",
    "gatekeeper",
    "healthcheck",
    "listing_formats",
    "copy",
    "bulk",
    "slo",
    "dlo",
    "symlink",
)
SERVER = """
[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
workers = 1
user = {user}
swift_dir = {etc}
devices = {devices}
mount_check = false
disable_fallocate = true
log_address = {run}/nolog
recon_cache_path = {run}
[pipeline:main]
pipeline = {name}-server
[app:{name}-server]
use = egg:swift#{name}
"""


def install(folder: Path) -> Path:
    """Install Swift in its own environment; return its programs, or skip the test."""
    programs = folder / "bin"
    if (folder / "done").exists():
        return programs
    if shutil.which("memcached") is None or not list(Path("/usr/lib").glob("*/liberasurecode.so")):
        if os.geteuid() or shutil.which("apt-get") is None:
            pytest.skip(f"Swift needs {', '.join(PACKAGES)}, which only root can install")
        run = subprocess.run(
            ["apt-get", "install", "-y", "-q", "--no-install-recommends", *PACKAGES],
            capture_output=True,
            text=True,
        )
        if run.returncode:
            pytest.skip(f"Swift's libraries cannot be installed here: {run.stderr[-300:]}")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, capture_output=True)
    run = subprocess.run(
        [programs / "pip", "install", "-q", "swift"], capture_output=True, text=True
    )
    if run.returncode:
        pytest.skip(f"Swift cannot be installed here: {run.stderr[-300:]}")
    (folder / "done").touch()
    return programs


class Swift:
    """A server with its data in `root`. It throttles above `writes` per second and bucket."""

    def __init__(self, programs: Path, root: Path, *, writes: int | None = None) -> None:
        self.programs, self.root, self.writes = programs, root, writes
        self.port = free_ports(5)
        self.processes: list[subprocess.Popen[bytes]] = []
        self._configure()

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "test:tester",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def start(self) -> None:
        etc = self.root / "etc"
        cache = ["memcached", "-l", "127.0.0.1", "-p", str(self.port + 4), "-m", "64"]
        self._spawn([*cache, "-u", os.environ.get("USER", "root")])
        for name in SERVERS:
            self._spawn([self.programs / f"swift-{name}-server", etc / f"{name}.conf"])
        self._spawn([self.programs / "swift-proxy-server", etc / "proxy.conf"])
        deadline = time.monotonic() + 60
        while not self._answers():
            if time.monotonic() > deadline:
                self.stop(signal.SIGKILL)
                raise RuntimeError(f"Swift does not respond; see {self.root}/*.log")
            time.sleep(0.1)

    def stop(self, with_signal: signal.Signals = signal.SIGTERM) -> None:
        for process in self.processes:
            try:
                os.killpg(process.pid, with_signal)
            except ProcessLookupError:
                continue
        for process in self.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self.processes = []

    def _spawn(self, command: list[str | Path]) -> None:
        with (self.root / f"{Path(command[0]).name}.log").open("ab") as log:
            self.processes.append(
                subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
            )

    def _answers(self) -> bool:
        try:
            for number in range(1, 5):
                socket.create_connection(("127.0.0.1", self.port + number), 1).close()
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.port}/healthcheck", timeout=2
            ) as r:
                return bool(r.read() == b"OK")
        except (OSError, urllib.error.URLError):
            return False

    def _configure(self) -> None:
        etc, run, devices = self.root / "etc", self.root / "run", self.root / "devices"
        for folder in (etc, run, devices / "d1"):
            folder.mkdir(parents=True)
        (etc / "swift.conf").write_text(
            "[swift-hash]\nswift_hash_path_prefix = local\nswift_hash_path_suffix = test\n"
            "[storage-policy:0]\nname = single\ndefault = yes\n"
        )
        values = {"etc": etc, "run": run, "devices": devices}
        values["user"] = Path.home().owner()
        for number, name in enumerate(SERVERS, start=1):
            port = self.port + number
            (etc / f"{name}.conf").write_text(SERVER.format(name=name, port=port, **values))
            builder = self.programs / "swift-ring-builder"
            for words in (
                ["create", "4", "1", "0"],
                ["add", f"r1z1-127.0.0.1:{port}/d1", "1"],
                ["rebalance", "1"],
            ):
                file = f"{name}.builder"
                subprocess.run([builder, file, *words], cwd=etc, capture_output=True, check=True)
        pipeline = PIPELINE.format(throttle="ratelimit" if self.writes else "")
        text = PROXY.format(
            port=self.port,
            cache=self.port + 4,
            pipeline=pipeline,
            writes=self.writes or 0,
            **values,
        )
        text += "".join(f"[filter:{name}]\nuse = egg:swift#{name}\n" for name in PLAIN_FILTERS)
        (etc / "proxy.conf").write_text(text)
