"""Genomes as byte ids: control tags, and texts that are no sequences."""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

from ..arrays import Int64, Tokens
from .tokenizer import Encoded

SEQUENCE_BYTES = b"ACGTUNRYSWKMBDHVacgtunryswkmbdhv-.~*\n\r@#|"
"""Bytes in nucleotide sequences: IUPAC codes, gaps, stops, line ends, control-tag marks."""
BETWEEN_SEQUENCES = re.compile(rb"\|[A-Za-z]__[^|]*\||^>[^\n]*$", re.MULTILINE)
"""Text between sequences: phylogenetic tags, and FASTA headers."""
IS_FOREIGN = ~np.isin(np.arange(1 << 8), np.frombuffer(SEQUENCE_BYTES, np.uint8))
BAR = ord("|")
CONTROL_BYTES = np.frombuffer(b"@#", np.uint8)
N, LOWER_N = b"Nn"
TAG_BYTES = np.frombuffer(b"_; ", np.uint8)
"""Bytes found only in phylogenetic tags."""


def find_control_tags(tokens: Tokens, starts: Int64) -> npt.NDArray[np.bool_]:
    """Return a mask [tokens] for control tags, by Savanna's rule: `@`, `#`, and a piece between two
    bars, bars included, if it holds a byte in TAG_BYTES. A document's ends bound pieces, too."""
    bars = tokens == BAR
    edges = np.unique(np.concatenate([starts[:-1], np.flatnonzero(bars), starts[1:] - 1]))
    is_tag = np.logical_or.reduceat(np.isin(tokens, TAG_BYTES), edges)
    mask: npt.NDArray[np.bool_] = np.repeat(is_tag, np.diff(edges, append=len(tokens)))
    closing = edges[1:][is_tag[:-1]]
    mask[closing] |= bars[closing]  # the end of a document closes a piece, and is no part of it
    return mask | np.isin(tokens, CONTROL_BYTES)


def find_n_runs(data: npt.NDArray[np.uint8], starts: Int64, length: int) -> npt.NDArray[np.bool_]:
    """Return a mask [bytes] for runs of at least `length` N within a document, in either case.
    Documents are [start, next start - 1): a separator follows each."""
    is_n = (data == N) | (data == LOWER_N)
    is_n[starts[1:] - 1] = False  # a separator may be a letter
    edges = np.flatnonzero(np.diff(is_n, prepend=False, append=False)).reshape(-1, 2)
    long = edges[edges[:, 1] - edges[:, 0] >= length]
    steps = np.zeros(len(data) + 1, np.int8)
    steps[long[:, 0]], steps[long[:, 1]] = 1, -1
    mask: npt.NDArray[np.bool_] = np.cumsum(steps[:-1], dtype=np.int8).astype(bool)
    return mask


def find_misfits(encoded: Encoded, limit: float) -> dict[int, str]:
    """Return documents where more than a share `limit` of bytes is foreign to nucleotide sequences,
    with reasons. Tags, FASTA headers and special tokens do not count."""
    if not len(encoded.tokens):
        return {}
    foreign = IS_FOREIGN[np.minimum(encoded.tokens, 255)] & (encoded.tokens < 256)
    counts = np.add.reduceat(foreign, encoded.starts[:-1], dtype=np.int64)
    reasons = {}
    for document in np.flatnonzero(counts > limit * (np.diff(encoded.starts) - 1)).tolist():
        start, end = encoded.starts[document : document + 2].tolist()
        ids = encoded.tokens[start:end]
        sequence = BETWEEN_SEQUENCES.sub(b"", ids[ids < 256].astype(np.uint8).tobytes())
        foreign_bytes = sequence.translate(None, SEQUENCE_BYTES)
        if len(foreign_bytes) > limit * len(sequence):
            reasons[document] = (
                f"{len(foreign_bytes) / len(sequence):.0%} of its bytes are not of a nucleotide "
                f"sequence (as {foreign_bytes[:3].decode('latin-1')!r}), and {limit:.0%} are "
                "allowed: leave --dna and --mask-control-tags out for other texts, or allow more "
                "with --max-foreign"
            )
    return reasons
