"""Hidden states of sequences: means over each, or a state for each token.

Files hold the sequences in the order of the input. Ranks that share rows write their slices of the
tokens themselves: the states of a long row never meet on one rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ...console.errors import InputError
from ...console.progress import Progress
from ...dataplane.tokenizers import Tokenizer
from ...models.model.model import Model
from ..placement.local_rows import Ids
from ..placement.team import Team
from .files.sequences import read_sequences
from .parts import PartWriter, part_path, write_table
from .rows import NORM, encode_texts, mean_states, token_states

EMBED = "embed"
"""Name of the team's function that embeds a batch."""


@dataclass(frozen=True)
class Batch:
    """Consecutive sequences."""

    first: int
    """Number of the first one in the file."""
    names: Sequence[str]
    rows: Sequence[Ids]

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class Sequences:
    """Sequences to embed."""

    path: str
    tokenizer: Tokenizer
    max_length: int
    batch_tokens: int

    def survey(self) -> tuple[int, int, int]:
        """Read all sequences, and raise at the first that cannot be embedded. Return their number,
        the tokens of the longest, and the most padded tokens of a batch."""
        count = longest = fullest = 0
        for batch in self.batches(0):
            count += len(batch)
            length = max(map(len, batch.rows))
            longest, fullest = max(longest, length), max(fullest, length * len(batch))
        return count, longest, fullest

    def batches(self, first: int) -> Iterator[Batch]:
        """Yield batches of the sequences from `first` on."""
        names: list[str] = []
        rows: list[Ids] = []
        for number, (name, text) in enumerate(read_sequences(self.path)):
            if number < first:
                continue
            (row,) = encode_texts(self.tokenizer, [text], [f"{self.path}: {name}"])
            self._check_length(name, len(row))
            padded = max(len(row), *map(len, rows)) * (len(rows) + 1) if rows else 0
            if padded > self.batch_tokens:
                yield Batch(number - len(rows), names, rows)
                names, rows = [], []
            names.append(name)
            rows.append(row)
        if rows:
            yield Batch(number + 1 - len(rows), names, rows)

    def _check_length(self, name: str, length: int) -> None:
        if not length:
            raise InputError(f"{self.path}: {name} is empty", hint="remove it")
        if length > self.max_length:
            raise InputError(
                f"{self.path}: {name} has {length:,} tokens, more than --max-length "
                f"{self.max_length:,}",
                hint=f"--max-length {length}, or cut the sequence",
            )


@dataclass(frozen=True)
class Embedder:
    """Embeds batches on this rank."""

    model: Model
    layers: Sequence[str]
    by_token: bool
    folder: Path

    def __call__(self, batch: Batch) -> pa.Table | None:
        """Return the means of a batch; or write the states of its tokens, this rank's slice."""
        if self.by_token:
            self._write_tokens(batch)
            return None
        means = mean_states(self.model, self.layers, batch.rows)
        columns: dict[str, pa.Array] = {
            "number": pa.array(range(batch.first, batch.first + len(batch)), pa.int64()),
            "sequence": pa.array(batch.names, pa.string()),
            "tokens": pa.array(map(len, batch.rows), pa.int64()),
        }
        for index, layer in enumerate(self.layers):
            columns[column_name(layer)] = _vectors(np.stack([mean[index] for mean in means]))
        return pa.table(columns)

    def discard(self, batch: Batch) -> None:
        """Compute a batch, and keep nothing."""
        mean_states(self.model, self.layers, batch.rows)

    def _write_tokens(self, batch: Batch) -> None:
        first, states = token_states(self.model, self.layers, batch.rows)
        local_length = states[self.layers[0]].shape[1]
        counts = [min(max(len(row) - first, 0), local_length) for row in batch.rows]
        numbers = np.repeat(np.arange(batch.first, batch.first + len(batch)), counts)
        names = np.repeat(np.array(batch.names, object), counts)
        columns: dict[str, pa.Array] = {
            "number": pa.array(numbers, pa.int64()),
            "sequence": pa.array(names, pa.string()),
            "position": pa.array(_join([np.arange(first, first + n) for n in counts]), pa.int64()),
            "token": pa.array(
                _join([row[first : first + n] for row, n in zip(batch.rows, counts, strict=True)]),
                pa.int32(),
            ),
        }
        for layer in self.layers:
            pieces = [rows[:n] for rows, n in zip(states[layer], counts, strict=True)]
            columns[column_name(layer)] = _vectors(np.concatenate(pieces))
        context, tensor = self.model.axes.context, self.model.axes.tensor
        number = context.rank * tensor.size + tensor.rank
        end, slices = batch.first + len(batch), context.size * tensor.size
        path = part_path(self.folder, batch.first, end, number, slices)
        write_table(path, pa.table(columns))


def embed(team: Team, sequences: Sequences, folder: Path, first: int, count: int) -> None:
    """Embed the sequences that no part has, on rank 0 of the team."""
    writer = PartWriter(folder, first)
    batches = sequences.batches(first)
    with Progress("embedding", total=count - first, unit=" sequences") as progress:
        while chunk := list(islice(batches, team.round_batches(EMBED))):
            for table in team.map_round(EMBED, chunk):
                if table is not None:
                    writer.add(table)
            progress.advance(sum(map(len, chunk)))
    writer.flush()


def parse_layers(words: Sequence[str], layers: int) -> tuple[str, ...]:
    """Check the names of layers; raise InputError for one that the model lacks."""
    names = tuple(dict.fromkeys(words))
    for name in names:
        if name != NORM and not (name.isdecimal() and int(name) < layers):
            raise InputError(
                f"--layers {name}: the model has no such layer",
                hint=f"0 to {layers - 1} are the states after a layer, `{NORM}` those after the "
                "final norm",
            )
    return tuple(name if name == NORM else str(int(name)) for name in names)


def column_name(layer: str) -> str:
    return layer if layer == NORM else f"layer_{layer}"


def _vectors(x: np.ndarray[Any, np.dtype[np.float32]]) -> pa.Array:
    """Convert [number, width] to a column of lists."""
    return pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), x.shape[1])


def _join(pieces: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    return np.concatenate(pieces) if pieces else np.empty(0, np.int64)
