"""Documents of a shard as arrays, and where each came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays import Int64, Tokens


@dataclass(frozen=True)
class DocumentOrigin:
    """The origin of a document: its file, its position there (line, row or record, from 0), and the
    corpus' own id of it, if any."""

    file: str
    position: int
    id: str | None = None

    def __str__(self) -> str:
        return place_of(self.file, self.position) + (f", id {self.id}" if self.id else "")


def place_of(file: str, position: int) -> str:
    """Return the place of a document in words: its file, and its line, row or record from 1, as
    editors and errors count them."""
    return f"{file}:{position + 1}"


@dataclass(frozen=True, eq=False)
class ShardDocuments:
    """Consecutive tokenized documents, each with its end-of-document id.

    Arrays, not a list of objects: with short documents, objects would dominate the run time.
    """

    tokens: Tokens
    starts: Int64
    """Token offsets of the documents, then the number of tokens: documents + 1 values."""
    files: tuple[str, ...]
    file: npt.NDArray[np.int32]
    """For each document, the index of its file in `files`."""
    position: Int64
    """For each document, its position in its file."""
    ids: tuple[str | None, ...] | None = None
    """The corpus' own ids, if there are any."""
    weights: npt.NDArray[np.uint8] | None = None
    """For each token, an index into the dataset's loss-weight table."""
    piece: Int64 | None = None
    """For each document, its number among the pieces that a long document of the corpus was split
    into. Not stored; the shuffle uses it to distinguish the pieces."""
    fields: Any = None
    """The kept fields: a pyarrow.Table with a row for each document. Shard files do not hold it; it
    has a file of its own (datasets/fields.py)."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, part: slice) -> ShardDocuments:
        """Return consecutive documents without copying tokens."""
        first, last, step = part.indices(len(self))
        assert step == 1
        last = max(first, last)
        start, end = int(self.starts[first]), int(self.starts[last])
        return ShardDocuments(
            tokens=self.tokens[start:end],
            starts=self.starts[first : last + 1] - start,
            files=self.files,
            file=self.file[first:last],
            position=self.position[first:last],
            ids=None if self.ids is None else self.ids[first:last],
            weights=None if self.weights is None else self.weights[start:end],
            piece=None if self.piece is None else self.piece[first:last],
            fields=None if self.fields is None else self.fields.slice(first, last - first),
        )

    @property
    def size(self) -> int:
        """Bytes of the tokens and weight codes."""
        return self.tokens.nbytes + (0 if self.weights is None else self.weights.nbytes)

    @staticmethod
    def concatenate(parts: Sequence[ShardDocuments]) -> ShardDocuments:
        """Return the documents of all parts (at least one), in order."""
        if len(parts) == 1:
            return parts[0]
        names: dict[str, int] = {}
        file, starts, offset = [], [np.zeros(1, np.int64)], 0
        for part in parts:
            codes = [names.setdefault(name, len(names)) for name in part.files]
            file.append(np.array(codes, np.int32)[part.file])
            starts.append(part.starts[1:] + offset)
            offset += int(part.starts[-1])
        ids = None
        if any(part.ids is not None for part in parts):
            ids = tuple(id for part in parts for id in (part.ids or (None,) * len(part)))
        weights = [part.weights for part in parts if part.weights is not None]
        pieces = [part.piece for part in parts if part.piece is not None]
        fields = [part.fields for part in parts if part.fields is not None]
        for columns in (weights, pieces, fields):
            assert len(columns) in (0, len(parts))
        return ShardDocuments(
            tokens=np.concatenate([part.tokens for part in parts]),
            starts=np.concatenate(starts),
            files=tuple(names),
            file=np.concatenate(file),
            position=np.concatenate([part.position for part in parts]),
            ids=ids,
            weights=np.concatenate(weights) if weights else None,
            piece=np.concatenate(pieces) if pieces else None,
            fields=_joined(fields) if fields else None,
        )


def _joined(tables: Sequence[Any]) -> Any:
    import pyarrow as pa

    return pa.concat_tables(tables)
