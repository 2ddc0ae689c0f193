"""The fast path gives the ids of the `tokenizers` library, or raises Inexact."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers import pre_tokenizers as pre

from headrace.dataplane.tokenizers import fast_bpe
from headrace.dataplane.tokenizers.bpe import BpeConfig, BpeTokenizer
from headrace.dataplane.tokenizers.fast_bpe import Inexact, convert
from headrace.dataplane.tokenizers.patterns import LLAMA3, O200K, QWEN2

END = "<|endoftext|>"
GPT2 = "the pattern of GPT-2"
WORD = "Qua" + "gga"
"""A special token that the corpus (this file included) does not contain: no merge produces it."""
SCRIPTS = [
    *("aZ", "é", "ß", "ñ", "Ω", "я", "中", "の", "한", "א", "ع", "ह", "ไ", "ༀ", "🙂"),
    *("👩\u200d👩\u200d👧", "\u0301", "\u200d", "ﬁ", "ſ", "\u212a", "٣", "²", "Ⅷ", "½"),
]
PIECES = [
    *SCRIPTS,
    *(" ", "  ", "    ", "\t", "\n", "\n\n", "\r\n", "\r", "\x0b", "\x0c", "\x85", "\xa0"),
    *("\u2003", "\u2028", "\u3000", "\x1c", "\x1e", "\x1f", "\x00", "\ufeff", "\uffff"),
    *("'s", "'LL", "'Ve", "'ſ", "'", "don't", "x", "the ", "def f(x):\n        return ", "12345"),
    *("<|endoftext|>", "<tool>", "...", "--", "!=", "https://", "_", "=" * 40, " " * 40),
]
TEXTS = st.lists(
    st.sampled_from([*PIECES, WORD, f" {WORD}"]) | st.text(max_size=6), max_size=30
).map("".join)


def corpus() -> Iterator[str]:
    """Yield text of many kinds, so that merges of all kinds are learned."""
    rng = random.Random(0)
    for file in sorted(Path(__file__).parent.glob("*.py")):
        yield file.read_text()
    for _ in range(3000):
        yield "".join(rng.choice(PIECES) for _ in range(30))


def train(pattern: str, *, normalizer: Any = None, vocab_size: int = 1500) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    if pattern == GPT2:
        tokenizer.pre_tokenizer = pre.ByteLevel(add_prefix_space=False, use_regex=True)
    else:
        steps = [pre.Split(Regex(pattern), "isolated"), pre.ByteLevel(False, use_regex=False)]
        tokenizer.pre_tokenizer = pre.Sequence(steps)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def load_fast(tokenizer: Tokenizer, fast_from: int = 0, **options: Any) -> BpeTokenizer:
    """Return the product's tokenizer, which uses the fast path from the first text on."""
    text, config = tokenizer.to_str().encode(), BpeConfig(**options)
    return BpeTokenizer(text, config, source="test", fast_from=fast_from)


def every_pair(tokenizer: Tokenizer) -> Tokenizer:
    """Rewrite a tokenizer as converters from tiktoken's files do: merges list every split of each
    token, and the vocabulary holds special tokens (one of them a word)."""
    data = json.loads(tokenizer.to_str())
    model = data["model"]
    ranks = {token: id for token, id in model["vocab"].items() if token != END}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        parts = [(token[:k], token[k:]) for k in range(1, len(token))]
        known = [pair for pair in parts if pair[0] in ranks and pair[1] in ranks]
        merges += sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    assert len(merges) > len(model["merges"])
    assert WORD not in model["vocab"]
    special = {**data["added_tokens"][0], "id": len(model["vocab"]), "content": WORD}
    model["vocab"][WORD] = special["id"]
    data["added_tokens"].append(special)
    model.update(merges=merges, ignore_merges=True)
    return Tokenizer.from_str(json.dumps(data))


STYLES = {
    "every pair": lambda: every_pair(train(LLAMA3)),
    "gpt2": lambda: train(GPT2),
    "o200k": lambda: train(O200K),
    "qwen2": lambda: train(QWEN2, normalizer=normalizers.NFC()),
}


@pytest.fixture(scope="module", params=list(STYLES))
def style(request: pytest.FixtureRequest) -> tuple[BpeTokenizer, Tokenizer]:
    tokenizer = STYLES[request.param]()
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    reference = Tokenizer.from_str(tokenizer.to_str())
    reference.encode_special_tokens = True
    result = load_fast(tokenizer)
    assert result.slow_reason is None
    return result, reference


