"""Bytes as tokens: ids 0–255 are UTF-8 bytes, special tokens follow.

For DNA, lower-case bases (a genome's masked repeats) become upper-case ids and weigh less in the
loss: a sequence that repeats a million times is not what a model should learn. Control tags, which
a model reads and need not write, have no loss on request (genome.py).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...console.config import added_field, plain
from ..arrays import Int64
from ..datasets.manifest import TokenizerInfo
from . import genome
from .fast_bpe import letters_by_byte
from .tokenizer import Encoded, Raw, SpecialToken, id_type, spans_from_sizes

PACKAGES: tuple[str, ...] = ()

END = "<|endoftext|>"
ADDED_TOKEN_FLAGS = {"single_word": False, "lstrip": False, "rstrip": False}
"""Options in the `tokenizers` library: special tokens are found anywhere, without white space
around them."""
UPPER_IDS = np.arange(256, dtype=np.uint16)
UPPER_IDS[ord("a") : ord("z") + 1] -= 32
MASKED_WEIGHT = 0.1
MAX_FOREIGN = 0.1
MASKED_CODES = np.zeros(256, np.uint8)
MASKED_CODES[ord("a") : ord("z") + 1] = 1


@dataclass(frozen=True, kw_only=True)
class ByteConfig:
    """Settings of the byte tokenizer."""

    special_tokens: tuple[str, ...] = (END,)
    """Special tokens, from id 256 on. The first one ends every document."""
    parse_special: bool = False
    """True: special tokens found in the text are encoded as special tokens, else as text."""
    dna: bool = False
    """True: lower-case letters get the ids of upper-case ones and the weight `masked_weight`."""
    masked_weight: float = MASKED_WEIGHT
    """Loss weight of lower-case letters."""
    mask_control_tags: bool = False
    """True: no loss on `@`, `#` and phylogenetic tags (`|d__Bacteria;…|`): pieces between two bars,
    or a bar and an end of the document, that hold `_`, `;` or a space, with their bars."""
    mask_n_runs: int | None = added_field(None)
    """No loss on runs of so many N, or more."""
    max_foreign: float = MAX_FOREIGN
    """Genomes (dna, mask_control_tags): largest share of a document's bytes that are not of
    nucleotide sequences: IUPAC codes, gaps (`-`, `.`, `~`), stops (`*`), line breaks, `@`, `#` and
    `|`. Tags and header lines of FASTA (`>`) do not count."""

    def __post_init__(self) -> None:
        if not self.special_tokens:
            raise ValueError("a byte tokenizer needs a special token that ends documents")
        if len(set(self.special_tokens)) < len(self.special_tokens) or "" in self.special_tokens:
            raise ValueError("special tokens must be different and not empty")
        if not 0 <= self.masked_weight <= 1:
            raise ValueError(f"masked_weight is {self.masked_weight}; a weight is between 0 and 1")
        if self.masked_weight != MASKED_WEIGHT and not self.dna:
            raise ValueError("masked_weight needs dna: no other text has masked letters")
        if self.mask_n_runs is not None and self.mask_n_runs < 1:
            raise ValueError(f"mask_n_runs is {self.mask_n_runs}; it must be at least 1")
        if self.mask_n_runs is not None and not self.genome:
            raise ValueError("mask_n_runs needs dna or mask_control_tags: it is for genomes")
        if not 0 <= self.max_foreign <= 1:
            raise ValueError(f"max_foreign is {self.max_foreign}; a share is between 0 and 1")
        if self.max_foreign != MAX_FOREIGN and not self.genome:
            raise ValueError("max_foreign needs dna or mask_control_tags: no other text is checked")

    @property
    def genome(self) -> bool:
        """Return True if the texts must be nucleotide sequences."""
        return self.dna or self.mask_control_tags

    @property
    def weight_table(self) -> tuple[float, ...]:
        """Loss weights by code; the last is zero, if some tokens have no loss."""
        masks = self.mask_control_tags or self.mask_n_runs is not None
        return (1.0, *[self.masked_weight] * self.dna, *[0.0] * masks)


class ByteTokenizer:
    """Encodes UTF-8 bytes as ids 0–255."""

    def __init__(self, config: ByteConfig) -> None:
        self.config = config
        table = config.weight_table
        self.unsplittable_reason = None
        self.weight_table = table if len(table) > 1 else None
        self.files: dict[str, bytes] = {}
        self._end = 256
        spec = plain(config)
        self._names = {name: 256 + number for number, name in enumerate(config.special_tokens)}
        self.special = {name: SpecialToken(id) for name, id in self._names.items()}
        vocab_size = 256 + len(self._names)
        self._dtype = np.dtype(id_type(vocab_size))
        longest_first = sorted(self._names, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)))
        self.info = TokenizerInfo(
            kind="byte",
            # Covers the ids' meaning, not weights: a mixture may combine DNA and text.
            fingerprint=hashlib.sha256(json.dumps(["byte", *self._names]).encode()).hexdigest(),
            vocab_size=vocab_size,
            end_of_document=self._end,
            spec=spec,
        )

    @property
    def end_name(self) -> str | None:
        return self.config.special_tokens[0]

    def library_file(self) -> bytes:
        letters = letters_by_byte()
        replacements = [
            {"type": "Replace", "pattern": {"String": chr(byte)}, "content": chr(UPPER_IDS[byte])}
            for byte in range(256 * self.config.dna)
            if UPPER_IDS[byte] != byte
        ]
        added_tokens = [
            {"id": id, "content": name, "special": True, "normalized": False, **ADDED_TOKEN_FLAGS}
            for name, id in self._names.items()
        ]
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
        content = {
            "version": "1.0",
            "added_tokens": added_tokens,
            "normalizer": {"type": "Sequence", "normalizers": replacements}
            if replacements
            else None,
            "pre_tokenizer": {**byte_level, "use_regex": False},
            "decoder": {**byte_level, "use_regex": False},
            "model": {
                "type": "BPE",
                "vocab": {letter: byte for byte, letter in letters.items()},
                "merges": [],
            },
        }
        return json.dumps(content, indent=1).encode()

    def encode(self, texts: Sequence[str]) -> Encoded:
        if self.config.parse_special and any(map(self._special.search, texts)):
            return self._encode_special(texts)
        if isinstance(texts, Raw):
            return self._finish(
                np.frombuffer(texts.data, np.uint8), np.concatenate([[0], texts.ends])
            )
        # A separator after each text reserves space for the end token.
        joined = "\0".join([*texts, ""])
        data = np.frombuffer(joined.encode(), np.uint8)
        if len(data) == len(joined):
            lengths = np.fromiter(map(len, texts), np.int64, len(texts))
        else:
            lengths = np.fromiter((len(text.encode()) for text in texts), np.int64, len(texts))
        starts = np.concatenate([[0], np.cumsum(lengths + 1)])
        return self._finish(data, starts)

    def decode(self, ids: Sequence[int]) -> str:
        pieces = []
        special_names = [name.encode() for name in self.config.special_tokens]
        for id in ids:
            if id >= self.info.vocab_size:
                raise ValueError(f"{id} is not an id of this tokenizer")
            pieces.append(bytes([id]) if id < 256 else special_names[id - 256])
        return b"".join(pieces).decode(errors="replace")

    def byte_sizes(self) -> Int64:
        return (np.arange(self.info.vocab_size) < 256).astype(np.int64)

    def spans(self, texts: Sequence[str], encoded: Encoded) -> Int64:
        return spans_from_sizes((encoded.tokens < 256).astype(np.int64), encoded.starts)

    def _finish(self, data: npt.NDArray[np.uint8], starts: Int64) -> Encoded:
        weights = None
        if self.config.dna:
            weights = MASKED_CODES[data]
            weights[starts[1:] - 1] = 0  # a separator may be a letter
            tokens = UPPER_IDS[data]
        else:
            tokens = data.astype(self._dtype)
        tokens[starts[1:] - 1] = self._end
        masks = []
        if self.config.mask_control_tags and len(tokens):
            masks.append(genome.find_control_tags(tokens, starts))
        if self.config.mask_n_runs is not None and len(tokens):
            masks.append(genome.find_n_runs(data, starts, self.config.mask_n_runs))
        for mask in masks:
            weights = np.zeros(len(tokens), np.uint8) if weights is None else weights
            weights[mask] = len(self.config.weight_table) - 1
        return Encoded(tokens, starts, weights)

    def find_misfits(self, encoded: Encoded) -> dict[int, str]:
        return genome.find_misfits(encoded, self.config.max_foreign) if self.config.genome else {}

    def _encode_special(self, texts: Sequence[str]) -> Encoded:
        """Encode texts that contain special tokens (slow)."""
        pieces: list[bytes] = []
        special_positions: list[tuple[int, int]] = []
        starts, offset = [0], 0
        for text in texts:
            previous_end = 0
            for match in self._special.finditer(text):
                plain = text[previous_end : match.start()].encode()
                pieces += [plain, b"\0"]
                special_positions.append((offset + len(plain), self._names[match.group()]))
                offset += len(plain) + 1
                previous_end = match.end()
            plain = text[previous_end:].encode()
            pieces += [plain, b"\0"]
            offset += len(plain) + 1
            starts.append(offset)
        encoded = self._finish(
            np.frombuffer(b"".join(pieces), np.uint8), np.array(starts, np.int64)
        )
        for position, id in special_positions:
            encoded.tokens[position] = id
        return encoded


def restore(info: TokenizerInfo, read: Callable[[str], bytes]) -> ByteTokenizer:
    spec = {**info.spec, "special_tokens": tuple(info.spec["special_tokens"])}
    return ByteTokenizer(ByteConfig(**spec))
