"""Tokenizers in the manner of SentencePiece: ids are those of the `tokenizers` library."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, trainers
from tokenizers import pre_tokenizers as pre

from headrace.dataplane.tokenizers import word_cache
from headrace.dataplane.tokenizers.bpe import BpeConfig, BpeTokenizer

END = "</s>"
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
PREPEND = {"type": "Prepend", "prepend": "▁"}
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = [
    *(
        "aZ",
        "é",
        "ß",
        "Ω",
        "я",
        "中文",
        "の",
        "한",
        "א",
        "ع",
        "ह",
        "ไ",
        "🙂",
        "👩\u200d👩",
        "\u0301",
    ),
    *(
        " ",
        "  ",
        "     ",
        "\t",
        "\n",
        "\n\n",
        "\n\n\n",
        "\r\n",
        "\xa0",
        "\u3000",
        "▁",
        "▁▁",
        "\x00",
    ),
    *("the ", " the", "def f(x):\n    return ", "12345", "<s>", END, "...", "- ", "\n- "),
]
TEXTS = st.lists(st.sampled_from([*PIECES, "<0x0A>"]) | st.text(max_size=5), max_size=25).map(
    "".join
)


def corpus() -> Iterator[str]:
    rng = random.Random(0)
    yield Path(__file__).read_text().replace("0x", "")
    for _ in range(1000):
        yield "".join(rng.choices(PIECES, k=20))


def train(*, crossing: bool = False, spaces: bool = True) -> dict[str, Any]:
    """Train a model whose merges cross spaces and line feeds, or do not."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre.Metaspace(split=not crossing)
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=["<unk>", "<s>", END], limit_alphabet=60, show_progress=False
    )
    texts = corpus()
    if crossing:
        texts = (text[start : start + 9] for text in texts for start in range(0, len(text), 9))
    tokenizer.train_from_iterator(texts, trainer)
    data: dict[str, Any] = json.loads(tokenizer.to_str())
    for letter in ("▁", "\n"):
        data["model"]["vocab"].setdefault(letter, len(data["model"]["vocab"]))
    if spaces:
        add_merge(data, "▁", "▁")
        add_merge(data, "▁▁", "▁▁")
    return data


def add_merge(data: dict[str, Any], first: str, second: str) -> None:
    model = data["model"]
    if first + second not in model["vocab"]:
        model["vocab"][first + second] = len(model["vocab"])
        model["merges"].append([first, second])


def with_bytes(data: dict[str, Any]) -> dict[str, Any]:
    """Add tokens of bytes, for unknown characters."""
    vocabulary = data["model"]["vocab"]
    for token in BYTES:
        vocabulary[token] = len(vocabulary)
    data["model"].update(byte_fallback=True)
    return data


def llama2() -> dict[str, Any]:
    normalizer = {"type": "Sequence", "normalizers": [PREPEND, REPLACE]}
    return with_bytes(train()) | {"normalizer": normalizer, "pre_tokenizer": None}


def metaspace(scheme: str, split: bool, data: dict[str, Any]) -> dict[str, Any]:
    step = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split}
    return data | {"normalizer": None, "pre_tokenizer": step}


def gemma() -> dict[str, Any]:
    """Runs of spaces and line feeds are added tokens."""
    split = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious"}
    data = with_bytes(train(crossing=True))
    data |= {"normalizer": REPLACE, "pre_tokenizer": split | {"invert": False}}
    tokenizer = Tokenizer.from_str(json.dumps(data))
    names = ["\n\n", "\n\n\n", "▁▁", "▁▁▁", "<td>", "12"]
    tokenizer.add_tokens([AddedToken(name, normalized=False, special=False) for name in names])
    return dict(json.loads(tokenizer.to_str()))


STYLES = {
    "Llama 2": llama2,
    "Mistral": lambda: metaspace("first", False, with_bytes(train())),
    "every space": lambda: metaspace("always", True, train()),
    "no space before": lambda: metaspace("never", False, train(spaces=False)),
    "Gemma": gemma,
    "crossing": lambda: (
        with_bytes(train(crossing=True)) | {"normalizer": REPLACE, "pre_tokenizer": None}
    ),
}


def load_fast(data: dict[str, Any], **options: Any) -> BpeTokenizer:
    content, config = json.dumps(data).encode(), BpeConfig(end_of_document=END, **options)
    return BpeTokenizer(content, config, source="test", fast_from=0)


