"""Shard documents as arrays, and document origins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays import Int64, Tokens


@dataclass(frozen=True)
class DocumentOrigin:
    """Where a document came from: file, position in the file (line, row or record, from 0), and the
    corpus' id, if any."""

    file: str
    position: int
    id: str | None = None

    def __str__(self) -> str:
        return format_place(self.file, self.position) + (f", id {self.id}" if self.id else "")


def format_place(file: str, position: int) -> str:
    """Format a document's place: file, and line, row or record from 1, as editors and errors
    count."""
    return f"{file}:{position + 1}"


@dataclass(frozen=True, eq=False)
class ShardDocuments:
    """Consecutive tokenized documents, with end-of-document ids.

    Arrays, not a list of objects: with short documents, objects would dominate the run time.
    """

    tokens: Tokens
    starts: Int64
    """[documents + 1] Token offset of each document, then the number of tokens."""
    files: tuple[str, ...]
    file: npt.NDArray[np.int32]
    """[documents] Index into `files`."""
    position: Int64
    """[documents] Position in the file."""
    ids: tuple[str | None, ...] | None = None
    """[documents] The corpus' ids, if there are any."""
    weights: npt.NDArray[np.uint8] | None = None
    """[tokens] Index into the dataset's loss-weight table."""
    piece: Int64 | None = None
    """[documents] Number among the pieces into which a long corpus document was split. Not stored;
    the shuffle uses it to distinguish pieces."""
    fields: Any = None
    """The kept fields: a pyarrow.Table with a row per document. Stored not in the shard but in a
    fields file (datasets/fields.py)."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, documents: slice) -> ShardDocuments:
        """Return consecutive documents without copying tokens."""
        first, end, step = documents.indices(len(self))
        assert step == 1
        end = max(first, end)
        start_token, end_token = int(self.starts[first]), int(self.starts[end])
        return ShardDocuments(
            tokens=self.tokens[start_token:end_token],
            starts=self.starts[first : end + 1] - start_token,
            files=self.files,
            file=self.file[first:end],
            position=self.position[first:end],
            ids=None if self.ids is None else self.ids[first:end],
            weights=None if self.weights is None else self.weights[start_token:end_token],
            piece=None if self.piece is None else self.piece[first:end],
            fields=None if self.fields is None else self.fields.slice(first, end - first),
        )

    @property
    def size(self) -> int:
        """Bytes in tokens and weight codes."""
        return self.tokens.nbytes + (0 if self.weights is None else self.weights.nbytes)

    @staticmethod
    def concatenate(batches: Sequence[ShardDocuments]) -> ShardDocuments:
        """Concatenate batches (at least one), in order."""
        if len(batches) == 1:
            return batches[0]
        file_numbers: dict[str, int] = {}
        file_columns, starts, offset = [], [np.zeros(1, np.int64)], 0
        for batch in batches:
            numbers = [file_numbers.setdefault(file, len(file_numbers)) for file in batch.files]
            file_columns.append(np.array(numbers, np.int32)[batch.file])
            starts.append(batch.starts[1:] + offset)
            offset += int(batch.starts[-1])
        ids = None
        if any(batch.ids is not None for batch in batches):
            ids = tuple(id for batch in batches for id in (batch.ids or (None,) * len(batch)))
        weights = [batch.weights for batch in batches if batch.weights is not None]
        pieces = [batch.piece for batch in batches if batch.piece is not None]
        tables = [batch.fields for batch in batches if batch.fields is not None]
        for columns in (weights, pieces, tables):
            assert len(columns) in (0, len(batches))
        fields = None
        if tables:
            import pyarrow as pa

            fields = pa.concat_tables(tables)
        return ShardDocuments(
            tokens=np.concatenate([batch.tokens for batch in batches]),
            starts=np.concatenate(starts),
            files=tuple(file_numbers),
            file=np.concatenate(file_columns),
            position=np.concatenate([batch.position for batch in batches]),
            ids=ids,
            weights=np.concatenate(weights) if weights else None,
            piece=np.concatenate(pieces) if pieces else None,
            fields=fields,
        )
