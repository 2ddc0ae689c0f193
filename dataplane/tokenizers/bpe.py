"""Byte-level BPE, from a file in the format of the `tokenizers` library.

The ids are those of that library, for every text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ...console.errors import InputError, MisuseError, StorageError
from ...console.explain import path_hint
from ..arrays import Int64
from ..datasets.manifest import TokenizerInfo
from ..storage import hub, storage
from .fast_bpe import BATCH, FastBpe, Inexact, convert, spelled
from .tokenizer import Encoded, SpecialToken, TextError, id_type, spans_of_sizes

PACKAGES = ("tokenizers", "fastokens")

ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
"""Usual names of the end-of-document token, tried in this order."""

FEW = 256 << 10
"""Characters from which on the fast path pays off: it takes time to start."""
SLOW_LIMIT = 4 << 20
"""Characters of a text beyond which `tokenizers` takes more than 512 MiB of memory."""


@dataclass(frozen=True, kw_only=True)
class BpeConfig:
    """Settings of a tokenizer.json."""

    end_of_document: str | None = None
    """The token that ends every document; None: the first usual name in the vocabulary."""
    parse_special: bool = False
    """True: special tokens found in the text are encoded as special tokens, else as text."""


def load(source: str, config: BpeConfig) -> BpeTokenizer:
    """Load a tokenizer from its JSON file, or from a repository of the Hub that has one."""
    source = hub.file_url(source, "tokenizer.json")
    if not storage.exists(source):
        hint = "name a tokenizer.json, or the tokenizer `byte`"
        if storage.is_local(source):
            hint = path_hint(storage.local_path(source), hint)
        raise StorageError(f"there is no tokenizer {source}", hint=hint)
    return BpeTokenizer(storage.read(source), config, source=source)


class BpeTokenizer:
    """A tokenizer.json, on the fast path (fast_bpe.py) where that gives equal ids."""

    def __init__(
        self, text: bytes, config: BpeConfig, *, source: str, fast_from: int = FEW
    ) -> None:
        """The fast path starts once `fast_from` characters were encoded."""
        self._fast_from = fast_from
        self._source = text, config.parse_special
        try:
            self.tokenizer = _library(*self._source)
        except Exception as error:  # the library raises bare Exceptions
            raise InputError(
                f"{source} is not a tokenizer in the JSON format of `tokenizers`: {error}",
                hint="use a tokenizer.json, or train one with `tokenize train`",
            ) from None
        self.weight_table = None
        self._seen = 0
        """Characters of the texts encoded so far."""
        vocabulary = self.tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise InputError(f"the tokenizer {source} has no tokens")
        name = config.end_of_document or next((end for end in ENDS if end in vocabulary), None)
        hint = "name the token that ends a document with --end-of-document"
        if name is None:
            raise InputError(
                f"the tokenizer {source} has none of the usual end-of-document tokens", hint=hint
            )
        if name not in vocabulary:
            raise MisuseError(f"the tokenizer {source} has no token `{name}`", hint=hint)
        # The library splits texts at added tokens before it splits them into words. It encodes the
        # texts that have one.
        added = self.tokenizer.get_added_tokens_decoder().values()
        self.special = {
            token.content: SpecialToken(vocabulary[token.content], token.lstrip, token.rstrip)
            for token in added
            if token.special
        }
        marks = [token.content for token in added if config.parse_special or not token.special]
        if getattr(self.tokenizer.model, "ignore_merges", False):
            # A word that equals such a token becomes its id, although no merge produces it.
            words = self.tokenizer.get_vocab(with_added_tokens=False)
            names = [spelled(token.content) for token in added if token.content in words]
            marks += [name for name in names if name]
        normalizer = self.tokenizer.normalizer
        self._normalize = None if normalizer is None else normalizer.normalize_str
        if self._normalize is not None:  # some are searched for in the normalized text
            marks += [self._normalize(name) for name in marks]
        self._marks = tuple(marks)
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
            fingerprint=hashlib.sha256(json.dumps(["bpe", digest, name]).encode()).hexdigest(),
            vocab_size=vocab_size,
            end_of_document=vocabulary[name],
            spec=spec,
        )

    @property
    def end_name(self) -> str | None:
        return str(self.info.spec["end_of_document"])

    def library_file(self) -> bytes:
        return self._source[0]

    @cached_property
    def _fast(self) -> FastBpe | Inexact:
        return _convert(*self._source)

    @property
    def slow_because(self) -> str | None:
        """Why the `tokenizers` library must encode all texts, or None if it need not."""
        return str(self._fast) if isinstance(self._fast, Inexact) else None

    @property
    def whole_because(self) -> str | None:
        """Why the ids of a text are not those of its parts between special tokens, or None."""
        first = any(step.get("prepend_scheme") == "first" for step in self._steps)
        return "it puts a space before the first word of a text alone" if first else None

    def encode(self, texts: Sequence[str]) -> Encoded:
        batches = [self._encode(texts[first:last], first) for first, last in _batches(texts)]
        tokens = np.concatenate([np.empty(0, self._dtype), *(ids for ids, _ in batches)])
        starts, offset = [np.zeros(1, np.int64)], 0
        for ids, ends in batches:
            starts.append(ends + offset)
            offset += len(ids)
        return Encoded(tokens, np.concatenate(starts))

    def _encode(self, texts: Sequence[str], first: int) -> tuple[Any, npt.NDArray[np.int64]]:
        """Return the ids of texts, each with its end-of-document id, and where each text ends.
        `first` is the number of the first text, for errors."""
        end = self.info.end_of_document
        assert end is not None
        self._seen += sum(map(len, texts))
        if self._seen < self._fast_from or isinstance(self._fast, Inexact):
            return self._encode_slowly(texts, end, first)
        plain, changed = list(texts), []
        if self._normalize is not None:
            changed = [text for text in texts if not text.isascii()]
            plain = [text if text.isascii() else self._normalize(text) for text in texts]
        # some marks are searched for before normalization, some after
        if not any(mark in text for mark in self._marks for text in (*plain, *changed)):
            return self._fast.encode(plain, end)
        parts = []
        for number, (original, text) in enumerate(zip(texts, plain, strict=True), start=first):
            if any(mark in text or mark in original for mark in self._marks):
                parts.append(self._encode_slowly([original], end, number)[0])
            else:
                parts.append(self._fast.encode([text], end)[0])
        return np.concatenate(parts), np.cumsum([len(part) for part in parts], dtype=np.int64)

    def _encode_slowly(
        self, texts: Sequence[str], end: int, first: int
    ) -> tuple[Any, npt.NDArray[np.int64]]:
        """The same through the `tokenizers` library, whose ids are right by definition."""
        parts = []
        for number, text in enumerate(texts, start=first):
            if len(text) > SLOW_LIMIT:
                why = self.slow_because or "it contains the name of a token"
                raise TextError(
                    number,
                    f"{len(text):,} characters are too many for the `tokenizers` library, which "
                    f"must encode this text ({why})",
                )
            try:
                encoding = self.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0]
            except BaseException as error:  # its panics are not Exceptions
                if type(error).__name__ != "PanicException":
                    raise
                raise TextError(number, f"the `tokenizers` library failed: {error}") from None
            parts.append(np.array([*encoding.ids, end], self._dtype))
        return np.concatenate(parts), np.cumsum([len(part) for part in parts], dtype=np.int64)

    def spans(self, texts: Sequence[str], encoded: Encoded) -> Int64:
        sizes = self._sizes[encoded.tokens]
        sizes[encoded.starts[1:] - 1] = 0
        spans = spans_of_sizes(sizes, encoded.starts)
        ends = spans[encoded.starts[1:] - 1, 1].tolist()
        bounds = encoded.starts.tolist()
        for number, (text, end) in enumerate(zip(texts, ends, strict=True)):
            if self._byte_level and end == len(text.encode()) and self._unchanged(text):
                continue
            # The library knows where its ids come from, in characters.
            found = self.tokenizer.encode(text, add_special_tokens=False).offsets
            places = np.array([*found, (len(text), len(text))], np.int64)
            if not text.isascii():
                lengths = [len(letter.encode()) for letter in text]
                places = np.concatenate([[0], np.cumsum(lengths)])[places]
            spans[bounds[number] : bounds[number + 1]] = np.maximum.accumulate(places)
        return spans

    def _unchanged(self, text: str) -> bool:
        return self._normalize is None or text.isascii() or self._normalize(text) == text

    @cached_property
    def _sizes(self) -> Int64:
        return self.byte_sizes()

    @cached_property
    def _steps(self) -> list[dict[str, Any]]:
        """The steps that split a text into words."""
        before = json.loads(self.tokenizer.to_str()).get("pre_tokenizer") or {}
        return list(before.get("pretokenizers", [before]))

    @property
    def _byte_level(self) -> bool:
        """Return True if each character of a token stands for a byte of text."""
        return any(step.get("type") == "ByteLevel" for step in self._steps)

    def misfits(self, encoded: Encoded) -> dict[int, str]:
        return {}

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def byte_sizes(self) -> Int64:
        sizes = np.zeros(self.info.vocab_size, np.int64)
        for token, id in self.tokenizer.get_vocab(with_added_tokens=False).items():
            sizes[id] = len(token)  # byte-level: a character of a token stands for a byte
        for id, token in self.tokenizer.get_added_tokens_decoder().items():
            sizes[id] = 0 if token.special else len(token.content.encode())
        return sizes


@lru_cache(maxsize=2)
def _library(text: bytes, parse_special: bool) -> Any:
    """Return the library's tokenizer. Cached, because a build opens it twice."""
    from tokenizers import Tokenizer

    tokenizer: Any = Tokenizer.from_str(text.decode())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = not parse_special
    return tokenizer


@lru_cache(maxsize=2)
def _convert(text: bytes, parse_special: bool) -> FastBpe | Inexact:
    """Convert a tokenizer to the fast path, or return why not."""
    try:
        return convert(json.loads(_library(text, parse_special).to_str()))
    except Inexact as reason:
        return reason


def _batches(texts: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield ranges [first, last) of texts of about BATCH characters each."""
    first = size = 0
    for number, text in enumerate(texts):
        if size and size + len(text) > BATCH:
            yield first, number
            first, size = number, 0
        size += len(text)
    if first < len(texts):
        yield first, len(texts)


def restore(info: TokenizerInfo, read: Callable[[str], bytes]) -> BpeTokenizer:
    text = read(info.spec["file"])
    config = BpeConfig(
        end_of_document=info.spec["end_of_document"], parse_special=info.spec["parse_special"]
    )
    return BpeTokenizer(text, config, source=info.spec["file"])
