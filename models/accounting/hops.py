"""Passes of a long ring from those of a short one.

With parts of one length, a ring of more ranks runs more hops, and all hops but the first and the
last ones are alike. A trace that is cut at each message shows them as equal pieces in a row, once
for each loop over the ranks: the passes of a longer ring have more of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from .pieces import Pass, Passes, Piece

RING = 8
"""Ranks of the ring that is traced."""
ALIKE = RING - 4
"""Least hops in a row that are equal in each loop over its ranks."""
LONG = 12
"""Rings of more ranks follow from the short one."""


def lengthened(passes: Passes, more: int) -> Passes | None:
    """Return the passes of a ring with so many ranks more; None if no hops are alike."""
    forward, backward = _lengthened(passes.forward, more), _lengthened(passes.backward, more)
    return None if forward is None or backward is None else Passes(forward, backward)


def _lengthened(pieces: Pass, more: int) -> Pass | None:
    found: list[Piece] = []
    place = loops = 0
    while place < len(pieces):
        width, hops = _alike(pieces, place)
        found += pieces[place : place + width * hops]
        if hops > 1:
            found += pieces[place : place + width] * more
            loops += 1
        place += width * hops
    return joined(found) if loops else None


def _alike(pieces: Pass, first: int) -> tuple[int, int]:
    """Return the pieces of a hop that begins here, and how many equal hops follow each other."""
    for width in (1, 2):  # a message of keys and values; in a backward pass, of gradients too
        hop, hops = pieces[first : first + width], 1
        while pieces[first + width * hops : first + width * (hops + 1)] == hop:
            hops += 1
        if hops >= ALIKE:
            return width, hops
    return 1, 1


def joined(pieces: Sequence[Piece]) -> Pass:
    """Join the pieces up to each gradient."""
    found: list[Piece] = []
    level = high = 0
    for number, piece in enumerate(pieces):
        high = max(high, level + piece.high)
        level += piece.change
        if piece.gradient or number == len(pieces) - 1:
            found.append(Piece(high, level, piece.gradient, piece.size))
            level = high = 0
    return tuple(found)
