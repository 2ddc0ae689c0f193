"""Training rows from s3://, served by a local S3 server, whose answers may be damaged."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import fsspec
import pytest
from support.data.small_data import plan_of, random_documents, threads_of_loaders, write_dataset
from support.stores.faulty_store import FaultyStore, Relay
from support.stores.moto import serve_bucket

from headrace.console.errors import IntegrityError, StorageError
from headrace.dataplane.datasets import manifest as manifests
from headrace.dataplane.datasets.cache import Cache
from headrace.dataplane.datasets.dataset import Dataset
from headrace.dataplane.loader.loader import Loader
from headrace.dataplane.order.plan import Plan
from headrace.dataplane.storage import remote, s3, storage
from headrace.dataplane.storage.faults import AbsentError
from headrace.dataplane.storage.verified import ANSWERS
from headrace.tokenize.executors import ExecutorConfig
from headrace.tokenize.verify import verify


@pytest.fixture
def bucket(
    monkeypatch: pytest.MonkeyPatch, set_request_policy: Callable[..., None]
) -> Iterator[str]:
    serve_bucket(monkeypatch, "rows")
    set_request_policy(first_pause=0.001)
    yield "s3://rows"
    fsspec.get_filesystem_class("s3").clear_instance_cache()


@pytest.fixture
def faulty(
    bucket: str, monkeypatch: pytest.MonkeyPatch, set_request_policy: Callable[..., None]
) -> Iterator[FaultyStore]:
    """A proxy before the server."""
    set_request_policy(first_pause=0.001, attempts=ANSWERS)
    impatient = {"retries": {"max_attempts": 0}}  # only headrace retries
    monkeypatch.setitem(fsspec.config.conf, "s3", {"config_kwargs": impatient})
    monkeypatch.setattr(fsspec.get_filesystem_class("s3"), "retries", 1)
    port = urlsplit(os.environ["AWS_ENDPOINT_URL"]).port
    assert port is not None
    with FaultyStore(port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.server_port}")
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        yield proxy


DOCUMENTS = random_documents(5, 500, longest=3000)


def plan_over(url: str, tokens: int = 500_000, batch: int = 8192) -> Plan:
    return plan_of(
        {
            "chunk": 65_536,
            "window": 2,
            "sources": {"one": {"data": url}},
            "phases": {
                "all": {"tokens": tokens, "seq_len": 256, "batch": batch, "weights": {"one": 1}}
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
    assert digests(loader) == expected and not threads_of_loaders(60)
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


FEW = DOCUMENTS[:40]
KINDS = {"manifest": "manifest.json", "table": "/tables/", "shard": "/shards/"}


def damage(faulty: FaultyStore, kind: str, fault: str, answers: int = 1 << 30) -> None:
    """Damage the first answers of the store for one kind of file."""
    faults = iter([fault] * answers) if answers < 1 << 30 else None

    def choose(request: Relay) -> str | None:
        if request.command != "GET" or KINDS[kind] not in request.path:
            return None
        return fault if faults is None else next(faults, None)

    faulty.choose = choose


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", ["garbled", "flipped with a checksum"])
def test_a_damaged_answer_is_asked_for_again(
    faulty: FaultyStore, tmp_path: Path, kind: str, fault: str
) -> None:
    write_dataset("s3://rows/web", FEW)
    plan = plan_over("s3://rows/web", 4096, 2048)
    write_dataset(str(tmp_path / "local"), FEW)
    expected = digests(Loader(plan_over(str(tmp_path / "local"), 4096, 2048), micro_batch=4))
    damage(faulty, kind, fault, ANSWERS - 1)
    assert digests(Loader(plan, micro_batch=4, cache=Cache(tmp_path / "cache"))) == expected
    damage(faulty, kind, fault, ANSWERS - 1)
    assert verify("s3://rows/web", ExecutorConfig(workers=1)) == []
    assert faulty.met[fault] == 2 * (ANSWERS - 1)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_wrong_answers_accuse_the_file_and_different_ones_the_way(
    faulty: FaultyStore, tmp_path: Path, kind: str
) -> None:
    write_dataset("s3://rows/web", FEW)
    plan = plan_over("s3://rows/web", 4096, 2048)

    def error() -> IntegrityError:
        with pytest.raises(IntegrityError) as caught:
            digests(Loader(plan, micro_batch=4, cache=Cache(tmp_path / "cache")))
        assert "no dataset" not in str(caught.value)
        return caught.value

    damage(faulty, kind, "flipped")
    repeated = error()
    assert "the same wrong bytes 4 times" in repeated.message and "from a copy" in str(
        repeated.hint
    )
    damage(faulty, kind, "garbled")
    different = error()
    assert "different bytes each time" in different.message and "network" in str(different.hint)
    assert all("s3://rows/web/" in item.message for item in (repeated, different))


def test_a_store_that_fails_is_not_a_missing_dataset(faulty: FaultyStore) -> None:
    write_dataset("s3://rows/web", FEW)
    faulty.choose = lambda request: "failing" if "web" in request.path else None
    with pytest.raises(StorageError, match=r"cannot read s3://rows/web/manifest\.json") as caught:
        manifests.load("s3://rows/web")
    assert "no dataset" not in str(caught.value)
    with pytest.raises(StorageError, match="no dataset at s3://rows/other"):
        manifests.load("s3://rows/other")


@pytest.fixture
def no_fsspec(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("fsspec was asked")

    monkeypatch.setattr(remote, "request", refuse)


def test_obstore_reads_objects_and_parts_of_them(
    bucket: str, request: pytest.FixtureRequest
) -> None:
    data = os.urandom(1000)
    storage.write(f"{bucket}/folder/name", data)
    request.getfixturevalue("no_fsspec")
    for start, end in ((0, None), (10, None), (0, 5), (7, 900), (990, 2000)):
        assert storage.read(f"{bucket}/folder/name", start, end) == data[start:end]
        assert isinstance(storage.view(f"{bucket}/folder/name", start, end), memoryview)  # no copy


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setenv("AWS_PROFILE", "mine"),
        lambda patch: patch.delenv("AWS_SECRET_ACCESS_KEY"),
        lambda patch: patch.setenv("AWS_CONFIG_FILE", __file__),
        lambda patch: patch.setitem(fsspec.config.conf, "s3", {"anon": True}),
        lambda patch: patch.setattr(s3, "_forked", True),
    ],
)
def test_settings_that_obstore_does_not_know_leave_reading_to_fsspec(
    bucket: str, monkeypatch: pytest.MonkeyPatch, change: Callable[[pytest.MonkeyPatch], None]
) -> None:
    storage.write(f"{bucket}/name", b"data")
    assert s3.read(f"{bucket}/name", 0, None) == b"data"
    change(monkeypatch)
    assert s3.read(f"{bucket}/name", 0, None) is None


@pytest.mark.parametrize("fault", ["failing", "expired", "reset"])
def test_what_obstore_cannot_read_is_left_to_fsspec(
    bucket: str, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    storage.write(f"{bucket}/name", b"data")
    port = urlsplit(os.environ["AWS_ENDPOINT_URL"]).port
    assert port is not None
    with FaultyStore(port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.server_port}")
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        from_botocore = []

        def choose(request: Relay) -> str | None:
            is_botocore = "otocore" in request.headers["User-Agent"]
            from_botocore.append(is_botocore)
            return None if is_botocore else fault

        proxy.choose = choose
        assert storage.read(f"{bucket}/name", 1, 3) == b"at"
        assert not from_botocore[0] and from_botocore[-1]
        before = len(from_botocore)
        assert storage.read(f"{bucket}/name") == b"data"
        assert all(from_botocore[before:]), "obstore rests for a minute"


def test_a_missing_object_is_an_error_of_fsspec(bucket: str) -> None:
    with pytest.raises(StorageError, match="the bucket does not exist"):
        storage.read("s3://another/name")
    with pytest.raises(AbsentError, match="does not exist"):
        storage.read(f"{bucket}/name")
