"""A client of the board's server, which asks it as a browser does."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import numpy as np
import pytest

from headrace.reports.board.board import Board
from headrace.reports.board.server import Server


class Client:
    """Asks a server as a browser does."""

    def __init__(self, *places: Path | str, **options: float) -> None:
        self.board = Board([str(place) for place in places], **options)
        self.board.scan()
        self.board.refresh()
        self.server = Server(self.board, 0)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def bytes(self, path: str, **words: Any) -> bytes:
        with urlopen(f"{self.server.url}{path}?{urlencode(words, doseq=True)}") as answer:
            assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
            data: bytes = answer.read()
            return data

    def json(self, path: str, **words: Any) -> Any:
        return json.loads(self.bytes(path, **words))

    def refused(self, path: str, code: int, **headers: str) -> None:
        with pytest.raises(HTTPError) as error:
            urlopen(Request(path, headers=headers))
        assert error.value.code == code
        error.value.close()

    def ids(self) -> dict[str, str]:
        return {run["name"]: run["id"] for run in self.json("api/runs")["runs"]}

    def curves(self, **words: Any) -> list[dict[str, Any]]:
        """Return the parts of an answer, read as plot.js reads them."""
        data = self.bytes("api/curves", **words)
        size = int.from_bytes(data[:4], "little")
        parts, at = json.loads(data[4 : 4 + size]), 4 + size
        for part in parts:
            for name in ("x", "first", "last"):
                part[name] = np.frombuffer(data, "<f8", part["points"], at)
                at += part[name].nbytes
            part["values"] = {}
            for name in part["curves"]:
                part["values"][name] = np.frombuffer(data, "<f4", 3 * part["points"], at)
                part["values"][name] = part["values"][name].reshape(3, -1)
                at += 12 * part["points"]
            at = -(-at // 8) * 8
        assert at == len(data)
        return list(parts)
