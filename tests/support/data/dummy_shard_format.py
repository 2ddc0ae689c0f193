"""Shard format that no module of headrace knows: a JSON head, then tokens and weight codes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from headrace.dataplane.shards.documents import DocumentOrigin, ShardDocuments
from headrace.dataplane.shards.format import (
    ExternalShard,
    Reader,
    ShardFormat,
    ShardLayout,
    StoredShard,
)
from headrace.dataplane.storage import storage


class DummyFormat(ShardFormat):
    index_name = "listing.json"
    external_files = ".dummy files"

    def write(self, out: BinaryIO, documents: ShardDocuments) -> None:
        head = {
            "dtype": documents.tokens.dtype.name,
            "weighted": documents.weights is not None,
            "starts": documents.starts.tolist(),
            "file": [documents.files[number] for number in documents.file],
            "position": documents.position.tolist(),
            "id": list(documents.ids or [None] * len(documents)),
        }
        text = json.dumps(head).encode()
        out.write(len(text).to_bytes(8, "little"))
        out.write(text)
        out.write(documents.tokens.tobytes())
        if documents.weights is not None:
            out.write(documents.weights.tobytes())

    def layout(
        self, read: Reader, size: int, *, dtype: str, details: dict[str, object]
    ) -> ShardLayout:
        head, begin = _head(read)
        starts = np.array(head["starts"], np.int64)
        codes = begin + int(starts[-1]) * np.dtype(dtype).itemsize
        return ShardLayout(
            document_starts=starts,
            run_tokens=starts[[0, -1]],
            run_bytes=np.array([begin]),
            weight_bytes=np.array([codes]) if head["weighted"] else None,
        )

    def origins(
        self, read: Reader, size: int, first: int, last: int, *, details: dict[str, object]
    ) -> list[DocumentOrigin]:
        head, _ = _head(read)
        columns = (head[name][first:last] for name in ("file", "position", "id"))
        return [DocumentOrigin(*values) for values in zip(*columns, strict=True)]

    def index(
        self, shards: Sequence[StoredShard], *, dtype: str, weighted: bool, compression: str | None
    ) -> bytes:
        return json.dumps([shard.name for shard in shards]).encode()

    def index_problem(self, folder: Path, shards: Sequence[StoredShard]) -> str | None:
        listed = json.loads((folder / "listing.json").read_text())
        return None if listed == [shard.name for shard in shards] else "it lists other shards"

    def recognises(self, names: Sequence[str]) -> bool:
        return any(name.endswith(".dummy") for name in names)

    def external_shards(self, url: str, column: str, dtype: str | None) -> Iterator[ExternalShard]:
        for name in storage.list_files(url):
            if name.endswith(".dummy"):
                where = storage.join(url, name)
                head, _ = _head(partial(storage.read, where))
                yield ExternalShard(
                    name=name, size=storage.size(where), dtype=head["dtype"], details={}
                )


def _head(read: Reader) -> tuple[dict[str, Any], int]:
    end = 8 + int.from_bytes(read(0, 8), "little")
    return json.loads(read(8, end)), end


FORMAT = DummyFormat()
