"""Byte-level BPE, from a file in the format of the `tokenizers` library.

The ids are those of that library, for every text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...console.errors import InputError, IntegrityError
from .. import storage
from ..manifest import TokenizerInfo
from . import Encoded, id_type

ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
"""What tokenizers call the end of a document, tried in this order."""


@dataclass(frozen=True, kw_only=True)
class BpeConfig:
    end_of_document: str | None = None
    """The token that ends every document; None: the first of the usual names that it has."""
    parse_special: bool = False
    """Whether a special token's name within a text stands for its id; otherwise it is text."""


class BpeTokenizer:
    def __init__(self, text: bytes, config: BpeConfig, *, source: str) -> None:
        from tokenizers import Tokenizer

        try:
            self.tokenizer: Any = Tokenizer.from_str(text.decode())
        except Exception as error:  # the library raises bare Exceptions
            raise InputError(
                f"{source} is not a tokenizer in the JSON format of `tokenizers`: {error}",
                mend="bring a tokenizer.json, or train one with `tokenize train`",
            ) from None
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.tokenizer.encode_special_tokens = not config.parse_special
        self.palette = None
        vocabulary = self.tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise InputError(f"the tokenizer {source} has no tokens")
        name = config.end_of_document or next((end for end in ENDS if end in vocabulary), None)
        if name is None or name not in vocabulary:
            what = f"no token `{name}`" if name else "none of the usual ends of a document"
            raise InputError(
                f"the tokenizer {source} has {what}",
                mend="name the token that ends a document with --end-of-document",
            )
        digest = hashlib.sha256(text).hexdigest()
        vocab_size = max(vocabulary.values()) + 1
        self._dtype = np.dtype(id_type(vocab_size))
        file = f"tokenizers/{digest[:32]}.json"
        self.files = {file: text}
        spec = {
            "file": file,
            "sha256": digest,
            "end_of_document": name,
            "parse_special": config.parse_special,
        }
        self.info = TokenizerInfo(
            kind="bpe",
            fingerprint=hashlib.sha256(json.dumps(["bpe", spec]).encode()).hexdigest(),
            vocab_size=vocab_size,
            end_of_document=vocabulary[name],
            spec=spec,
        )

    def encode(self, texts: Sequence[str]) -> Encoded:
        found = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        ids = [encoding.ids for encoding in found]
        lengths = np.fromiter((len(part) + 1 for part in ids), np.int64, len(ids))
        starts = np.concatenate([[0], np.cumsum(lengths)])
        tokens = np.empty(starts[-1], self._dtype)
        for part, start in zip(ids, starts.tolist(), strict=False):
            tokens[start : start + len(part)] = part
        tokens[starts[1:] - 1] = self.info.end_of_document
        return Encoded(tokens, starts)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))


def restore(info: TokenizerInfo, url: str) -> BpeTokenizer:
    where = storage.join(url, info.spec["file"])
    text = storage.read(where)
    if hashlib.sha256(text).hexdigest() != info.spec["sha256"]:
        raise IntegrityError(
            f"{where} is not the tokenizer that the manifest names",
            mend="copy the dataset's tokenizer back, or build the dataset again",
        )
    config = BpeConfig(
        end_of_document=info.spec["end_of_document"], parse_special=info.spec["parse_special"]
    )
    return BpeTokenizer(text, config, source=where)
