"""Serve the board until Ctrl-C."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Sequence

from ...console import command
from ...console.errors import BusyError, file_fault
from ...console.log import get_logger
from .board import Board
from .server import PORT, Server

log = get_logger(__name__)


def serve(places: Sequence[str], port: int | None, *, as_json: bool = False) -> None:
    """Serve the runs in and below `places`. Without a port, take the default, or a free one if it
    is in use."""
    board = Board(places)
    server = _open(board, port)
    board.scan()
    board.follow()
    if as_json:
        command.emit({"url": server.url, "port": server.server_port, "runs": len(board.runs)})
    for problem in board.problems:
        log.warning("%s; trying again", problem)
    num_runs = len(board.runs)
    command.say(f"{num_runs} run{'s' * (num_runs != 1)}: {server.url}")
    command.say(
        f"from another machine: ssh -L {server.server_port}:127.0.0.1:{server.server_port} HOST, "
        "then this URL; Ctrl-C ends the board"
    )
    with server, contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()
    board.end()


def _open(board: Board, port: int | None) -> Server:
    try:
        return Server(board, PORT if port is None else port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE and port is None:
            return Server(board, 0)
        raise BusyError(
            f"cannot serve on port {port}: {file_fault(error)[0]}", hint="choose another --port"
        ) from None
