"""Documents of a shard as arrays, and where each came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..arrays import Int64, Tokens


@dataclass(frozen=True)
class DocumentOrigin:
    """Where a document came from: its file, its place in it (line, row or record; from 0), and
    the user's own id where there is one."""

    file: str
    position: int
    id: str | None = None


@dataclass(frozen=True, eq=False)
class ShardDocuments:
    """Tokenized documents side by side, each with its end-of-document id.

    Arrays, never a list of objects: a corpus of short documents would spend its time on them.
    """

    tokens: Tokens
    starts: Int64
    """Token offsets of the documents, and after the last one: documents + 1 values."""
    files: tuple[str, ...]
    file: npt.NDArray[np.int32]
    """Of each document, the index of its file in `files`."""
    position: Int64
    """Of each document, the place in its file."""
    ids: tuple[str | None, ...] | None = None
    """The user's own ids, where there are any."""
    weights: npt.NDArray[np.uint8] | None = None
    """Of each token, a code into the dataset's palette of loss weights."""
    piece: Int64 | None = None
    """Of each document, which piece of one document of the corpus it is, where long ones are
    split. Not stored: it is for whoever must tell the pieces apart."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, part: slice) -> ShardDocuments:
        """A run of documents; copies no tokens."""
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
        )

    @property
    def size(self) -> int:
        """Bytes of tokens and weight codes."""
        return self.tokens.nbytes + (0 if self.weights is None else self.weights.nbytes)

    @staticmethod
    def concatenate(parts: Sequence[ShardDocuments]) -> ShardDocuments:
        """The documents of all parts, in order. At least one part."""
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
        assert len(weights) in (0, len(parts)) and len(pieces) in (0, len(parts))
        return ShardDocuments(
            tokens=np.concatenate([part.tokens for part in parts]),
            starts=np.concatenate(starts),
            files=tuple(names),
            file=np.concatenate(file),
            position=np.concatenate([part.position for part in parts]),
            ids=ids,
            weights=np.concatenate(weights) if weights else None,
            piece=np.concatenate(pieces) if pieces else None,
        )
