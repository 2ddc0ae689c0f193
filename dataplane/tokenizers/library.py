"""A tokenizer's file in the format of the `tokenizers` library, opened by it only where needed.

Building the library's tokenizer takes a tenth of a second for 32k tokens, and ten times that for
256k. A build that encodes by the fast path needs what the file says, no more.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from pydantic_core import from_json

ADDED_TOKEN_KEYS = frozenset(
    ("id", "content", "single_word", "lstrip", "rstrip", "normalized", "special")
)
PLAIN_KINDS = {
    "decoder": ("ByteLevel",),
    "post_processor": ("ByteLevel", "TemplateProcessing"),
    "normalizer": ("NFC",),
    "pre_tokenizer": ("ByteLevel", "Sequence"),
}
"""Kinds of steps in files that are read here."""


@lru_cache(maxsize=2)
def load_library(content: bytes, parse_special: bool) -> Any:
    """Build the library's tokenizer; raise what the library raises. Cached, because a build opens
    it twice."""
    from tokenizers import Tokenizer

    tokenizer: Any = Tokenizer.from_str(content.decode())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = not parse_special
    return tokenizer


def load_word_encoder(content: bytes) -> Callable[[Sequence[str]], list[list[int]]]:
    """Return a function that encodes words by the library's model alone: without normalizer,
    pre-tokenizer and added tokens."""
    from tokenizers import Tokenizer

    bare: Any = Tokenizer(load_library(content, False).model)

    def encode(words: Sequence[str]) -> list[list[int]]:
        encodings = bare.encode_batch_fast(list(words), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    return encode


@lru_cache(maxsize=2)
def read_description(content: bytes) -> dict[str, Any]:
    """Return a file's content as the library writes it; raise what the library raises."""
    try:
        description = from_json(content)
        if _is_plain(description):
            return dict(description)
    except (ValueError, KeyError, TypeError, AttributeError):
        pass  # the library says what is wrong
    return dict(json.loads(load_library(content, False).to_str()))


def _is_plain(description: Mapping[str, Any]) -> bool:
    """Return True for a usual file of byte-level BPE, which the library reads without change."""
    model, tokens = description["model"], description["added_tokens"]
    vocabulary = model["vocab"]
    return (
        description["version"] == "1.0"
        and description["truncation"] is None
        and description["padding"] is None
        and all(
            description[step] is None or description[step]["type"] in kinds
            for step, kinds in PLAIN_KINDS.items()
        )
        and model["type"] == "BPE"
        and len(vocabulary) > 0
        and set(map(type, vocabulary.values())) == {int}
        and min(vocabulary.values()) >= 0
        and all(token.keys() == ADDED_TOKEN_KEYS for token in tokens)
        and _are_numbered(tokens, vocabulary)
    )


def _are_numbered(tokens: list[Mapping[str, Any]], vocabulary: Mapping[str, int]) -> bool:
    """Return True if added tokens have the ids that the library gives them: that of the vocabulary,
    or the next free one."""
    next_id = len(vocabulary)
    ids: set[int] = set()
    for token in tokens:
        id = vocabulary.get(token["content"], next_id)
        if not token["content"] or token["id"] != id or id in ids:
            return False
        ids.add(id)
        next_id = max(next_id, id + 1)
    return True
