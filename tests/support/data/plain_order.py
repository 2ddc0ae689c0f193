"""The order of a source as its definition says: row by row, in lists and sets of tokens."""

from __future__ import annotations

import hashlib
import json
from itertools import groupby

from headrace.dataplane.order.source_order import Cuts, Position, SourceOrder

Rows = dict[int, list[int]]
"""The tokens of rows, by row number."""
BITS = (1 << 64) - 1


def row_at(order: SourceOrder, position: Position, length: int, draw: int) -> tuple[int, list[int]]:
    """Return the epoch and the tokens of the row `draw` rows after a position."""
    row, epoch, cuts = position.row + draw, position.epoch, position.cuts
    while row not in (rows := epoch_rows(order, epoch, cuts, length)[1]):
        row -= max(rows, default=position.row - 1) + 1
        epoch, cuts = epoch + 1, ()
    return epoch, rows[row]


def epoch_rows(order: SourceOrder, epoch: int, cuts: Cuts, length: int) -> tuple[set[int], Rows]:
    """Return the tokens that the rows before the last cut have left, and the rows after it."""
    unserved, chunk, width = _pool(order, epoch), order.chunk, order.window
    chunks = _cut(_chunk_runs(order, epoch, unserved), chunk)
    name = [order.seed, order.name, epoch]
    if not order.direction:
        chunks = [chunks[image([*name, -1], len(chunks), slot)] for slot in range(len(chunks))]
    elif order.direction < 0:
        chunks.reverse()
    windows = [chunks[first : first + width] for first in range(0, len(chunks), width)] or [[]]
    begun = 0
    for number, (cut_row, cut_length) in enumerate([*cuts, (0, length)]):
        later = {token for part in windows[begun:] for whole in part for token in whole}
        remainder = _remainder_rows(unserved - later, cut_length)
        first_row = sum(map(len, windows[:begun])) * (chunk // cut_length)
        rows: Rows = {}
        begins = []
        for window in range(begun, max(len(windows), begun + 1)):
            begins.append(first_row)
            whole = windows[window] if window < len(windows) else []
            part = [row for tokens in whole for row in _cut(_runs({*tokens}), cut_length)]
            part += remainder if window >= len(windows) - 1 else []
            title = [*name, window if window < len(windows) else window + number]
            for place in range(len(part)):
                rows[first_row + place] = part[image(title, len(part), place)]
            first_row += len(part)
        if number < len(cuts):
            unserved -= {token for row in rows if row < cut_row for token in rows[row]}
            begun = min(begun + sum(cut_row > first for first in begins), len(windows))
    return unserved, rows


def image(name: list[int | str], length: int, position: int) -> int:
    """Return the image of a position under the permutation of [0, length) with a name."""
    text = json.dumps(name, separators=(",", ":")).encode()
    digest = hashlib.blake2b(text, digest_size=48).digest()
    half = 1
    while 4**half < length:
        half += 1
    while True:
        left, right = divmod(position, 2**half)
        for at in range(0, 48, 8):
            mixed = right ^ int.from_bytes(digest[at : at + 8], "little")
            mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & BITS
            mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & BITS
            left, right = right, left ^ (mixed ^ (mixed >> 31)) % 2**half
        position = left * 2**half + right
        if position < length:
            return position


def _pool(order: SourceOrder, epoch: int) -> set[int]:
    """Return the tokens of an epoch: those that a parent has left, and those by which the source
    has grown, or all."""
    rest = order.unserved
    if rest is None or rest.position.epoch != epoch:
        return set(range(order.tokens - 1))
    tokens, rows = epoch_rows(rest.order, epoch, rest.position.cuts, rest.length)
    tokens -= {token for row in rows if row < rest.position.row for token in rows[row]}
    return tokens | set(range(rest.order.tokens - 1, order.tokens - 1))


def _chunk_runs(order: SourceOrder, epoch: int, unserved: set[int]) -> list[tuple[int, int]]:
    """Return the runs of which chunks are cut. A whole epoch of falling order begins with a piece
    that is shorter than a chunk, to be served last."""
    is_continued = order.unserved is not None and order.unserved.position.epoch == epoch
    if order.direction < 0 and not is_continued:
        return [((order.tokens - 1) % order.chunk, order.tokens - 1)]
    return _runs(unserved)


def _remainder_rows(tokens: set[int], length: int) -> list[list[int]]:
    """Return the rows of a remainder: those within runs of tokens, then those of joined pieces."""
    runs = _runs(tokens)
    loose = [token for start, end in runs for token in range(end - (end - start) % length, end)]
    joined = range(0, len(loose) - length + 1, length)
    return _cut(runs, length) + [loose[first : first + length] for first in joined]


def _cut(runs: list[tuple[int, int]], length: int) -> list[list[int]]:
    """Return the pieces of a length that each run has from its start on."""
    return [
        list(range(first, first + length))
        for start, end in runs
        for first in range(start, end - length + 1, length)
    ]


def _runs(tokens: set[int]) -> list[tuple[int, int]]:
    """Return the ranges [start, end) of consecutive tokens."""
    runs = groupby(enumerate(sorted(tokens)), key=lambda pair: pair[1] - pair[0])
    parts = [[token for _, token in run] for _, run in runs]
    return [(part[0], part[-1] + 1) for part in parts]
