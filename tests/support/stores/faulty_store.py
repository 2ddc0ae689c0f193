"""A proxy before an S3 server that injects faults of networks and stores into some requests."""

from __future__ import annotations

import http.client
import itertools
import socket
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Lock, Thread
from typing import Any

FAULTS = {
    "closed": lambda relay: relay.close(),
    "reset": lambda relay: relay.reset(),
    "idle": lambda relay: relay.answer(*relay.ask(), then=relay.close),
    "cut": lambda relay: relay.answer(*relay.ask(), cut=True, then=relay.reset),
    "cut upload": lambda relay: relay.swallow_half_and_reset(),
    "lost answer": lambda relay: (relay.ask(), relay.reset()),
    "silent": lambda relay: relay.say_nothing(),
    "throttled": lambda relay: relay.refuse(503, "SlowDown", "Please reduce your request rate."),
    "failing": lambda relay: relay.refuse(500, "InternalError", "We encountered an error."),
    "expired": lambda relay: relay.refuse(400, "ExpiredToken", "The provided token has expired."),
}
"""Faults: the connection is closed or reset before a response; closed after one, as servers do with
idle connections; the response or the upload is cut in the middle; the request is executed and its
response lost; the server never responds; the request is refused."""
PLACES = itertools.count(7, 101)
WRONG_BYTES = {
    "flipped": lambda relay: relay.answer(*relay.ask(), flip=lambda body: len(body) // 2),
    "garbled": lambda relay: relay.answer(*relay.ask(), flip=lambda body: next(PLACES) % len(body)),
    "flipped with a checksum": lambda relay: relay.answer(
        *relay.ask(), flip=lambda body: len(body) // 2, checksums=True
    ),
}
"""A bit of the response is flipped, always the same one, or each time another one. The connection
does not show it; the store's own checksum, if it sends one, shows it to the client's library."""


def at_times(faults: Sequence[str], *, every: int) -> Callable[[Relay], str | None]:
    """Cycle through the faults, one for every `every`-th request."""
    count, cycle, lock = itertools.count(1), itertools.cycle(faults), Lock()

    def choose(request: Relay) -> str | None:
        with lock:
            return next(cycle) if next(count) % every == 0 else None

    return choose


class FaultyStore(ThreadingHTTPServer):
    """Relays requests to the server at `port`; `choose` returns the fault of a request, or None."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), Relay)
        self.behind = port
        self.choose: Callable[[Relay], str | None] = lambda request: None
        self.met: Counter[str] = Counter()
        self.ended = Event()

    def __enter__(self) -> FaultyStore:
        Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.shutdown()
        self.server_close()

    def shutdown_request(self, request: Any) -> None:
        request.close()  # without a shutdown, which `reset` must not send

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # clients that have disconnected


class Relay(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyStore

    def log_message(self, *words: object) -> None:
        pass

    def relay(self) -> None:
        fault = self.server.choose(self)
        if fault is None:
            self.answer(*self.ask())
            return
        self.server.met[fault] += 1
        (FAULTS | WRONG_BYTES)[fault](self)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = relay

    def ask(self) -> tuple[http.client.HTTPResponse, bytes]:
        """Forward the request; return the server's response and its body."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        there = http.client.HTTPConnection("127.0.0.1", self.server.behind)
        there.request(self.command, self.path, body, dict(self.headers))
        response = there.getresponse()
        return response, response.read()

    def answer(
        self,
        response: http.client.HTTPResponse,
        body: bytes,
        *,
        cut: bool = False,
        flip: Callable[[bytes], int] | None = None,
        checksums: bool = False,
        then: Callable[[], None] | None = None,
    ) -> None:
        self.send_response(response.status)
        hidden = "x-amz-checksum" if flip is not None and not checksums else None
        for name, value in response.getheaders():
            if hidden is not None and name.lower().startswith(hidden):
                continue
            if name.lower() not in ("content-length", "connection", "server", "date"):
                self.send_header(name, value)
        size = response.getheader("Content-Length") if self.command == "HEAD" else len(body)
        self.send_header("Content-Length", str(size))
        self.end_headers()
        if flip is not None and body:
            place = flip(body)
            body = body[:place] + bytes([body[place] ^ 1]) + body[place + 1 :]
        self.wfile.write(body[: len(body) // 2] if cut else body)
        if then is not None:
            then()

    def refuse(self, status: int, code: str, message: str) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def swallow_half_and_reset(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)) // 2)
        self.reset()

    def say_nothing(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.ended.wait(60)
        self.close()

    def close(self) -> None:
        self.close_connection = True

    def reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()
