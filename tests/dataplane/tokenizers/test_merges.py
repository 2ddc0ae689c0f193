"""Merges are converted only where each token, encoded alone, ends with a pair listed for it."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from headrace.dataplane.tokenizers.fast_bpe import (
    FastBpe,
    Inexact,
    find_last_merges,
    letters_by_byte,
)
from headrace.dataplane.tokenizers.patterns import PATTERNS


def last_pair(whole: str, ranks: dict[str, int]) -> tuple[str, str] | None:
    """Join the pair of the lowest rank until one token is left; return the pair joined last."""
    parts, pair = [whole[k : k + 1] for k in range(len(whole))], None
    while len(parts) > 1:
        joined = [ranks.get(a + b, len(ranks)) for a, b in itertools.pairwise(parts)]
        at = joined.index(min(joined))
        if joined[at] == len(ranks):
            return None
        pair = parts[at], parts[at + 1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return pair


@st.composite
def merge_lists(draw: st.DrawFn) -> list[tuple[str, str]]:
    """Merges of few letters, some of which are never used, or listed twice for a token."""
    tokens, merges = ["a", "b"], []
    for _ in range(draw(st.integers(1, 14))):
        pair = draw(st.sampled_from(tokens)), draw(st.sampled_from(tokens))
        if len(pair[0] + pair[1]) <= 12 and pair not in merges:
            merges.append(pair)
            tokens.append(pair[0] + pair[1])
    return draw(st.permutations(merges)) if draw(st.booleans()) else merges


@settings(max_examples=500)
@given(merges=merge_lists())
def test_merges_are_judged_as_by_encoding_each_token(merges: list[tuple[str, str]]) -> None:
    """Tokens whose parts rank behind them are refused, although some of them could be produced."""
    listed: dict[str, dict[tuple[str, str], int]] = {}
    for line, (left, right) in enumerate(merges):
        listed.setdefault(left + right, {})[left, right] = line
    ranks = {letter: byte for byte, letter in letters_by_byte().items()}
    ranks |= {whole: rank for rank, whole in enumerate(listed, start=256)}
    output = {whole: last_pair(whole, ranks) for whole in listed}
    lines = [pairs.get(output[whole], -1) for whole, pairs in listed.items()]  # type: ignore[arg-type]
    right = -1 not in lines and lines == sorted(lines)
    right &= all(
        ranks[part] < ranks[whole] for whole, pair in output.items() for part in pair or ()
    )
    try:
        result = find_last_merges(merges)
    except Inexact:
        assert not right
    else:
        assert right
        assert result == output


LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
TEXTS = st.lists(st.text("ab", max_size=40).map(lambda text: f"{text} c"), max_size=8)


@settings(max_examples=300, deadline=None)
@given(merges=merge_lists(), texts=TEXTS)
def test_accepted_merges_give_equal_ids(merges: list[tuple[str, str]], texts: list[str]) -> None:
    listed: dict[str, dict[tuple[str, str], int]] = {}
    for line, (left, right) in enumerate(merges):
        listed.setdefault(left + right, {})[left, right] = line
    ranks = {letter: byte for byte, letter in letters_by_byte().items()}
    ranks |= {whole: rank for rank, whole in enumerate(listed, start=256)}
    try:
        output = find_last_merges(merges)
    except Inexact:
        return
    tokenizer = Tokenizer(models.BPE(ranks, merges))
    tokenizer.pre_tokenizer = LEVEL
    ids = np.arange(len(ranks), dtype=np.uint16)
    result, ends = FastBpe(output, ids, PATTERNS["GPT-2"]).encode(texts, 9999)
    expected = [[*item.ids, 9999] for item in tokenizer.encode_batch(texts)]
    assert result.tolist() == [id for item in expected for id in item]
    assert np.diff(ends, prepend=0).tolist() == [len(item) for item in expected]
