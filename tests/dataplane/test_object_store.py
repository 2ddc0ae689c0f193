"""Training rows from s3://, served by a local S3 server."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from moto.server import ThreadedMotoServer
from small_data import plan_of, random_documents, write_dataset

from headrace.console.errors import IntegrityError, StorageError
from headrace.dataplane.datasets.cache import Cache
from headrace.dataplane.datasets.dataset import Dataset
from headrace.dataplane.loader.loader import Loader
from headrace.dataplane.order.plan import Plan
from headrace.dataplane.storage import storage


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    reset = urllib.request.Request(f"http://{host}:{port}/moto-api/reset", method="POST")
    urllib.request.urlopen(reset).close()  # the state outlives one server
    fsspec.filesystem("s3").mkdir("rows")
    yield "s3://rows"
    server.stop()
    fsspec.get_filesystem_class("s3").clear_instance_cache()


DOCUMENTS = random_documents(5, 500, longest=3000)


def plan_over(url: str) -> Plan:
    return plan_of(
        {
            "chunk": 65_536,
            "window": 2,
            "sources": {"one": {"data": url}},
            "phases": {
                "all": {"tokens": 500_000, "seq_len": 256, "batch": 8192, "weights": {"one": 1}}
            },
        }
    )


def digests(loader: Loader) -> list[bytes]:
    return [digest for step in loader for batch in step for digest in batch.digests]


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_from_a_bucket_equal_local_ones(bucket: str, tmp_path: Path, workers: int) -> None:
    write_dataset(f"{bucket}/web", DOCUMENTS)
    write_dataset(str(tmp_path / "local"), DOCUMENTS)
    expected = digests(Loader(plan_over(str(tmp_path / "local")), micro_batch=4))
    cache = Cache(tmp_path / "cache")
    loader = Loader(plan_over(f"{bucket}/web"), micro_batch=4, workers=workers, cache=cache)
    assert digests(loader) == expected
    needed = sum(shard.size for shard in Dataset(f"{bucket}/web").shards)
    held = sum(path.stat().st_size for path in cache.folder.root.glob("*/[0-9]*"))
    assert held <= needed
    if not workers:
        assert cache.fetched_bytes == held


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("damage", ["flip", "truncate", "append", "remove"])
def test_a_damaged_object_is_named(bucket: str, tmp_path: Path, damage: str, workers: int) -> None:
    write_dataset(f"{bucket}/web", DOCUMENTS)
    plan = plan_over(f"{bucket}/web")
    name = Dataset(f"{bucket}/web").shards[1].name
    where = storage.join(bucket, "web", name)
    data = bytearray(storage.read(where))
    data[len(data) // 2] ^= 1
    if damage == "flip":
        storage.write(where, bytes(data))
    elif damage == "truncate":
        storage.write(where, bytes(data[: len(data) // 2]))
    elif damage == "append":
        data[len(data) // 2] ^= 1
        storage.write(where, bytes(data) + b"x")
    else:
        storage.delete(where)
    kind = StorageError if damage == "remove" else IntegrityError
    with pytest.raises(kind, match=name):
        digests(Loader(plan, micro_batch=4, workers=workers, cache=Cache(tmp_path / "cache")))


def test_a_wrong_secret_is_named(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StorageError) as caught:
        storage.read("s3://another/file")
    assert "s3://another/file" in str(caught.value)
