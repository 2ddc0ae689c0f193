"""Byte-level BPE, from a file in the `tokenizers` library's format.

Every text gets the same ids as from that library.
"""

from __future__ import annotations

import hashlib
import itertools
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
from .added_tokens import AddedTokens, Normalize, Part
from .fast_bpe import FastBpe, Inexact, convert
from .library import load_library, load_word_encoder, read_description
from .tokenizer import Encoded, SpecialToken, TextError, id_type, spans_from_sizes
from .word_cache import WordCache, convert_words, replaces_spaces

Ids = tuple[npt.NDArray[Any], npt.NDArray[np.int64]]
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
    """A tokenizer.json, on a fast path (fast_bpe.py, word_cache.py) where that gives equal ids."""

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
        self._content, self._parse_special, self._name = content, config.parse_special, source
        self._description = self._open(read_description, content)
        self.weight_table = None
        self._num_characters = 0
        """Characters encoded so far."""
        added = sorted(self._description["added_tokens"], key=lambda token: int(token["id"]))
        vocabulary: dict[str, int] = self._description["model"]["vocab"]
        if added:
            vocabulary = vocabulary | {token["content"]: token["id"] for token in added}
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
        self._vocabulary = vocabulary
        self.special = {
            token["content"]: SpecialToken(token["id"], token["lstrip"], token["rstrip"])
            for token in added
            if token["special"]
        }
        digest = hashlib.sha256(content).hexdigest()
        vocab_size = max(vocabulary.values()) + 1
        self._end_id = vocabulary[end_name]
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
            end_of_document=self._end_id,
            spec=spec,
        )

    @property
    def end_name(self) -> str | None:
        return str(self.info.spec["end_of_document"])

    def library_file(self) -> bytes:
        return self._content

    def _open(self, read: Callable[..., Any], *arguments: Any) -> Any:
        """Open the file; raise InputError if the library refuses it."""
        try:
            return read(*arguments)
        except Exception as error:  # the library raises bare Exceptions
            raise InputError(
                f"{self._name} is not a tokenizer in the JSON format of `tokenizers`: {error}",
                hint="use a tokenizer.json, or train one with `tokenize train`",
            ) from None

    @property
    def _library(self) -> Any:
        """The library's tokenizer."""
        return self._open(load_library, self._content, self._parse_special)

    @cached_property
    def _fast(self) -> FastBpe | WordCache | Inexact:
        """The fast path, or the reason why there is none."""
        fast: FastBpe | WordCache | Inexact = self._open(_try_convert, self._content)
        return fast

    @cached_property
    def _normalize(self) -> Normalize | None:
        """Normalizes a text before it is split into words."""
        normalizer = self._description["normalizer"]
        if normalizer is None:
            return None
        if normalizer["type"] == "NFC":
            from tokenizers.normalizers import NFC

            return NFC().normalize_str
        normalize: Normalize = self._library.normalizer.normalize_str
        return normalize

    @cached_property
    def _added_tokens(self) -> AddedTokens:
        model = self._description["model"]
        return AddedTokens(
            self._description["added_tokens"],
            parse_special=self._parse_special,
            normalize=self._normalize,
            words=model["vocab"] if model.get("ignore_merges") else {},
            splittable=not isinstance(self._fast, Inexact) and self._fast.splittable,
        )

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
        self._num_characters += sum(map(len, texts))
        fast = self._fast_path
        batches = [
            self._encode_slowly(texts[first:end], first)
            if fast is None
            else self._encode(fast, texts[first:end], first)
            for first, end in _split_batches(texts, (fast or FastBpe).batch_characters)
        ]
        if len(batches) == 1:
            [(tokens, ends)] = batches
            return Encoded(tokens, np.concatenate([[0], ends]))
        tokens = np.concatenate([np.empty(0, self._dtype), *(ids for ids, _ in batches)])
        starts, offset = [np.zeros(1, np.int64)], 0
        for ids, ends in batches:
            starts.append(ends + offset)
            offset += len(ids)
        return Encoded(tokens, np.concatenate(starts))

    @property
    def _fast_path(self) -> FastBpe | WordCache | None:
        """The fast path; None if the library encodes all texts, or few were encoded so far."""
        if self._num_characters < self._fast_from or isinstance(self._fast, Inexact):
            return None
        return self._fast

    def _encode(self, fast: FastBpe | WordCache, texts: Sequence[str], first_number: int) -> Ids:
        """Return ids, with end-of-document ids, and end offsets [texts]. `first_number` numbers the
        first text, for errors."""
        added = self._added_tokens
        normalize = self._normalize if isinstance(fast, FastBpe) else None
        is_plain = added.are_absent and (normalize is None or all(map(str.isascii, texts)))
        if is_plain and not any(map(fast.needs_library, texts)):
            return fast.encode(texts, self._end_id)
        parts: list[Part] = []
        ends: list[int] = []  # parts up to the end of each text
        slow_numbers: list[int] = []
        for number, text in enumerate(texts):
            text_parts = added.split(text)
            if normalize is not None and not text.isascii():
                text_parts = [Part(normalize(part), next_id) for part, next_id in text_parts]
            if added.need_library(text) or any(
                fast.needs_library(part.text) for part in text_parts
            ):
                slow_numbers.append(number)
                text_parts = [Part("", None)]
            parts += text_parts
            ends.append(len(parts))
        ids, starts = self._encode_parts(fast, parts, ends)
        if not slow_numbers:
            return ids, starts[1:]
        bounds = starts.tolist()
        pieces = [ids[start:end] for start, end in itertools.pairwise(bounds)]
        for number in slow_numbers:
            pieces[number] = self._encode_exception(fast, texts[number], first_number + number)
        return np.concatenate(pieces), np.cumsum([len(piece) for piece in pieces], dtype=np.int64)

    def _encode_parts(
        self, fast: FastBpe | WordCache, parts: Sequence[Part], ends: Sequence[int]
    ) -> Ids:
        """Return the ids of texts in parts, and start offsets [texts + 1]. Each part is encoded
        with an end-of-document id, which the added token after the part replaces."""
        ids, part_ends = fast.encode([part.text for part in parts], self._end_id)
        if len(ends) < len(parts):
            next_ids = [self._end_id if part.next_id is None else part.next_id for part in parts]
            ids[part_ends - 1] = next_ids
        return ids, np.concatenate([[0], part_ends[np.array(ends, np.int64) - 1]])

    def _encode_exception(
        self, fast: FastBpe | WordCache, text: str, number: int
    ) -> npt.NDArray[Any]:
        """Return the ids of a text that needs the library. If no added tokens are searched for, the
        library encodes only the lines that need it."""
        if isinstance(fast, WordCache) or not self._added_tokens.are_absent:
            return self._encode_slowly([text], number)[0]
        normal_text = text if self._normalize is None else self._normalize(text)
        pieces = []
        for part, needs_library in fast.cut_exceptions(normal_text):
            ids, _ = (
                self._encode_slowly([part], number)
                if needs_library
                else fast.encode([part], self._end_id)
            )
            pieces.append(ids[:-1])
        return np.concatenate([*pieces, np.array([self._end_id], self._dtype)])

    def _encode_slowly(self, texts: Sequence[str], first_number: int) -> Ids:
        """Encode by the `tokenizers` library, whose ids are right by definition."""
        library = self._library
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
                encoding = library.encode_batch_fast([text], add_special_tokens=False)[0]
            except BaseException as error:  # its panics are not Exceptions
                if type(error).__name__ != "PanicException":
                    raise
                raise TextError(number, f"the `tokenizers` library failed: {error}") from None
            pieces.append(np.array([*encoding.ids, self._end_id], self._dtype))
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
            offsets = self._library.encode(text, add_special_tokens=False).offsets
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
        pre_tokenizer = self._description.get("pre_tokenizer") or {}
        return list(pre_tokenizer.get("pretokenizers", [pre_tokenizer]))

    @property
    def _byte_level(self) -> bool:
        """True if a character of a token stands for a byte of text."""
        return any(step.get("type") == "ByteLevel" for step in self._steps)

    def find_misfits(self, encoded: Encoded) -> dict[int, str]:
        return {}

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._library.decode(list(ids), skip_special_tokens=False))

    def byte_sizes(self) -> Int64:
        sizes = np.zeros(self.info.vocab_size, np.int64)
        for token, id in self._description["model"]["vocab"].items():
            sizes[id] = len(token)  # byte-level: a character of a token stands for a byte
        for token in self._description["added_tokens"]:
            sizes[token["id"]] = 0 if token["special"] else len(token["content"].encode())
        return sizes


@lru_cache(maxsize=2)
def _try_convert(content: bytes) -> FastBpe | WordCache | Inexact:
    """Convert a tokenizer to the fast path, or return the reason why not."""
    description = read_description(content)
    try:
        if replaces_spaces(description):
            return convert_words(description, load_word_encoder(content))
        return convert(description)
    except Inexact as reason:
        return reason
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        load_library(content, False)  # says what is wrong with the file
        return Inexact("its file is not understood")


def _split_batches(texts: Sequence[str], max_characters: int) -> Iterator[tuple[int, int]]:
    """Yield ranges [first, end) of texts, with at most `max_characters`, or one text, per range."""
    first = size = 0
    for number, text in enumerate(texts):
        if size and size + len(text) > max_characters:
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
