"""The fast path and the `tokenizers` library split texts into the same words."""

from __future__ import annotations

import pytest
from tokenizers import Regex, Tokenizer, models
from tokenizers import pre_tokenizers as pre

from headrace.dataplane.tokenizers.bpe import BpeConfig, BpeTokenizer
from headrace.dataplane.tokenizers.fast_bpe import letters_by_byte
from headrace.dataplane.tokenizers.patterns import LLAMA3, QWEN2

END = "<|endoftext|>"


def split(pattern: str | None) -> pre.PreTokenizer:
    if pattern is None:
        return pre.ByteLevel(add_prefix_space=False, use_regex=True)
    level = pre.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre.Sequence([pre.Split(Regex(pattern), "isolated"), level])


@pytest.mark.parametrize("step", [16, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("pattern", [None, LLAMA3, QWEN2], ids=["gpt2", "llama3", "qwen2"])
def test_every_character_is_in_the_same_words(pattern: str | None, step: int) -> None:
    """Each merge joins an ASCII character and the byte beside it, so that ids tell the words:
    a digit joins numbers alone, `!` joins what is no space, letter or number, and `a` comes before
    letters alone."""
    letters = letters_by_byte()
    merges = [(letters[byte], letters[ord(c)]) for c in "1!" for byte in range(256)]
    merges += [(letters[ord("a")], letters[byte]) for byte in range(256) if chr(byte) not in "1!"]
    tokens = [*letters.values(), *("".join(pair) for pair in merges), END]
    tokenizer = Tokenizer(models.BPE({token: id for id, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = split(pattern)
    tokenizer.add_special_tokens([END])
    made = BpeTokenizer(tokenizer.to_str().encode(), BpeConfig(), source="test", fast_from=0)
    assert made.slow_reason is None
    codes = [*range(0x3400), *range(0x3400, 0x110000, step)]
    for first in range(0, len(codes), 4096):
        characters = [chr(c) for c in codes[first : first + 4096] if not 0xD800 <= c < 0xE000]
        text = "".join(f"{c}1{c}!{c} a{c}\n" for c in characters)
        expected = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        assert made.encode([text]).tokens.tolist()[:-1] == expected
