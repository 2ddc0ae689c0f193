"""A small stand-in for the Hugging Face Hub: repositories in memory, with the requests that
`huggingface_hub` sends to read them."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """The running hub: its address, and what was asked of it."""

    endpoint: str
    requests: list[str] = field(default_factory=list)
    sent: int = 0
    """Bytes of files that were sent."""
    faults: list[int] = field(default_factory=list)
    """Status codes of the next answers to requests for files."""


@contextmanager
def hub_of(repositories: Mapping[str, Mapping[str, bytes]]) -> Iterator[Hub]:
    """Serve repositories, such as `datasets/owner/name`, with their files; the branch main and
    COMMIT are their only revisions."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append(f"{self.command} {path}")
            for name, files in repositories.items():
                api = f"/api/{name}" if name.startswith("datasets/") else f"/api/models/{name}"
                if path.startswith(f"/{name}/resolve/{COMMIT}/"):
                    self.send_file(files.get(path.removeprefix(f"/{name}/resolve/{COMMIT}/")))
                elif path in (api, f"{api}/revision/main", f"{api}/revision/{COMMIT}"):
                    self.send_json({"id": name, "sha": COMMIT, "siblings": []})
                elif path.startswith(f"{api}/revision/"):
                    self.refuse(404, "RevisionNotFound")
                elif path.startswith(f"{api}/tree/{COMMIT}"):
                    self.send_json(tree(files, path.removeprefix(f"{api}/tree/{COMMIT}")))
                else:
                    continue
                return
            self.refuse(404, "RepoNotFound")

        do_HEAD = do_GET

        def send_file(self, data: bytes | None) -> None:
            if data is None:
                self.refuse(404, "EntryNotFound")
            elif hub.faults:
                self.refuse(hub.faults.pop(0), "")
            else:
                total, code = len(data), 200
                if asked := self.headers.get("Range"):
                    first, _, last = asked.removeprefix("bytes=").partition("-")
                    data, code = data[int(first) : int(last or total) + 1], 206
                hub.sent += len(data)
                self.answer(code, data, {"ETag": '"x"', "X-Repo-Commit": COMMIT})

        def send_json(self, value: Any) -> None:
            if value is None:
                self.refuse(404, "EntryNotFound")
            else:
                self.answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def refuse(self, code: int, error: str) -> None:
            self.answer(code, b"", {"X-Error-Code": error})

        def answer(self, code: int, data: bytes, headers: Mapping[str, str]) -> None:
            self.send_response(code)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub = Hub(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def tree(files: Mapping[str, bytes], folder: str) -> list[dict[str, Any]] | None:
    """Return the entries below a folder; files of more than 100 bytes are in LFS. None if there is
    no such folder."""
    prefix = folder.strip("/") + "/" if folder.strip("/") else ""
    inside = {name: data for name, data in files.items() if name.startswith(prefix)}
    if not inside:
        return None
    entries: list[dict[str, Any]] = []
    folders = set()
    for name, data in sorted(inside.items()):
        oid = hashlib.sha1(data).hexdigest()
        entry: dict[str, Any] = {"type": "file", "path": name, "size": len(data), "oid": oid}
        if len(data) > 100:
            sha = hashlib.sha256(data).hexdigest()
            entry["lfs"] = {"oid": sha, "size": len(data), "pointerSize": 134}
        entries.append(entry)
        parts = name.split("/")[:-1]
        folders |= {"/".join(parts[: k + 1]) for k in range(len(parts))}
    entries += [
        {"type": "directory", "path": name, "size": 0, "oid": hashlib.sha1(b"").hexdigest()}
        for name in sorted(folders)
        if name.startswith(prefix)
    ]
    return entries
