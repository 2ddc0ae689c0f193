"""The fast path and the `tokenizers` library split texts into the same words."""

from __future__ import annotations

import random
from functools import cache
from itertools import pairwise

import pytest
from tokenizers import Regex, Tokenizer, models
from tokenizers import pre_tokenizers as pre

from headrace.dataplane.tokenizers.bpe import BpeConfig, BpeTokenizer, Ids
from headrace.dataplane.tokenizers.fast_bpe import letters_by_byte
from headrace.dataplane.tokenizers.patterns import PATTERNS, Pattern

END = "<|endoftext|>"
MARKERS = [*b"1!aA/'s \n", *"中".encode()]
"""Bytes that merge with any byte beside them, in a word: so ids tell the words."""


def split(pattern: Pattern) -> pre.PreTokenizer:
    if not pattern.splits:
        return pre.ByteLevel(add_prefix_space=False, use_regex=True)
    splits = [pre.Split(Regex(regex), "isolated") for regex in pattern.splits]
    return pre.Sequence([*splits, pre.ByteLevel(add_prefix_space=False, use_regex=False)])


@cache
def tokenizer_of(pattern: Pattern) -> Tokenizer:
    letters = letters_by_byte()
    pairs = [pair for byte in range(256) for m in MARKERS for pair in ((byte, m), (m, byte))]
    merges = [(letters[a], letters[b]) for a, b in dict.fromkeys(pairs)]
    tokens = [*letters.values(), *("".join(pair) for pair in merges), END]
    tokenizer = Tokenizer(models.BPE({token: id for id, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = split(pattern)
    tokenizer.add_special_tokens([END])
    return tokenizer


def find_differences(pattern: Pattern, texts: list[str], **changes: object) -> list[str]:
    """Return the texts that the fast path, with a changed pattern, encodes otherwise."""
    tokenizer = tokenizer_of(pattern)
    output = BpeTokenizer(tokenizer.to_str().encode(), BpeConfig(), source="test", fast_from=0)
    assert output.slow_reason is None
    for name, value in changes.items():
        object.__setattr__(output._fast, name, value)
    result = output.encode(texts)
    expected = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    bounds = result.starts.tolist()
    return [
        text
        for text, ids, start, end in zip(texts, expected, bounds, bounds[1:], strict=False)
        if result.tokens[start : end - 1].tolist() != ids.ids
    ]


@pytest.mark.parametrize("step", [16, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", PATTERNS)
def test_every_character_is_in_the_same_words(name: str, step: int) -> None:
    """`step`: each pattern sees other characters; the long test shows all characters to all."""
    pattern = PATTERNS[name]
    offset = list(PATTERNS).index(name) % step
    codes = [*range(offset, 0x3400, step), *range(0x3400 + offset, 0x110000, 8 * step - 7)]
    texts = [
        f"{c}1{c}!{c} a{c}\n{c}A{c}a{c}'s{c}'{c} {c}{c}\n\n{c}/{c}中{c}\n"
        for c in map(chr, codes)
        if not 0xD800 <= ord(c) < 0xE000
    ]
    texts = [text for text in texts if not any(map(text.__contains__, pattern.exceptions))]
    joined = ["".join(texts[first : first + 512]) for first in range(0, len(texts), 512)]
    assert not find_differences(pattern, joined)
    alone = [f"a{string}{end}" for string in pattern.exceptions for end in ("", "A", "é", "1")]
    assert not find_differences(pattern, alone)


PIECES = [
    *(" ", "  ", "\n", "\r\n", "\t", "\xa0", "\u3000", "\x85", "\u2028", "\x0b", "\x1c", "\u200b"),
    *("a", "B", "é", "É", "ǅ", "ʰ", "ª", "中", "々", "〇", "カ", "ー", "한", "א", "ع", "ह", "ไ"),
    *(
        "\u0301",
        "\u0e34",
        "e\u0301",
        "\u0300x",
        "İ",
        "ſ",
        "\u212a",
        "🙂",
        "👩\u200d👩",
        "\U000e0041",
    ),
    *("1", "23", "4567", "²", "Ⅷ", "٣", "'s", "'LL", "'", "’", "/", "//", "_", "-", ".", "$", "+"),
]


@pytest.mark.parametrize("name", PATTERNS)
def test_random_texts_are_split_into_the_same_words(name: str) -> None:
    rng = random.Random(name)
    texts = ["".join(rng.choices(PIECES, k=rng.randrange(1, 25))) for _ in range(1000)]
    assert not find_differences(PATTERNS[name], texts)


@pytest.mark.parametrize("name", [name for name, pattern in PATTERNS.items() if pattern.exceptions])
def test_an_exception_concerns_its_line_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_texts: list[str] = []
    encode_slowly = BpeTokenizer._encode_slowly

    def note(self: BpeTokenizer, texts: list[str], first_number: int) -> Ids:
        slow_texts.extend(texts)
        return encode_slowly(self, texts, first_number)

    monkeypatch.setattr(BpeTokenizer, "_encode_slowly", note)
    rng = random.Random(name)
    pieces = [*PIECES, *("\n", "\r", "\r\n", " \n", "/\n", "!\r\n", "\na", "\n1"), "'\u017f"]
    texts = ["".join(rng.choices(pieces, k=rng.randrange(1, 60))) for _ in range(500)]
    assert not find_differences(PATTERNS[name], texts)
    assert slow_texts and all("'\u017f" in text for text in slow_texts)
    long_text = "a line\n" * 1000 + "it'\u017f\n" + "another\r\n" * 1000
    slow_texts.clear()
    assert not find_differences(PATTERNS[name], [long_text])
    assert slow_texts == ["it'\u017f\n"]


def test_exceptions_are_needed() -> None:
    """Negative control: without them, ids differ."""
    for name, pattern in PATTERNS.items():
        texts = [
            f"{start}{string}{end}"
            for string in pattern.exceptions
            for start in "1a"
            for end in "中Aa"
        ]
        unchecked = Pattern(pattern.splits)
        assert bool(find_differences(pattern, texts, _pattern=unchecked)) is bool(texts), name


def test_another_pattern_gives_other_words() -> None:
    """Negative control: the tests above see how each pattern splits."""
    rng = random.Random(0)
    texts = ["".join(rng.choices(PIECES, k=20)) for _ in range(500)]
    patterns = list(PATTERNS.values())
    for pattern, next_pattern in pairwise(patterns):
        assert find_differences(pattern, texts, _pattern=next_pattern)
