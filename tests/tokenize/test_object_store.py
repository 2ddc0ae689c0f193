"""Builds from and to s3://, with servers that are slow, throttled, killed or disconnected."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest
from support.data.corpora import ONE, read_dataset, snapshot, texts, write_jsonl
from support.stores.faulty_store import FAULTS, FaultyStore, Relay, at_times
from support.stores.moto import serve_bucket
from support.stores.swift import Swift, install

from headrace.console.errors import StorageError
from headrace.dataplane.datasets import manifest
from headrace.dataplane.storage import storage
from headrace.tokenize.builder.build import BuildConfig, build
from headrace.tokenize.card import card
from headrace.tokenize.chat.config import ChatConfig
from headrace.tokenize.contamination import ContaminationConfig, find_contamination
from headrace.tokenize.corpus.evaluations import EvaluationConfig
from headrace.tokenize.neardup.find import NeardupConfig, find_neardups
from headrace.tokenize.sources.fields import KeptField
from headrace.tokenize.sources.format import SourceConfig
from headrace.tokenize.views.pack import PackConfig, pack
from headrace.tokenize.views.select import SelectConfig, select


@pytest.fixture(autouse=True)
def forget_connections() -> Iterator[None]:
    """fsspec caches file systems: each test needs a connection to its own server."""
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    yield
    fsspec.get_filesystem_class("s3").clear_instance_cache()


@pytest.fixture
def moto(monkeypatch: pytest.MonkeyPatch) -> int:
    return serve_bucket(monkeypatch, "data")


@pytest.fixture
def faulty(
    moto: int, monkeypatch: pytest.MonkeyPatch, set_request_policy: Callable[..., None]
) -> Iterator[FaultyStore]:
    """Send all requests through a proxy; only headrace retries, and with short pauses."""
    impatient = {"read_timeout": 1, "retries": {"max_attempts": 0}}
    monkeypatch.setitem(fsspec.config.conf, "s3", {"config_kwargs": impatient})
    monkeypatch.setattr(fsspec.get_filesystem_class("s3"), "retries", 1)
    set_request_policy(first_pause=0.001)
    with FaultyStore(moto) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.server_port}")
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        yield proxy


@pytest.fixture
def swift(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Swift]]:
    assert request.config.cache is not None
    programs = install(request.config.cache.mkdir("swift"))
    started: list[Swift] = []

    def start(**options: int) -> Swift:
        server = Swift(programs, tmp_path / "swift", **options)
        started.append(server)
        server.start()
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        fsspec.filesystem("s3").mkdir("data")
        return server

    yield start
    for server in started:
        server.stop(signal.SIGKILL)


def upload(corpus: Path) -> None:
    fsspec.filesystem("s3").put(str(corpus), "data/corpus", recursive=True)


def download(url: str) -> dict[str, bytes]:
    return {name: storage.read(storage.join(url, name)) for name in storage.list_files(url)}


def config(inputs: str, out: str, **options: object) -> BuildConfig:
    values = {"tokenizer": "byte", "slice_size": 30_000, "shard_size": 25_000, "engine": ONE}
    return BuildConfig(inputs=(inputs,), out=out, **{**values, **options})  # type: ignore[arg-type]


def test_a_build_on_an_object_store(corpus: Path, tmp_path: Path, moto: int) -> None:
    options: dict[str, object] = {"shuffle": 1, "dedup": "exact", "splits": {"val": 0.1}}
    options["shard_size"] = 100_000
    upload(corpus)
    build(config("s3://data/corpus", "s3://data/out", **options))
    before = download("s3://data/out")
    assert not [name for name in before if "work" in name]
    result = read_dataset("s3://data/out/train")
    assert result[0][0].file.startswith("s3://data/corpus/")
    build(config(str(corpus), str(tmp_path / "local"), **options))
    held = read_dataset(tmp_path / "local" / "train")
    assert sorted(text for _, text, _ in result) == sorted(text for _, text, _ in held)
    build(config("s3://data/corpus", "s3://data/out", **options))
    assert download("s3://data/out") == before


@pytest.mark.parametrize("options", [{}, {"shuffle": 1, "shuffle_memory": 100_000}])
def test_object_store_and_disk_get_equal_datasets(
    corpus: Path, tmp_path: Path, moto: int, options: dict[str, object]
) -> None:
    build(config(str(corpus), "s3://data/out", **options))
    build(config(str(corpus), str(tmp_path / "out"), **options))
    assert download("s3://data/out") == snapshot(tmp_path / "out")


def document_steps(root: str) -> list[object]:
    """Run the steps on documents in a folder or bucket with the folder `corpus`; return results
    that do not depend on the place."""
    inputs, talks = f"{root}/corpus/0.jsonl", f"{root}/corpus/talks.jsonl"
    near = find_neardups(
        NeardupConfig(inputs=(inputs,), out=f"{root}/drop.parquet", slice_size=30_000, engine=ONE)
    )
    evaluations = EvaluationConfig(evaluations=(f"{root}/corpus/3.jsonl",), ngram=4)
    build(
        config(
            inputs,
            f"{root}/documents",
            source=SourceConfig(keep=(KeptField(name="name"),)),
            drop=(f"{root}/drop.parquet",),
            decontaminate=evaluations,
        )
    )
    build(config(talks, f"{root}/talks", chat=ChatConfig(template="chatml")))
    chosen = select(
        SelectConfig(
            dataset=f"{root}/documents", where="name < '0.jsonl#7'", out=f"{root}/view", engine=ONE
        )
    )
    packed = pack(PackConfig(dataset=f"{root}/view", length=512, out=f"{root}/packed", engine=ONE))
    result = find_contamination(
        ContaminationConfig(dataset=f"{root}/documents", evaluations=evaluations, engine=ONE)
    )
    return [
        (near.documents, near.duplicates, near.clusters),
        (chosen.documents, chosen.tokens, packed.documents, packed.tokens),
        len(result.findings),
        *(read_texts(f"{root}/{name}") for name in ("documents", "view", "talks")),
        re.sub(r"`[0-9a-f]{64}`", "", card(f"{root}/talks")).replace(root, ""),
    ]


def read_texts(url: str) -> list[str]:
    return [text for _, text, _ in read_dataset(url)]


def test_steps_on_documents_give_equal_results_on_an_object_store(
    tmp_path: Path, moto: int
) -> None:
    corpus = tmp_path / "corpus"
    plain = [text for text in texts(100, seed=3) if text]
    write_jsonl(corpus / "0.jsonl", [*plain, *plain[:10]])
    write_jsonl(corpus / "3.jsonl", [plain[50]])
    turns = [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "because"}]
    (corpus / "talks.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    upload(corpus)
    on_disk, on_store = document_steps(str(tmp_path)), document_steps("s3://data")
    assert on_store == on_disk


def test_a_missing_bucket_is_an_error(corpus: Path, moto: int) -> None:
    with pytest.raises(StorageError, match="s3://nowhere/out"):
        build(config(str(corpus), "s3://nowhere/out"))


def test_builds_survive_every_connection_fault(
    corpus: Path, tmp_path: Path, faulty: FaultyStore, moto: int
) -> None:
    """Inject every fault repeatedly; at each fault, readers see only complete files."""
    upload(corpus)
    build(config("s3://data/corpus", "s3://data/whole"))
    direct = fsspec.filesystem("s3", client_kwargs={"endpoint_url": f"http://127.0.0.1:{moto}"})
    faults = at_times(list(FAULTS), every=3)

    def choose(request: Relay) -> str | None:
        fault = faults(request)
        if fault is not None:
            direct.invalidate_cache()
            for name in direct.find("data/out/shards"):
                assert direct.cat_file(name) == direct.cat_file(name.replace("out", "whole"))
            assert direct.exists("data/out/shards") or not direct.exists("data/out/manifest.json")
        return fault

    faulty.choose = choose
    build(config("s3://data/corpus", "s3://data/out"))
    assert download("s3://data/out") == download("s3://data/whole")
    assert len(faulty.met) == len(FAULTS) and min(faulty.met.values()) > 1


def test_an_interrupted_multipart_upload(
    faulty: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection breaks within a part, or after the upload, before the answer arrives."""
    s3 = fsspec.get_filesystem_class("s3")
    monkeypatch.setattr(s3._pipe_file, "__defaults__", (5 << 20, None, "overwrite"))
    old, new = os.urandom(11 << 20), os.urandom(11 << 20)
    storage.write("s3://data/file", old)
    for mark, fault in (("partNumber=2", "cut upload"), ("?uploadId", "lost answer")):
        faults = iter([fault])
        faulty.choose = lambda request, mark=mark, faults=faults: (
            next(faults, None) if mark in request.path and request.command != "DELETE" else None
        )
        storage.write("s3://data/file", new)
        assert faulty.met[fault] == 1
        assert storage.read("s3://data/file") == new
    faulty.choose = lambda request: "cut upload" if "partNumber" in request.path else None
    with pytest.raises(StorageError, match="cannot write s3://data/file"):
        storage.write("s3://data/file", old)
    assert storage.read("s3://data/file") == new