def check_equal_ids(tokenizer: BpeTokenizer, reference: Tokenizer, texts: list[str]) -> None:
    result = tokenizer.encode(texts)
    expected = reference.encode_batch_fast(texts, add_special_tokens=False)
    assert len(result.starts) == len(texts) + 1
    for number, encoding in enumerate(expected):
        ids = result.tokens[result.starts[number] : result.starts[number + 1]].tolist()
        assert ids == [*encoding.ids, tokenizer.info.end_of_document], repr(texts[number])


@settings(deadline=None, max_examples=400)
@example(texts=["", "a", " ", "  a", "a  ", "\n a", " \n", "a\n\n  b", "a \t b", "\x1ea\x1f  b"])
@example(texts=[WORD, f"a {WORD}", f"({WORD}", f"{WORD}b"])
@example(texts=["a  ", "  b", "c\n", "\n d", "e\xa0 f", "  \u3000g", "\u2003\u2003\u2003h"])
@given(texts=st.lists(TEXTS, max_size=5))
def test_ids_are_those_of_the_library(
    style: tuple[BpeTokenizer, Tokenizer], texts: list[str]
) -> None:
    check_equal_ids(*style, texts)


@settings(deadline=None, max_examples=100)
@given(data=st.binary(max_size=200))
def test_random_bytes(style: tuple[BpeTokenizer, Tokenizer], data: bytes) -> None:
    check_equal_ids(*style, [data.decode("latin-1"), data.decode(errors="replace")])


def with_added(tokenizer: Tokenizer) -> Tokenizer:
    """Add tokens of every kind: at the edges of words or within, with stripped spaces, searched for
    before or after normalization."""
    tokenizer.add_tokens(
        [
            AddedToken("<l>", lstrip=True, special=False),
            AddedToken("<r>", rstrip=True, special=False),
            AddedToken("<w>", single_word=True, special=False),
            AddedToken("wheel", single_word=True, special=False),
            AddedToken("e\u0301x", normalized=True, special=False),
            AddedToken("\u212b", normalized=False, special=False),
            AddedToken("  ", normalized=False, special=False),
        ]
    )
    return tokenizer


def digits() -> Tokenizer:
    """Single digits, as in several code models."""
    tokenizer = train(GPT2)
    level = pre.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre.Sequence([pre.Digits(individual_digits=True), level])
    return tokenizer


ODD = {
    "added tokens": lambda: with_added(train(LLAMA3)),
    "added tokens, NFC": lambda: with_added(train(QWEN2, normalizer=normalizers.NFC())),
    "added tokens, GPT-2": lambda: with_added(train(GPT2)),
    "digits": digits,
    "prefix space": lambda: _prefixed(train(GPT2)),
}


