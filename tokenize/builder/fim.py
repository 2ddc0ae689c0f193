"""Fill-in-the-middle (Bavarian et al., 2022): some documents are rearranged, so that a model learns
to write the part between two others.

    PSM    PRE prefix SUF suffix MID middle (EOT)
    SPM    PRE SUF suffix MID prefix | middle (EOT)

A whole document is rearranged, before rows are cut from the dataset. It is split at two uniformly
drawn characters. Parts are encoded separately, even prefix and middle of SPM: a model that is asked
for a middle gets a prefix that ends anywhere. All draws come from a hash of seed and text, so they
do not depend on workers, files or the order of documents.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...console.errors import MisuseError
from ...dataplane.tokenizers import SpecialToken, Tokenizer
from ...dataplane.tokenizers.marks import NO_TOKEN, TextSpans

MIN_CHARACTERS = 3
"""Lower bound on a rearranged document's length: one character per part."""
PSM, SPM, TOO_SHORT = "PSM", "SPM", "too short"
COUNT_PREFIX = "fill-in-the-middle: "
"""Prefix in count names; manifests store them."""


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
    """Raise if a sentinel is no special token or ends documents, or if the tokenizer encodes parts
    of a text differently from the whole text."""
    special_tokens = tokenizer.special
    for name in config.sentinels:
        if name not in special_tokens:
            option = "; add it with --special" if tokenizer.info.kind == "byte" else ""
            raise MisuseError(
                f"the sentinel {name} is no special token of the tokenizer{option}",
                hint="its special tokens: " + (", ".join(list(special_tokens)[:40]) or "none"),
            )
        if special_tokens[name].id == tokenizer.info.end_of_document:
            raise MisuseError(
                f"the sentinel {name} is the token that ends documents",
                hint="use another special token: a sentinel stands within a document",
            )
    separate, joined = tokenizer.encode(["A", "C"]), tokenizer.encode(["AC"])
    separate_ids = separate.tokens[separate.tokens != tokenizer.info.end_of_document]
    if tokenizer.decode(separate_ids.tolist()) != tokenizer.decode(joined.tokens[:-1].tolist()):
        raise MisuseError(
            "--fim cannot use this tokenizer: it puts a space before each part of a document",
            hint="use a byte-level tokenizer, as those of GPT-2, Llama 3 or Qwen",
        )


class Rearrangement:
    """Rearranges documents."""

    def __init__(self, config: FimConfig, special: Mapping[str, SpecialToken]) -> None:
        self.config = config
        self._ids = [special[name].id for name in config.sentinels]

    def rearrange(self, texts: Sequence[str]) -> tuple[list[str], list[TextSpans]]:
        """Return texts with their parts in new order, and the spans of sentinels; texts that are
        not rearranged come back unchanged."""
        pairs = [self._rearrange(text) for text in texts]
        return [text for text, _ in pairs], [marks for _, marks in pairs]

    def count(self, texts: Iterable[str]) -> Counter[str]:
        """Count rearranged texts, by order, and texts that are too short."""
        orders = (self._draw(text)[0] for text in texts)
        return Counter(COUNT_PREFIX + order for order in orders if order is not None)

    def _rearrange(self, text: str) -> tuple[str, TextSpans]:
        order, low, high = self._draw(text)
        if order not in (PSM, SPM):
            return text, TextSpans()
        prefix, middle, suffix = text[:low], text[low:high], text[high:]
        first_id, second_id, third_id, *end_ids = self._ids
        if order == PSM:
            pieces = [(first_id, prefix), (second_id, suffix), (third_id, middle)]
        else:
            pieces = [(first_id, ""), (second_id, suffix), (third_id, prefix), (NO_TOKEN, middle)]
        special, position = [], 0
        for id, piece in [*pieces, *((id, "") for id in end_ids)]:
            special.append((position, position, id))
            position += len(piece)
        return "".join(piece for _, piece in pieces), TextSpans(tuple(special))

    def _draw(self, text: str) -> tuple[str | None, int, int]:
        """Draw the order of a document's parts (or None) and the two places where it is split."""
        seed = self.config.seed.to_bytes(16, "little", signed=True)
        digest = hashlib.blake2b(text.encode(), digest_size=32, key=seed, person=b"fim").digest()
        rate_draw, order_draw, *places = (
            int.from_bytes(digest[k : k + 8], "little") for k in (0, 8, 16, 24)
        )
        if rate_draw >= self.config.rate * 2**64:
            return None, 0, 0
        if len(text) < MIN_CHARACTERS:
            return TOO_SHORT, 0, 0
        low, high = sorted(place * (len(text) + 1) >> 64 for place in places)
        return SPM if order_draw < self.config.spm * 2**64 else PSM, low, high