def test_expired_credentials_are_read_again(
    corpus: Path, tmp_path: Path, faulty: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys are renewed in their file during a build, or by a user after the build failed."""
    file = tmp_path / "credentials"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    good = 0

    def renew() -> None:
        file.write_text(f"[default]\naws_access_key_id = key{good}\naws_secret_access_key = x\n")

    def choose(request: Relay) -> str | None:
        nonlocal good
        if request.command == "PUT" and "/tables/" in request.path and good % 2 == 0:
            good += 1
            if agent:
                renew()
        return None if f"key{good}/" in request.headers["Authorization"] else "expired"

    agent = True
    renew()
    faulty.choose = choose
    build(config(str(corpus / "2.jsonl"), "s3://data/out"))
    assert faulty.met["expired"] == 1
    whole = download("s3://data/out")
    good, agent = 2, False
    renew()
    with pytest.raises(StorageError, match="the credentials have expired") as caught:
        build(config(str(corpus / "2.jsonl"), "s3://data/again"))
    assert "run the same command again" in str(caught.value.hint)
    renew()
    for name in storage.list_files(
        "s3://data/again/work/claims"
    ):  # the failed build could not remove its lock
        storage.delete(f"s3://data/again/work/claims/{name}")
    build(config(str(corpus / "2.jsonl"), "s3://data/again"))
    assert download("s3://data/again") == whole


@pytest.mark.server
def test_swift_with_throttled_writes(
    corpus: Path, tmp_path: Path, swift: Callable[..., Swift]
) -> None:
    swift(writes=8)
    build(config(str(corpus), str(tmp_path / "local")))
    upload(corpus)
    began = time.monotonic()
    build(config("s3://data/corpus", "s3://data/mirror"))
    assert time.monotonic() - began > 2, "the server did not throttle"
    build(config(str(corpus), "s3://data/out"))
    assert download("s3://data/out") == snapshot(tmp_path / "local")


@pytest.mark.server
def test_wrong_credentials_are_an_error(
    corpus: Path, swift: Callable[..., Swift], monkeypatch: pytest.MonkeyPatch
) -> None:
    swift()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    with pytest.raises(StorageError, match="access is denied"):
        build(config(str(corpus), "s3://data/out"))


@pytest.mark.server
def test_a_server_restart_during_a_build(tmp_path: Path, swift: Callable[..., Swift]) -> None:
    """The build waits for the server and produces the same bytes."""
    for number in range(3):
        write_jsonl(tmp_path / "corpus" / f"{number}.jsonl", texts(1500, seed=number))
    server = swift()
    build(config(str(tmp_path / "corpus"), str(tmp_path / "local")))
    upload(tmp_path / "corpus")
    stop = threading.Event()

    def trouble() -> None:
        for _ in range(3):
            if stop.wait(2.5):
                return
            server.stop(signal.SIGKILL)
            time.sleep(1)
            server.start()

    thread = threading.Thread(target=trouble)
    thread.start()
    try:
        build(config(str(tmp_path / "corpus"), "s3://data/out"))
        build(config("s3://data/corpus", "s3://data/mirror"))
    finally:
        stop.set()
        thread.join()
    assert download("s3://data/out") == snapshot(tmp_path / "local")
    expected = [text for _, text, _ in read_dataset(tmp_path / "local")]
    assert [text for _, text, _ in read_dataset("s3://data/mirror")] == expected


@pytest.mark.server
def test_a_build_killed_during_uploads(tmp_path: Path, swift: Callable[..., Swift]) -> None:
    corpus = write_jsonl(tmp_path / "corpus.jsonl", texts(20_000))
    server = swift()
    build(config(str(corpus), str(tmp_path / "local"), slice_size=64 << 20, shard_size=300_000))
    command = [
        *(sys.executable, "-c", "from headrace.tokenize.cli import main; main()", "build"),
        *(str(corpus), "--tokenizer", "byte", "--shard-size", "300000", "--workers", "1"),
        *("--out", "s3://data/out"),
    ]
    environment = {**os.environ, **server.environment}
    for _ in range(3):
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        time.sleep(3)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if storage.exists("s3://data/out/manifest.json"):
            manifest.load("s3://data/out")
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert download("s3://data/out") == snapshot(tmp_path / "local")
