"""Corpora at http:// and https:// URLs, on servers that are limited, faulty or deny access."""

from __future__ import annotations

import datetime
import gzip
import json
import re
import ssl
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.data.corpora import ONE, read_dataset, small_blocks, texts

from headrace.console.errors import InputError, StorageError
from headrace.tokenize.builder.build import BuildConfig, build
from headrace.tokenize.corpus.inputs import find_files
from headrace.tokenize.files.file_hashes import hash_files
from headrace.tokenize.files.web import WebFile
from headrace.tokenize.sources import corpus_format
from headrace.tokenize.sources.format import SourceConfig

DOCUMENTS = texts(300)
LINES = "".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS).encode()


class Handler(BaseHTTPRequestHandler):
    """Serves /MODE/NAME. `ranges` supports byte ranges; `plain` does not; `no-length` sends no
    size; `503`, `reset` and `cut` fail twice; `always-cut` fails always; other numbers are the
    status."""

    protocol_version = "HTTP/1.1"
    folder: Path
    asked: Counter[str]

    def log_message(self, *words: object) -> None:
        pass

    def do_GET(self) -> None:
        _, mode, name = self.path.split("/", 2)
        self.asked[self.path] += 1
        early = self.asked[self.path] in (2, 3)  # the first request checks that the file exists
        if mode.isdigit() and (mode != "503" or early):
            self.answer(int(mode), b"")
        elif mode == "reset" and early:
            self.close_connection = True
        else:
            data = (self.folder / name).read_bytes()
            part, head = data, {"Content-Length": str(len(data))}
            code = 200
            expected = re.match(r"bytes=(\d+)-$", self.headers.get("Range", ""))
            if mode in ("no-length", "plain", "plain-cut", "always-cut") or not expected:
                pass
            else:
                start = int(expected[1])
                code, part = 206, data[start:]
                total = f"bytes {start}-{len(data) - 1}/{len(data)}"
                head = {"Content-Length": str(len(part)), "Content-Range": total}
            if mode == "no-length":
                head = {"Connection": "close"}
            cut = mode == "always-cut" or (mode in ("cut", "plain-cut") and early)
            self.answer(code, part[: len(part) // 2] if cut else part, **head)
            self.close_connection = cut or mode == "no-length"

    def answer(self, code: int, body: bytes, **head: str) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": "0", "ETag": '"1"', **head}.items():
            if not (name == "Content-Length" and "Connection" in head):
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def web(tmp_path: Path, set_request_policy: Callable[..., None]) -> Iterator[str]:
    set_request_policy(first_pause=0.001, max_pause=0.002)
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(LINES))
    (tmp_path / "empty.jsonl").touch()
    pq.write_table(pa.table({"text": DOCUMENTS}), tmp_path / "c.parquet", row_group_size=50)
    kind = type("Mine", (Handler,), {"folder": tmp_path, "asked": Counter()})
    with serving(kind) as server:
        yield f"http://127.0.0.1:{server.server_port}"


class serving:
    def __init__(self, kind: Any, context: ssl.SSLContext | None = None) -> None:
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
        self.server.handle_error = lambda *_: None  # type: ignore[method-assign]
        if context is not None:
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True)

    def __enter__(self) -> ThreadingHTTPServer:
        Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        return self.server

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()


def read(url: str) -> list[str]:
    config = SourceConfig()
    (file,) = find_files([url], config)
    parts = corpus_format(file.format).cut(file, config, 1000)
    result = [block for part in parts for block in corpus_format(file.format).read(part, config)]
    assert not [problem for block in result for problem in block.problems]
    return [text for block in result for text in block.texts]


@pytest.mark.parametrize("name", ["a.jsonl", "b.jsonl.gz"])
@pytest.mark.parametrize(
    "mode", ["ranges", "plain", "no-length", "503", "reset", "cut", "plain-cut"]
)
def test_files_are_read_from_limited_and_faulty_servers(web: str, mode: str, name: str) -> None:
    with small_blocks(1000):
        assert read(f"{web}/{mode}/{name}") == DOCUMENTS


def test_parquet_needs_ranges(web: str) -> None:
    assert read(f"{web}/ranges/c.parquet") == DOCUMENTS
    for mode, message in (
        ("plain", "does not support byte ranges"),
        ("no-length", "does not send its size"),
    ):
        with pytest.raises(InputError, match=message) as caught:
            read(f"{web}/{mode}/c.parquet")
        assert "download" in str(caught.value.hint)


def test_an_empty_file(web: str) -> None:
    assert read(f"{web}/ranges/empty.jsonl") == read(f"{web}/plain/empty.jsonl") == []


def test_missing_and_forbidden_files_are_reported_together(web: str) -> None:
    names = [f"{web}/{code}/a.jsonl" for code in (404, 403, 500)]
    with pytest.raises(InputError, match="3 problems with the inputs") as caught:
        find_files(names, SourceConfig())
    for name, reason in zip(names, ("not exist", "access is denied", "answered 500"), strict=True):
        assert re.search(f"cannot read {name}: .*{reason}", str(caught.value))


def test_a_file_that_always_ends_early_is_an_error(web: str) -> None:
    with pytest.raises(StorageError, match=r"ended (after|before)"):
        read(f"{web}/always-cut/a.jsonl")


def test_an_unreachable_server_is_an_error(set_request_policy: Callable[..., None]) -> None:
    set_request_policy(first_pause=0.001, max_pause=0.002)
    with pytest.raises(StorageError, match="refused"):
        find_files(["http://127.0.0.1:9/a.jsonl"], SourceConfig())


def test_a_changed_file_gets_another_fingerprint(web: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def mark() -> str:
        return (
            hash_files(find_files([f"{web}/ranges/a.jsonl"], SourceConfig())).files[0].fingerprint
        )

    first = mark()
    assert mark() == first
    send = Handler.send_header
    with WebFile(f"{web}/ranges/a.jsonl") as file:
        assert file.read(10) == LINES[:10]
        monkeypatch.setattr(
            Handler,
            "send_header",
            lambda self, name, value: send(self, name, '"2"' if name == "ETag" else value),
        )
        file.seek(20)
        with pytest.raises(InputError, match="changed while it was read"):
            file.read(10)
    assert mark() != first


def certificate(folder: Path) -> Path:
    """Write a self-signed certificate for 127.0.0.1, with its key."""
    import ipaddress

    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    result = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    form = serialization.PrivateFormat.PKCS8
    path = folder / "certificate.pem"
    path.write_bytes(key.private_bytes(pem, form, plain) + result.public_bytes(pem))
    return path


def test_a_build_from_https(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(LINES))
    pem = certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    kind = type("Mine", (Handler,), {"folder": tmp_path, "asked": Counter()})
    with serving(kind, context) as server:
        url = f"https://127.0.0.1:{server.server_port}/ranges/b.jsonl.gz"
        config = BuildConfig(inputs=(url,), out=str(tmp_path / "out"), tokenizer="byte", engine=ONE)
        with pytest.raises(StorageError, match="certificate is not trusted"):
            build(config)
        monkeypatch.setenv("SSL_CERT_FILE", str(pem))
        # From Python 3.12 on, a process keeps the certificates of its first request.
        monkeypatch.setattr("urllib.request._opener", None)
        build(config)
    result = read_dataset(tmp_path / "out")
    assert [text for _, text, _ in result] == DOCUMENTS
    assert result[5][0].file == url