def _prefixed(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.pre_tokenizer = pre.ByteLevel(add_prefix_space=True, use_regex=True)
    return tokenizer


ODD_TEXTS = st.lists(
    st.sampled_from(
        [*PIECES, "<l>", "<r>", "<w>", "wheel", "wheels", "\u00e9x", "e\u0301x", "\u212b", "\u00c5"]
    )
    | st.text(max_size=4),
    max_size=20,
).map("".join)


@pytest.fixture(scope="module", params=list(ODD))
def odd_tokenizer(request: pytest.FixtureRequest) -> tuple[BpeTokenizer, Tokenizer]:
    tokenizer = ODD[request.param]()
    reference = Tokenizer.from_str(tokenizer.to_str())
    reference.encode_special_tokens = True
    result = load_fast(tokenizer)
    assert (result.slow_reason is None) is request.param.startswith("added")
    return result, reference


@settings(deadline=None, max_examples=250)
@example(
    texts=["\u00e9x", "e\u0301x", "a \u00e9x", "\u00c5", "\u212b", "A\u030a", "a <l> b <r>  c"]
)
@example(texts=["wheel", "wheels", "a wheel.", "<w>a <w>", "  ", "1234 5", ""])
@given(texts=st.lists(ODD_TEXTS, max_size=4))
def test_unusual_tokenizers_give_equal_ids(
    odd_tokenizer: tuple[BpeTokenizer, Tokenizer], texts: list[str]
) -> None:
    """Equal on the fast or the slow path."""
    check_equal_ids(*odd_tokenizer, texts)


def batched(items: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def characters(step: int) -> list[str]:
    """Return all characters of most scripts, and each `step`-th of the others (mostly
    ideographs)."""
    codes = [*range(0x3400), *range(0x3400, 0x110000, step)]
    return [chr(c) for c in codes if not 0xD800 <= c < 0xE000]


@pytest.mark.parametrize("step", [16, pytest.param(1, marks=pytest.mark.long)])
def test_every_character_between_words_and_spaces(
    style: tuple[BpeTokenizer, Tokenizer], step: int
) -> None:
    texts = []
    for part in batched(characters(step), 4096):
        texts += ["".join(f"a {c}b  {c} 1{c}'{c}" for c in part), "".join(part)]
    check_equal_ids(*style, texts)


UNITS = {
    "spaces": "  ",
    "letters": "ab",
    "words": "the quick  brown fox ",
    "lines": "  x\n\n\t",
    "code": "x = 1;\n    ",
    "Chinese": "中文",
    "emoji": "👩\u200d👩\u200d👧 ",
}


@pytest.mark.parametrize("kind", UNITS)
def test_large_documents(
    style: tuple[BpeTokenizer, Tokenizer], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More text than one call encodes."""
    monkeypatch.setattr(fast_bpe.FastBpe, "batch_characters", 1 << 17)
    text = UNITS[kind] * (fast_bpe.FastBpe.batch_characters // len(UNITS[kind]) + 1)
    check_equal_ids(*style, ["before", text + "x", "after"])


@pytest.mark.long
@pytest.mark.parametrize("kind", ["spaces", "words", "code", "Chinese"])
def test_documents_of_10_megabytes(style: tuple[BpeTokenizer, Tokenizer], kind: str) -> None:
    # The library itself gives up on 10 MB of nothing but spaces: its regex runs out of retries.
    size = 10_000_000 if kind != "spaces" else 3_000_000
    check_equal_ids(*style, [UNITS[kind] * (size // len(UNITS[kind].encode()))])


def test_decode_inverts_encode(style: tuple[BpeTokenizer, Tokenizer]) -> None:
    result, _ = style
    text = "Hello, wörld — 中文 🙂\n\n    x"
    assert result.decode(result.encode([text]).tokens.tolist()) == text + END


def test_special_tokens_in_a_text_are_text_by_default() -> None:
    tokenizer = train(LLAMA3, vocab_size=600)
    end = tokenizer.token_to_id(END)
    assert load_fast(tokenizer).encode([f"a{END}b"]).tokens.tolist().count(end) == 1
    parsed = load_fast(tokenizer, parse_special=True).encode([f"a{END}b"])
    assert parsed.tokens.tolist().count(end) == 2
    reference = tokenizer.encode(f"a{END}b", add_special_tokens=False).ids
    assert parsed.tokens.tolist() == [*reference, end]


@pytest.mark.parametrize("pattern", [QWEN2, O200K], ids=["qwen2", "o200k"])
def test_added_tokens_in_a_text_keep_the_fast_path(
    pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the library encoded the whole text."""
    tokenizer = train(pattern, normalizer=normalizers.NFC(), vocab_size=600)
    names = ["<think>", "</think>", "<t", "think>x", "  "]
    tokenizer.add_tokens([AddedToken(name, normalized=False, special=False) for name in names])
    result = load_fast(tokenizer, parse_special=True)
    monkeypatch.setattr(result, "_encode_slowly", None)
    rng = random.Random(0)
    pieces = [*names, END, "thin", "<", " ", "x", "e\u0301", "\u0338", "1", "a b"]
    texts = ["".join(rng.choices(pieces, k=rng.randrange(12))) for _ in range(500)]
    check_equal_ids(result, tokenizer, texts)
    plain, reference = load_fast(tokenizer), Tokenizer.from_str(tokenizer.to_str())
    reference.encode_special_tokens = True
    monkeypatch.setattr(plain, "_encode_slowly", None)
    check_equal_ids(plain, reference, texts)


def test_a_token_changed_by_normalization_is_searched_for_before() -> None:
    """A combining character after its name changes the last character of the name."""
    tokenizer = train(QWEN2, normalizer=normalizers.NFC(), vocab_size=600)
    texts = [f"a {END}\u0338b", "c"]
    assert END not in tokenizer.normalizer.normalize_str(texts[0])
    parsed = load_fast(tokenizer, parse_special=True)
    assert parsed.slow_reason is None
    check_equal_ids(parsed, tokenizer, texts)
    tokenizer.encode_special_tokens = True
    check_equal_ids(load_fast(tokenizer), tokenizer, texts)


def test_an_unreachable_token_is_inexact() -> None:
    """Negative control: a token whose merge never happens would change ids silently."""
    data = json.loads(train(LLAMA3, vocab_size=400).to_str())
    broken = copy.deepcopy(data)
    broken["model"]["merges"].reverse()
    with pytest.raises(Inexact, match="never produce the token"):
        convert(broken)
    convert(data)


def test_pairs_of_a_token_listed_apart_are_inexact() -> None:
    """The pair that produces it is listed at a place that differs from its rank."""
    data = json.loads(every_pair(train(LLAMA3, vocab_size=600)).to_str())
    merges = data["model"]["merges"]
    vocabulary = set(data["model"]["vocab"])
    assert {"Ġ", "ĠĠ", "ĠĠĠ", "ĠĠĠĠ"} <= vocabulary
    result = merges.index(["ĠĠ", "ĠĠ"])
    assert ["Ġ", "ĠĠĠ"] in merges
    merges.append(merges.pop(result))
    with pytest.raises(Inexact, match="are not listed together"):
        convert(data)


def test_ids_in_another_order_than_the_merges() -> None:
    data = json.loads(train(LLAMA3, vocab_size=600).to_str())
    ids = list(data["model"]["vocab"].values())
    random.Random(0).shuffle(ids)
    numbered = [id + (7 if id > 300 else 0) for id in ids]
    data["model"]["vocab"] = dict(zip(data["model"]["vocab"], numbered, strict=True))
    data["added_tokens"][0]["id"] = data["model"]["vocab"][END]
    tokenizer = Tokenizer.from_str(json.dumps(data))
    result = load_fast(tokenizer)
    assert result.slow_reason is None
    check_equal_ids(result, tokenizer, ["Hello  there, def f(x):\n    return 12345", "", "中文 🙂"])


def test_with_another_pattern_ids_would_differ() -> None:
    """Negative control: the tests above detect where words are split."""
    tokenizer = train(LLAMA3)
    data = json.loads(tokenizer.to_str())
    data["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = QWEN2
    with pytest.raises(AssertionError):
        check_equal_ids(load_fast(Tokenizer.from_str(json.dumps(data))), tokenizer, ["x = 12345"])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: data["model"].update(byte_fallback=True), "falls back to bytes"),
        (lambda data: data["model"].update(dropout=0.1), "dropout"),
        (lambda data: data.update(normalizer={"type": "Lowercase"}), "normalizes"),
        (lambda data: data.update(pre_tokenizer={"type": "Whitespace"}), "pre-tokenizer"),
        (lambda data: data["model"]["vocab"].pop("Ā"), "byte 0x0"),
    ],
)
def test_inexact_names_the_reason(change: Any, reason: str) -> None:
    data = json.loads(train(LLAMA3, vocab_size=300).to_str())
    change(data)
    with pytest.raises(Inexact, match=reason):
        convert(data)


def test_a_tokenizer_that_cannot_be_converted_is_used_directly() -> None:
    tokenizer = train(LLAMA3, normalizer=normalizers.Lowercase())
    result = load_fast(tokenizer)
    assert result.slow_reason is not None
    check_equal_ids(result, tokenizer, ["Hello  THERE", "", "x\n\n  Y"])


def test_few_texts_do_not_start_the_fast_path() -> None:
    tokenizer = train(LLAMA3, vocab_size=600)
    result = load_fast(tokenizer, fast_from=100)
    started = []
    for text in ["Hello  there", "", "x" * 60, "中文 " * 20, "def f(x):\n    return 12345", "end"]:
        check_equal_ids(result, tokenizer, [text, text])
        started.append("_tokenizer" in vars(result._fast))
    assert started == [False, False, True, True, True, True]


def test_ids_fit_their_type() -> None:
    result = load_fast(train(LLAMA3, vocab_size=300))
    assert result.encode(["x"]).tokens.dtype == np.uint16
