"""An S3 server of moto, one for a process: its start and its end take a second."""

from __future__ import annotations

import functools
import urllib.request

import fsspec
import pytest
from moto.server import ThreadedMotoServer

SETTINGS = {
    "AWS_ACCESS_KEY_ID": "a",
    "AWS_SECRET_ACCESS_KEY": "b",
    "AWS_DEFAULT_REGION": "us-east-1",
}


def serve_bucket(monkeypatch: pytest.MonkeyPatch, name: str) -> int:
    """Make the server's only bucket, and let this process use it; returns the server's port."""
    port = _start_server()
    url = f"http://127.0.0.1:{port}"
    for variable, value in {**SETTINGS, "AWS_ENDPOINT_URL": url}.items():
        monkeypatch.setenv(variable, value)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    urllib.request.urlopen(urllib.request.Request(f"{url}/moto-api/reset", method="POST")).close()
    fsspec.filesystem("s3").mkdir(name)
    return port


@functools.cache
def _start_server() -> int:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    return server.get_host_and_port()[1]
