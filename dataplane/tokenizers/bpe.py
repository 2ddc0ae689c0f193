"""Byte-level BPE, from a file in the `tokenizers` library's format.

Every text gets the same ids as from that library.
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
from .fast_bpe import BATCH_CHARACTERS, FastBpe, Inexact, convert, decode_token
from .tokenizer import Encoded, SpecialToken, TextError, id_type, spans_from_sizes

PACKAGES = ("tokenizers", "fastokens")

END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
"""Usual end-of-document tokens, tried in this order."""

MIN_FAST_CHARACTERS = 256 << 10
"""Characters before the fast path pays off: it takes time to start."""
MAX_SLOW_CHARACTERS = 4 << 20
"""Text length beyond which `tokenizers` takes more than 512 MiB of memory."""


@dataclass(frozen=True, kw_only=True)
class BpeConfig:
    """Settings of a tokenizer.json."""

    end_of_document: str | None = None
    """The token that ends every document; None: the first usual name in the vocabulary."""
    parse_special: bool = False
    """True: special tokens found in the text are encoded as special tokens, else as text."""


def load(source: str, config: BpeConfig) -> BpeTokenizer:
    """Load a tokenizer from a JSON file, or from a repository on the Hub."""
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
        self,
        content: bytes,
        config: BpeConfig,
        *,
        source: str,
        fast_from: int = MIN_FAST_CHARACTERS,
    ) -> None:
        """The fast path starts once `fast_from` characters were encoded."""
        self._fast_from = fast_from
        self._source = content, config.parse_special
        try:
            self.tokenizer = _load_library_tokenizer(*self._source)
        except Exception as error:  # the library raises bare Exceptions
            raise InputError(
                f"{source} is not a tokenizer in the JSON format of `tokenizers`: {error}",
                hint="use a tokenizer.json, or train one with `tokenize train`",
            ) from None
        self.weight_table = None
        self._num_characters = 0
        """Characters encoded so far."""
        vocabulary = self.tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise InputError(f"the tokenizer {source} has no tokens")
        end_name = config.end_of_document or next(
            (end for end in END_NAMES if end in vocabulary), None
        )
        hint = "name the token that ends a document with --end-of-document"
        if end_name is None:
            raise InputError(
                f"the tokenizer {source} has none of the usual end-of-document tokens", hint=hint
            )
        if end_name not in vocabulary:
            raise MisuseError(f"the tokenizer {source} has no token `{end_name}`", hint=hint)
        # The library splits texts at added tokens before it splits words, so texts with an added
        # token are encoded by the library.
        added = self.tokenizer.get_added_tokens_decoder().values()
        self.special = {
            token.content: SpecialToken(vocabulary[token.content], token.lstrip, token.rstrip)
            for token in added
            if token.special
        }
        token_texts = [
            token.content for token in added if config.parse_special or not token.special
        ]
        if getattr(self.tokenizer.model, "ignore_merges", False):
            # A word that equals an added token becomes its id, although no merge produces it.
            words = self.tokenizer.get_vocab(with_added_tokens=False)
            names = [decode_token(token.content) for token in added if token.content in words]
            token_texts += [name for name in names if name]
        normalizer = self.tokenizer.normalizer
        self._normalize = None if normalizer is None else normalizer.normalize_str
        if self._normalize is not None:  # some are searched for in the normalized text
            token_texts += [self._normalize(token_text) for token_text in token_texts]
        self._token_texts = tuple(token_texts)
        digest = hashlib.sha256(content).hexdigest()
        vocab_size = max(vocabulary.values()) + 1
        self._dtype = np.dtype(id_type(vocab_size))
        file = f"tokenizers/{digest[:32]}.json"
        self.files = {file: content}
        spec = {
            "file": file,
            "sha256": digest,
            "end_of_document": end_name,
            "parse_special": config.parse_special,
        }
        self.info = TokenizerInfo(
            kind="bpe",
            fingerprint=hashlib.sha256(json.dumps(["bpe", digest, end_name]).encode()).hexdigest(),
            vocab_size=vocab_size,
            end_of_document=vocabulary[end_name],
            spec=spec,
        )

    @property
    def end_name(self) -> str | None:
        return str(self.info.spec["end_of_document"])

    def library_file(self) -> bytes:
        return self._source[0]

    @cached_property
    def _fast(self) -> FastBpe | Inexact:
        return _try_convert(*self._source)

    @property
    def slow_reason(self) -> str | None:
        """Why all texts need the `tokenizers` library, or None."""
        return str(self._fast) if isinstance(self._fast, Inexact) else None

    @property
    def unsplittable_reason(self) -> str | None:
        """Why the ids of a text are not those of its parts between special tokens, or None."""
        adds_space = any(step.get("prepend_scheme") == "first" for step in self._steps)
        return "it puts a space before the first word of a text alone" if adds_space else None

    def encode(self, texts: Sequence[str]) -> Encoded:
        batches = [self._encode(texts[first:end], first) for first, end in _split_batches(texts)]
        tokens = np.concatenate([np.empty(0, self._dtype), *(ids for ids, _ in batches)])
        starts, offset = [np.zeros(1, np.int64)], 0
        for ids, ends in batches:
            starts.append(ends + offset)
            offset += len(ids)
        return Encoded(tokens, np.concatenate(starts))

    def _encode(self, texts: Sequence[str], first_number: int) -> tuple[Any, npt.NDArray[np.int64]]:
        """Return ids, with end-of-document ids, and end offsets [texts]. `first_number` numbers the
        first text, for errors."""
        end_id = self.info.end_of_document
        assert end_id is not None
        self._num_characters += sum(map(len, texts))
        if self._num_characters < self._fast_from or isinstance(self._fast, Inexact):
            return self._encode_slowly(texts, end_id, first_number)
        normalized, originals = list(texts), []
        if self._normalize is not None:
            originals = [text for text in texts if not text.isascii()]
            normalized = [text if text.isascii() else self._normalize(text) for text in texts]
        # The library searches for some added tokens before normalization, for some after.
        if not self._has_token_text(*normalized, *originals):
            return self._fast.encode(normalized, end_id)
        pieces = []
        for number, (original, text) in enumerate(
            zip(texts, normalized, strict=True), start=first_number
        ):
            if self._has_token_text(text, original):
                pieces.append(self._encode_slowly([original], end_id, number)[0])
            else:
                pieces.append(self._fast.encode([text], end_id)[0])
        return np.concatenate(pieces), np.cumsum([len(piece) for piece in pieces], dtype=np.int64)

    def _has_token_text(self, *texts: str) -> bool:
        return any(token_text in text for token_text in self._token_texts for text in texts)

    def _encode_slowly(
        self, texts: Sequence[str], end_id: int, first_number: int
    ) -> tuple[Any, npt.NDArray[np.int64]]:
        """Encode by the `tokenizers` library, whose ids are right by definition."""
        pieces = []
        for number, text in enumerate(texts, start=first_number):
            if len(text) > MAX_SLOW_CHARACTERS:
                why = self.slow_reason or "it contains the name of a token"
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
            pieces.append(np.array([*encoding.ids, end_id], self._dtype))
        return np.concatenate(pieces), np.cumsum([len(piece) for piece in pieces], dtype=np.int64)

    def spans(self, texts: Sequence[str], encoded: Encoded) -> Int64:
        sizes = self._sizes[encoded.tokens]
        sizes[encoded.starts[1:] - 1] = 0
        spans = spans_from_sizes(sizes, encoded.starts)
        end_positions = spans[encoded.starts[1:] - 1, 1].tolist()
        bounds = encoded.starts.tolist()
        for number, (text, end_position) in enumerate(zip(texts, end_positions, strict=True)):
            if self._byte_level and end_position == len(text.encode()) and self._unchanged(text):
                continue
            # The library knows where its ids come from, in characters.
            offsets = self.tokenizer.encode(text, add_special_tokens=False).offsets
            positions = np.array([*offsets, (len(text), len(text))], np.int64)
            if not text.isascii():
                lengths = [len(letter.encode()) for letter in text]
                positions = np.concatenate([[0], np.cumsum(lengths)])[positions]
            spans[bounds[number] : bounds[number + 1]] = np.maximum.accumulate(positions)
        return spans

    def _unchanged(self, text: str) -> bool:
        return self._normalize is None or text.isascii() or self._normalize(text) == text

    @cached_property
    def _sizes(self) -> Int64:
        return self.byte_sizes()

    @cached_property
    def _steps(self) -> list[dict[str, Any]]:
        """Steps that split texts into words."""
        pre_tokenizer = json.loads(self.tokenizer.to_str()).get("pre_tokenizer") or {}
        return list(pre_tokenizer.get("pretokenizers", [pre_tokenizer]))

    @property
    def _byte_level(self) -> bool:
        """True if a character of a token stands for a byte of text."""
        return any(step.get("type") == "ByteLevel" for step in self._steps)

    def find_misfits(self, encoded: Encoded) -> dict[int, str]:
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
def _load_library_tokenizer(content: bytes, parse_special: bool) -> Any:
    """Build the library's tokenizer. Cached, because a build opens it twice."""
    from tokenizers import Tokenizer

    tokenizer: Any = Tokenizer.from_str(content.decode())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = not parse_special
    return tokenizer


@lru_cache(maxsize=2)
def _try_convert(content: bytes, parse_special: bool) -> FastBpe | Inexact:
    """Convert a tokenizer to the fast path, or return the reason why not."""
    try:
        return convert(json.loads(_load_library_tokenizer(content, parse_special).to_str()))
    except Inexact as reason:
        return reason


def _split_batches(texts: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield ranges [first, end) of texts, with about BATCH_CHARACTERS characters per range."""
    first = size = 0
    for number, text in enumerate(texts):
        if size and size + len(text) > BATCH_CHARACTERS:
            yield first, number
            first, size = number, 0
        size += len(text)
    if first < len(texts):
        yield first, len(texts)


def restore(info: TokenizerInfo, read: Callable[[str], bytes]) -> BpeTokenizer:
    content = read(info.spec["file"])
    config = BpeConfig(
        end_of_document=info.spec["end_of_document"], parse_special=info.spec["parse_special"]
    )
    return BpeTokenizer(content, config, source=info.spec["file"])
