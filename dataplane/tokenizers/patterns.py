r"""Pre-tokenizers that fastokens and `tokenizers` split alike.

fastokens has a splitter of its own for each of these patterns; others go to a regex engine with
other tables of characters, and are refused. The libraries differ around few strings
(`exceptions`): lines with one of them are encoded by `tokenizers`.
`tests/dataplane/tokenizers/test_words.py` compares the words around every Unicode character.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import groupby
from typing import Any

Step = dict[str, Any]

LONG_S = ("'\u017f",)
"""`'ſ` is `'s` if case is ignored. fastokens does not know it before some letters."""
ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3 = (
    ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Also GLM 4 and 5, Phi 4, OLMo 2, SmolLM 3."""
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}|", r"\p{N}|")
"""Also Qwen 2.5 and 3."""
QWEN3_5 = (
    ENDINGS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{ENDINGS}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
    rf"{ENDINGS}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{REST}"
)
"""gpt-oss, Llama 4, Phi 4 mini."""
NEMOTRON = O200K.replace(f"{ENDINGS}?", "").replace(r"\p{N}{1,3}", r"\p{N}")
"""Nemotron 3, Mistral's Tekken."""
NOT_HAN = r"&&[^\p{Han}]]"
KIMI = r"[\p{Han}]+|" + O200K.replace(UPPER, UPPER[:-1] + NOT_HAN).replace(
    LOWER, LOWER[:-1] + NOT_HAN
).replace(r"[\r\n/]*", r"[\r\n]*")
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+"
    "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*"
    "|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)
"""DeepSeek V3, R1 and V4."""


LINE_START = re.compile(r"(?<=[\r\n])(?=[0-9A-Za-z])")
"""A place between words, in every pattern with exceptions: no word has a letter or a digit after a
line break, and the words before it are the same if the text ends there."""


@dataclass(frozen=True)
class Pattern:
    """How a text is split into words."""

    splits: tuple[str, ...]
    """Regular expressions, applied in turn. None: that of GPT-2, which ByteLevel includes."""
    exceptions: tuple[str, ...] = ()
    """Strings around which the libraries differ; the last letter is rare, and not ASCII."""

    def has_exception(self, text: str) -> bool:
        """Return True if the libraries may split a text into different words."""
        return any(
            string[-1] in text and string in text  # Python finds a letter faster
            for string in self.exceptions
        )

    def cut_exceptions(self, text: str) -> list[tuple[str, bool]]:
        """Cut a text between words, at line starts; return the parts, and True for those with an
        exception."""
        lines = groupby(LINE_START.split(text), self.has_exception)
        return [("".join(part), has_exception) for has_exception, part in lines]


PATTERNS = {
    "GPT-2": Pattern(()),
    "Llama 3": Pattern((LLAMA3,), LONG_S),
    "Qwen 2": Pattern((QWEN2,), LONG_S),
    "Qwen 3.5": Pattern((QWEN3_5,), LONG_S),
    "o200k": Pattern((O200K,), LONG_S),
    "Kimi": Pattern((KIMI,), LONG_S),
    "Nemotron": Pattern((NEMOTRON,)),
    "DeepSeek V3": Pattern(DEEPSEEK3),
}
BY_SPLITS = {pattern.splits: pattern for pattern in PATTERNS.values()}


def find_pattern(pre_tokenizer: Step | None) -> Pattern | str:
    """Return the pattern of a tokenizer's `pre_tokenizer`, or why it is not supported."""
    if pre_tokenizer is None:
        return "it has no pre-tokenizer"
    if pre_tokenizer["type"] == "ByteLevel" and pre_tokenizer.get("use_regex", True):
        if pre_tokenizer.get("add_prefix_space"):
            return "it adds a space before each text"
        return PATTERNS["GPT-2"]
    *splits, last = pre_tokenizer.get("pretokenizers") or [pre_tokenizer]
    if last["type"] != "ByteLevel" or any(step["type"] != "Split" for step in splits):
        return "its pre-tokenizer is not supported"
    if last.get("use_regex", True) or last.get("add_prefix_space"):
        return "its pre-tokenizer splits texts twice, or adds a space before them"
    if any(step["behavior"] != "Isolated" or step.get("invert") for step in splits):
        return "its pre-tokenizer is not supported"
    pattern = BY_SPLITS.get(tuple(step["pattern"].get("Regex", "") for step in splits))
    return pattern if pattern and splits else "its pre-tokenizer's pattern is not supported"


def format_pre_tokenizer(pattern: Pattern) -> Step:
    """Return a pattern as the `pre_tokenizer` of a tokenizer's file."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    if not pattern.splits:
        return {**level, "use_regex": True}
    splits = [
        {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
        for regex in pattern.splits
    ]
    return {"type": "Sequence", "pretokenizers": [*splits, {**level, "use_regex": False}]}