def open_library(data: dict[str, Any]) -> Tokenizer:
    tokenizer = Tokenizer.from_str(json.dumps(data))
    tokenizer.encode_special_tokens = True
    return tokenizer


def check_equal_ids(tokenizer: BpeTokenizer, reference: Tokenizer, texts: list[str]) -> None:
    result = tokenizer.encode(texts)
    expected = reference.encode_batch_fast(texts, add_special_tokens=False)
    assert len(result.starts) == len(texts) + 1
    for number, encoding in enumerate(expected):
        ids = result.tokens[result.starts[number] : result.starts[number + 1]].tolist()
        assert ids == [*encoding.ids, tokenizer.info.end_of_document], repr(texts[number])


@pytest.fixture(scope="module", params=list(STYLES))
def style(request: pytest.FixtureRequest) -> tuple[BpeTokenizer, Tokenizer]:
    data = STYLES[request.param]()
    reference, result = open_library(data), load_fast(data)
    assert result.slow_reason is None
    return result, reference


@settings(deadline=None, max_examples=150)
@example(texts=["", " ", "  ", "a", " a", "a ", "a  b", "a \n b", "\n", "\n\n\n a", "▁", "▁ ▁a"])
@example(texts=["a\0b \0 c", "\0", "x \0\0y\n\0"])
@example(texts=["中 中\n中", "🙂\n🙂 🙂", "a<td>b  <td>\n\n\n\n\nc 1212"])
@given(texts=st.lists(TEXTS, max_size=5))
def test_ids_are_those_of_the_library(
    style: tuple[BpeTokenizer, Tokenizer], texts: list[str]
) -> None:
    check_equal_ids(*style, texts)


def test_large_documents(style: tuple[BpeTokenizer, Tokenizer]) -> None:
    text = "the quick  brown fox\n\n\tjumps — 中文 🙂 <td> " * 3000
    check_equal_ids(*style, ["before", text, "after", text[1:]])


def test_special_tokens_in_a_text() -> None:
    data = llama2()
    texts = [f"a{END}b {END} c", f"{END}", f"<s>{END}{END} x"]
    check_equal_ids(
        load_fast(data, parse_special=True), Tokenizer.from_str(json.dumps(data)), texts
    )
    first = metaspace("first", False, with_bytes(train()))
    check_equal_ids(
        load_fast(first, parse_special=True), Tokenizer.from_str(json.dumps(first)), texts
    )


def test_cuts_are_needed_where_no_merge_joins_and_nowhere_else() -> None:
    """Negative control: cuts at all spaces would change ids."""
    data = STYLES["crossing"]()
    reference, result = open_library(data), load_fast(data)
    text = " ".join(corpus())
    check_equal_ids(result, reference, [text])
    fast = result._fast
    assert isinstance(fast, word_cache.WordCache)
    assert 0 < np.count_nonzero(fast._cuts[:, ord(" ")]) < 256
    fast._cuts[:, ord(" ")] = True
    with pytest.raises(AssertionError):
        check_equal_ids(result, reference, [text])


def test_few_words_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_cache, "MAX_WORDS", 10)
    data = llama2()
    result, reference = load_fast(data), open_library(data)
    for _, text in zip(range(100), corpus(), strict=False):
        check_equal_ids(result, reference, [text[:200], text[200:400]])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: data["model"].update(dropout=0.1), "sets dropout"),
        (lambda data: data["model"].update(ignore_merges=True), "sets ignore_merges"),
        (lambda data: data["model"]["merges"].append(["<0x41>", "a"]), "tokens of bytes"),
        (lambda data: data.update(pre_tokenizer={"type": "Whitespace"}), "pre-tokenizer"),
        (
            lambda data: data["normalizer"]["normalizers"].append({"type": "NFKC"}),
            "normalizer is not supported",
        ),
    ],
)
def test_inexact_names_the_reason(change: Any, reason: str) -> None:
    data = metaspace("never", False, train(spaces=False)) | {
        "normalizer": {"type": "Sequence", "normalizers": [REPLACE]},
        "pre_tokenizer": None,
    }
    data["model"]["merges"] = [pair for pair in data["model"]["merges"] if "▁" not in "".join(pair)]
    change(data)
    with pytest.raises(word_cache.Inexact, match=reason):
        word_cache.convert_words(data, lambda words: [])
