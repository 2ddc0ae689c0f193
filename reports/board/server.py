"""Serve the page on this machine alone, behind a token.

    http://127.0.0.1:8688/TOKEN/             the page, which asks for everything below
    http://127.0.0.1:8688/TOKEN/api/runs     the run list

Other users on the machine, and other sites' pages in the same browser, do not know the token. The
Host header must name this machine: a site whose name resolves to 127.0.0.1 is refused. The server
writes the curves' levels and colours, and the notes that a person saves on the page.
"""

from __future__ import annotations

import hmac
import json
import secrets
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from ...console.errors import UserError
from ...console.html.page import HINTS
from ...console.html.style import COLOURS, SCROLL, SIDES
from ...console.log import get_logger
from ...dataplane.storage import storage
from ...trainer.loop.metrics import list_page_metrics
from . import curves
from .board import Board
from .details import FILES, details
from .notes import parse_notes, write_notes
from .runs import BoardRun

log = get_logger(__name__)

HOST = "127.0.0.1"
PORT = 8688
HOSTS = (HOST, "localhost", "[::1]")
"""This machine's names in a browser; an SSH tunnel may change the port."""
STATIC = Path(__file__).parent / "static"
PAGES = {
    "": ("index.html", "text/html; charset=utf-8"),
    "board.css": ("board.css", "text/css; charset=utf-8"),
    "plot.css": ("plot.css", "text/css; charset=utf-8"),
    "panels.js": ("panels.js", "text/javascript; charset=utf-8"),
    "plot.js": ("plot.js", "text/javascript; charset=utf-8"),
    "groups.js": ("groups.js", "text/javascript; charset=utf-8"),
    "scores.js": ("scores.js", "text/javascript; charset=utf-8"),
    "address.js": ("address.js", "text/javascript; charset=utf-8"),
    "board.js": ("board.js", "text/javascript; charset=utf-8"),
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' "
    "'unsafe-inline'; connect-src 'self'; img-src 'self' data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


MAX_BODY = 1 << 17
"""Bytes of a request with notes, at most."""


class RefusedRequest(Exception):
    """A request that is answered with an HTTP error."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, board: Board, port: int = PORT) -> None:
        super().__init__((HOST, port), Handler)
        self.board = board
        self.token = secrets.token_urlsafe(24)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error, except from connections that a browser resets when it closes the page."""
        if not isinstance(sys.exc_info()[1], OSError):
            log.exception("a connection failed")

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/{self.token}/"


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    server_version = "headrace"
    sys_version = ""

    def do_GET(self) -> None:
        self._send(self._answer)

    def do_POST(self) -> None:
        self._send(self._save)

    def _send(self, answer: Callable[[], tuple[str, bytes]]) -> None:
        try:
            content_type, body = answer()
            code = 200
        except RefusedRequest as refused:
            code, content_type, body = (
                refused.code,
                "text/plain; charset=utf-8",
                str(refused).encode(),
            )
        except UserError as error:
            code, content_type, body = 500, "text/plain; charset=utf-8", str(error).encode()
        except Exception:
            log.exception("a request failed")
            code, content_type, body = (
                500,
                "text/plain; charset=utf-8",
                b"the server failed; see its log",
            )
        try:
            self.send_response(code)
            for name, value in HEADERS.items():
                self.send_header(name, value)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except OSError:  # the browser has closed the connection
            self.close_connection = True

    def log_message(self, format: str, *values: Any) -> None:
        """Print nothing: a line would contain the token."""

    def _save(self) -> tuple[str, bytes]:
        """Save a run's notes. Only this page sends JSON: a form of another site cannot."""
        words, _ = self._checked_words()
        size = self.headers.get("Content-Length", "")
        if self.headers.get_content_type() != "application/json" or not size.isdecimal():
            raise RefusedRequest(400, "notes are JSON")
        if int(size) > MAX_BODY:
            self.close_connection = True  # the body is not read
            raise RefusedRequest(413, "the notes are too long")
        body = self.rfile.read(int(size))
        match words:
            case ["api", "notes", id]:
                run = self._run(id)
                try:
                    notes = parse_notes(json.loads(body), "these notes")
                except ValueError:
                    raise RefusedRequest(400, "notes are JSON") from None
                write_notes(run.url, notes)
                run.notes = notes
                return _json({"tags": notes.tags, "note": notes.note})
        raise RefusedRequest(404, "there is no such page")

    def _checked_words(self) -> tuple[list[str], dict[str, list[str]]]:
        """Return the path below the token and the query of a request that may be answered."""
        host = self.headers.get("Host", "")
        if host.rpartition(":")[0] not in HOSTS and host not in HOSTS:
            raise RefusedRequest(403, "the board answers to this machine's own name alone")
        url = urlsplit(self.path)
        _, token, *words = [unquote(word) for word in url.path.split("/")] + [""]
        if not hmac.compare_digest(token.encode(), self.server.token.encode()):
            raise RefusedRequest(403, "open the URL that `trainer board` printed, with its token")
        return words[:-1], parse_qs(url.query, keep_blank_values=True)

    def _answer(self) -> tuple[str, bytes]:
        words, query = self._checked_words()
        match words:
            case [name] if name in PAGES:
                file, content_type = PAGES[name]
                return content_type, (STATIC / file).read_bytes()
            case ["colours.css"]:
                return "text/css; charset=utf-8", (COLOURS + SCROLL + SIDES).encode()
            case ["hints.js"]:
                return "text/javascript; charset=utf-8", HINTS.encode()
            case ["api", "metrics"]:
                return _json(list_page_metrics())
            case ["api", "runs"]:
                return _json(self.server.board.summary())
            case ["api", "settings"]:
                return _json({id: run.settings for id, run in self.server.board.runs.items()})
            case ["api", "curves"]:
                return "application/octet-stream", self._curves(query)
            case ["api", "nearest", run]:
                return _json(self._nearest(self._run(run), query))
            case ["api", "run", run]:
                return _json(details(self._run(run)))
            case ["api", "step", run, step] if step.isdecimal():
                first = _natural(query, "first", "0")
                return _json(self.server.board.rows.page(self._run(run), int(step), first))
            case ["file", run, name] if name in FILES:
                return "text/plain; charset=utf-8", _file(self._run(run), name)
        raise RefusedRequest(404, "there is no such page or file of a run")

    def _run(self, id: str) -> BoardRun:
        run = self.server.board.runs.get(id)
        if run is None:
            raise RefusedRequest(404, "there is no such run")
        return run

    def _curves(self, query: dict[str, list[str]]) -> bytes:
        axis = _first(query, "axis", "step")
        if axis not in curves.AXES:
            raise RefusedRequest(400, f"no axis {axis}")
        runs = [self._run(id) for id in query.get("run", [])]
        low, high = _number(query, "low", "-inf"), _number(query, "high", "inf")
        width = _natural(query, "width", "800")
        names, log = query.get("curve", []), _first(query, "log", "0") == "1"
        return curves.encode_curves(runs, names, axis, low, high, width, log=log, bits=_bits(query))

    def _nearest(self, run: BoardRun, query: dict[str, list[str]]) -> dict[str, int | None]:
        first, last = _natural(query, "first", "0"), _natural(query, "last", "0")
        value = _number(query, "value", "0")
        name = _first(query, "curve", "loss")
        bits = _bits(query)
        return {"step": curves.nearest_step(run, name, first, last, value, bits=bits)}


def _file(run: BoardRun, name: str) -> bytes:
    """Read a run's file. Links out of the run's folder are refused: the run may be another
    user's."""
    url = storage.join(run.url, name)
    if storage.is_local(url):
        path = storage.local_path(url)
        if path.resolve().parent != path.parent.resolve():
            raise RefusedRequest(403, "this file is a link that leads out of the run's folder")
    if not storage.exists(url):
        raise RefusedRequest(404, "the run has no such file")
    return storage.read(url)


def _bits(query: dict[str, list[str]]) -> bool:
    """Return whether the request asks for losses in bits per byte."""
    return _first(query, "bits", "0") == "1"


def _first(query: dict[str, list[str]], name: str, default: str) -> str:
    return query.get(name, [default])[0]


def _number(query: dict[str, list[str]], name: str, default: str) -> float:
    try:
        return float(_first(query, name, default))
    except ValueError:
        raise RefusedRequest(400, f"{name} must be a number") from None


def _natural(query: dict[str, list[str]], name: str, default: str) -> int:
    number = _number(query, name, default)
    if not (number.is_integer() and number >= 0):
        raise RefusedRequest(400, f"{name} must be a whole number, at least 0")
    return int(number)


def _json(value: Any) -> tuple[str, bytes]:
    return "application/json", json.dumps(value, default=str).encode()
