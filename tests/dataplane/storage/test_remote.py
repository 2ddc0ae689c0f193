"""Stores that fail for a while, refuse requests, or accept no data."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from headrace.console.errors import MissingError, StorageError
from headrace.dataplane.storage import remote, storage


class Flaky(MemoryFileSystem):
    """Raises the listed failures before it answers."""

    protocol = "flaky"
    failures: ClassVar[list[Exception]] = []

    def cat_file(self, path: str, **options: object) -> bytes:
        if self.failures:
            raise self.failures.pop()
        return b"data"


@pytest.fixture
def flaky(set_request_policy: Callable[..., None]) -> type[Flaky]:
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    set_request_policy(first_pause=0.001, max_pause=0.002)
    Flaky.failures = []
    return Flaky


def test_transient_errors_are_retried(flaky: type[Flaky]) -> None:
    flaky.failures = [TimeoutError(), ConnectionResetError(), OSError("503 SlowDown")]
    assert storage.read("flaky://x") == b"data"
    assert not flaky.failures


def test_permanent_errors_are_raised(flaky: type[Flaky]) -> None:
    flaky.failures = [TimeoutError("no answer")] * 50
    with pytest.raises(StorageError, match=r"flaky://x: no answer"):
        storage.read("flaky://x")
    assert len(flaky.failures) == 50 - remote.POLICY.attempts
    flaky.failures = [PermissionError()] * 3
    with pytest.raises(StorageError, match="access is denied"):
        storage.read("flaky://x")
    assert len(flaky.failures) == 1  # one more request, with freshly loaded credentials


def test_a_refused_connection_is_an_error_at_once_where_no_server_was(flaky: type[Flaky]) -> None:
    refused = ConnectionRefusedError(111, "Connection refused")
    flaky.failures = [refused] * 3
    with (
        pytest.raises(StorageError, match="no server answers there") as caught,
        remote.first_requests(),
    ):
        storage.read("flaky://x")
    assert len(flaky.failures) == 2 and "the host and the port" in str(caught.value.hint)
    assert storage.read("flaky://x") == b"data"  # a server that is restarted
    flaky.failures = [TimeoutError(), ConnectionResetError()]
    with remote.first_requests():  # a server that is busy
        assert storage.read("flaky://x") == b"data"


def test_botocore_is_not_left_to_ask_a_port_without_a_server(
    monkeypatch: pytest.MonkeyPatch, no_such_host: list[str]
) -> None:
    monkeypatch.undo()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free.getsockname()[1]}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "test")
        with pytest.raises(StorageError, match="no server answers there") as caught:
            storage.check_writable("s3://bucket/file")
    assert "Could not connect" not in str(caught.value.__cause__)  # botocore's, after five tries


@pytest.fixture
def no_such_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A name server that knows no host: an S3 endpoint, and the names that were asked for."""
    asked = []

    def refuse(host: str, *_: object, **__: object) -> None:
        asked.append(host)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://store.invalid:9000")
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    s3 = fsspec.get_filesystem_class("s3")
    s3.clear_instance_cache()
    yield asked
    s3.clear_instance_cache()


def test_an_endpoint_that_does_not_exist_is_an_error_at_once(no_such_host: list[str]) -> None:
    """botocore asks five times, with pauses, and says nothing."""
    for act in (storage.read, storage.exists, storage.size):
        with pytest.raises(StorageError, match=r"there is no host (bucket\.)?store\.inv") as caught:
            act("s3://bucket/file")
        assert "AWS_ENDPOINT_URL" in str(caught.value)
    assert len(no_such_host) == 3, "each is asked for once"


def test_a_proxy_resolves_names_by_itself(
    no_such_host: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    remote._resolve("http://store.invalid:9000")
    assert not no_such_host


def test_a_write_to_a_stalled_store_times_out(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    set_request_policy: Callable[..., None],
) -> None:
    """The server accepts connections and reads nothing; TCP alone would not give up."""
    set_request_policy(
        attempts=2, first_pause=0.001, stall_seconds=0.5, min_bytes_per_second=1 << 30
    )
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    source = tmp_path / "large"
    source.write_bytes(bytes(16 << 20))
    s3 = fsspec.get_filesystem_class("s3")
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        s3.clear_instance_cache()
        try:
            for write in (
                lambda: storage.write("s3://bucket/file", source.read_bytes()),
                lambda: storage.put(source, "s3://bucket/file"),
            ):
                with pytest.raises(StorageError, match="s3://bucket/file: timed out"):
                    write()
        finally:
            s3.clear_instance_cache()
    assert source.exists()


def test_missing_credentials_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    exceptions = pytest.importorskip("botocore.exceptions")

    def refuse(self: MemoryFileSystem, path: str, data: bytes) -> None:
        raise exceptions.NoCredentialsError

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", refuse)
    with pytest.raises(StorageError, match="credentials are missing") as caught:
        storage.write("memory://x/y", b"")
    assert "AWS_ACCESS_KEY_ID" in str(caught.value.hint)


def test_an_unknown_scheme_is_named() -> None:
    with pytest.raises(MissingError, match="nonsense"):
        storage.read("nonsense://x/y")
