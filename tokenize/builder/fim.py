"""Fill-in-the-middle (Bavarian et al., 2022): some documents are rearranged, so that a model learns
to write the part between two others.

    PSM    PRE prefix SUF suffix MID middle (EOT)
    SPM    PRE SUF suffix MID prefix | middle (EOT)

A whole document is rearranged, before rows are cut from the dataset. It is split at two characters,
drawn uniformly. The parts are encoded by themselves, also prefix and middle of SPM: a model that is
asked for a middle gets a prefix that ends anywhere. Everything is drawn from a hash of the seed and
the text, so it does not depend on workers, files or the order of documents.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...console.errors import MisuseError
from ...dataplane.tokenizers import SpecialToken, Tokenizer
from ...dataplane.tokenizers.marks import CUT, Marks

SHORTEST = 3
"""Characters of the shortest document that is rearranged: one for each part."""
PSM, SPM, TOO_SHORT = "PSM", "SPM", "too short"
COUNTED = "fill-in-the-middle: "
"""Beginning of the names of the counts; manifests store them."""


@dataclass(frozen=True, kw_only=True)
class FimConfig:
    """Settings of fill-in-the-middle. Documents of fewer than three characters stay as they are; a
    tokenizer that puts a space before each text is refused. Manifests store these settings: do
    not rename them."""

    rate: float
    """Share of the documents that are rearranged."""
    sentinels: tuple[str, ...]
    """Special tokens before prefix, suffix and middle, and (optional) after the middle."""
    spm: float = 0.5
    """Share of the rearranged documents that begin with the suffix."""
    seed: int = 0
    """Seed of the choices."""

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise ValueError(f"the rate is {self.rate}; it must be above 0 and at most 1")
        if not 0 <= self.spm <= 1:
            raise ValueError(f"the share of SPM is {self.spm}; a share is between 0 and 1")
        if abs(self.seed) >= 1 << 63:
            raise ValueError(f"the seed is {self.seed}; it must fit into 64 bits")
        if len(self.sentinels) not in (3, 4) or len(set(self.sentinels)) < len(self.sentinels):
            raise ValueError(
                "the sentinels must be three or four different special tokens: PRE,SUF,MID[,EOT], "
                f"not {','.join(self.sentinels)}"
            )


def check_tokenizer(config: FimConfig, tokenizer: Tokenizer) -> None:
    """Raise if a sentinel is no special token of the tokenizer or ends documents, or if the
    tokenizer does not encode parts of a text as parts."""
    known = tokenizer.special
    for name in config.sentinels:
        if name not in known:
            option = "; add it with --special" if tokenizer.info.kind == "byte" else ""
            raise MisuseError(
                f"the sentinel {name} is no special token of the tokenizer{option}",
                hint="its special tokens: " + (", ".join(list(known)[:40]) or "none"),
            )
        if known[name].id == tokenizer.info.end_of_document:
            raise MisuseError(
                f"the sentinel {name} is the token that ends documents",
                hint="use another special token: a sentinel stands within a document",
            )
    apart, whole = tokenizer.encode(["A", "C"]), tokenizer.encode(["AC"])
    plain = apart.tokens[apart.tokens != tokenizer.info.end_of_document]
    if tokenizer.decode(plain.tolist()) != tokenizer.decode(whole.tokens[:-1].tolist()):
        raise MisuseError(
            "--fim cannot use this tokenizer: it puts a space before each part of a document",
            hint="use a byte-level tokenizer, as those of GPT-2, Llama 3 or Qwen",
        )


class Rearrangement:
    """Rearranges documents."""

    def __init__(self, config: FimConfig, special: Mapping[str, SpecialToken]) -> None:
        self.config = config
        self._ids = [special[name].id for name in config.sentinels]

    def of(self, texts: Sequence[str]) -> tuple[list[str], list[Marks]]:
        """Return the parts of each text in their new order, and the sentinels between them. A text
        that is not rearranged comes back as it is."""
        pairs = [self._rearranged(text) for text in texts]
        return [text for text, _ in pairs], [marks for _, marks in pairs]

    def count(self, texts: Iterable[str]) -> Counter[str]:
        """Count the texts that are rearranged, by their order, and those that are too short."""
        orders = (self._draw(text)[0] for text in texts)
        return Counter(COUNTED + order for order in orders if order is not None)

    def _rearranged(self, text: str) -> tuple[str, Marks]:
        order, low, high = self._draw(text)
        if order not in (PSM, SPM):
            return text, Marks()
        prefix, middle, suffix = text[:low], text[low:high], text[high:]
        before, after, between, *end = self._ids
        if order == PSM:
            parts = [(before, prefix), (after, suffix), (between, middle)]
        else:
            parts = [(before, ""), (after, suffix), (between, prefix), (CUT, middle)]
        special, at = [], 0
        for id, part in [*parts, *((id, "") for id in end)]:
            special.append((at, at, id))
            at += len(part)
        return "".join(part for _, part in parts), Marks(tuple(special))

    def _draw(self, text: str) -> tuple[str | None, int, int]:
        """Return the order of a document's parts, or None, and the two places where it is split."""
        seed = self.config.seed.to_bytes(16, "little", signed=True)
        digest = hashlib.blake2b(text.encode(), digest_size=32, key=seed, person=b"fim").digest()
        chosen, order, *places = (
            int.from_bytes(digest[k : k + 8], "little") for k in (0, 8, 16, 24)
        )
        if chosen >= self.config.rate * 2**64:
            return None, 0, 0
        if len(text) < SHORTEST:
            return TOO_SHORT, 0, 0
        low, high = sorted(place * (len(text) + 1) >> 64 for place in places)
        return SPM if order < self.config.spm * 2**64 else PSM, low, high
