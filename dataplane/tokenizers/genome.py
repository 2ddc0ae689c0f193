"""Genomes as ids of bytes: their control tags, and texts that are no sequences."""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

from ..arrays import Int64, Tokens
from .tokenizer import Encoded

SEQUENCE = b"ACGTUNRYSWKMBDHVacgtunryswkmbdhv-.~*\n\r@#|"
"""Bytes of nucleotide sequences: IUPAC codes, gaps, stops, ends of lines, marks of control tags."""
BETWEEN = re.compile(rb"\|[A-Za-z]__[^|]*\||^>[^\n]*$", re.MULTILINE)
"""Text between sequences: phylogenetic tags, and headers of FASTA."""
FOREIGN = ~np.isin(np.arange(1 << 8), np.frombuffer(SEQUENCE, np.uint8))
BAR = ord("|")
CONTROL = np.frombuffer(b"@#", np.uint8)
INSIDE_TAGS = np.frombuffer(b"_; ", np.uint8)
"""Bytes that only phylogenetic tags hold."""


def control_tags(tokens: Tokens, starts: Int64) -> npt.NDArray[np.bool_]:
    """Return the tokens of control tags, by Savanna's rule: `@`, `#`, and each piece between two
    bars that holds a byte of tags, with its bars. The ends of a document bound pieces too."""
    bars = tokens == BAR
    edges = np.unique(np.concatenate([starts[:-1], np.flatnonzero(bars), starts[1:] - 1]))
    is_tag = np.logical_or.reduceat(np.isin(tokens, INSIDE_TAGS), edges)
    mask: npt.NDArray[np.bool_] = np.repeat(is_tag, np.diff(edges, append=len(tokens)))
    closing = edges[1:][is_tag[:-1]]
    mask[closing] |= bars[closing]  # the end of a document closes a piece, and is no part of it
    return mask | np.isin(tokens, CONTROL)


def misfits(encoded: Encoded, limit: float) -> dict[int, str]:
    """Return the documents of which more than this share of bytes is not of nucleotide sequences,
    and why. Tags, headers of FASTA and special tokens do not count."""
    if not len(encoded.tokens):
        return {}
    foreign = FOREIGN[np.minimum(encoded.tokens, 255)] & (encoded.tokens < 256)
    counts = np.add.reduceat(foreign, encoded.starts[:-1], dtype=np.int64)
    reasons = {}
    for number in np.flatnonzero(counts > limit * (np.diff(encoded.starts) - 1)).tolist():
        start, end = encoded.starts[number : number + 2].tolist()
        ids = encoded.tokens[start:end]
        text = BETWEEN.sub(b"", ids[ids < 256].astype(np.uint8).tobytes())
        odd = text.translate(None, SEQUENCE)
        if len(odd) > limit * len(text):
            reasons[number] = (
                f"{len(odd) / len(text):.0%} of its bytes are not of a nucleotide sequence (as "
                f"{odd[:3].decode('latin-1')!r}), and {limit:.0%} are allowed: leave --dna and "
                "--mask-control-tags out for other texts, or allow more with --max-foreign"
            )
    return reasons
