"""Measure recall of earlier tokens by context length; nothing is downloaded.

    needle  text … KEY VALUE … text … KEY VALUE       a random string in text of a dataset
    copy    abcdefgh abcdefgh                         a random sequence, twice
    mqar    k1 v1 k2 v2 k3 v3 … k2 v2 k1 v1 k3 v3     pairs, then all keys in another order

Only tokens that the context determines are scored: the last VALUE, the copy after its first tokens,
and the values after the repeated keys. An example follows from the seed, task, length and number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from ...console.errors import InputError
from ...dataplane.datasets.dataset import Dataset
from ..placement.team import Team
from .likelihood import ScoredRow, score_rows

KEY, VALUE = 16, 8
"""Tokens in a needle's key and value."""
SHORTEST = 64
"""Shortest context in tokens: a needle fits in twice."""
FREQUENT = 0.99
"""Random strings use the most frequent ids, which make up this share of the text: rare ids may be
untrained."""
SPARE = 64
"""Possible words per used word, so that words rarely begin alike by chance."""
TEXT = 1 << 20
"""Maximum tokens to read from the dataset, unless a context is longer."""


@dataclass(frozen=True)
class Material:
    """Tokens from which examples are built."""

    text: list[int]
    """Consecutive tokens from a dataset, in which needles hide."""
    ids: list[int]
    """Ids for random strings: the most frequent ids in the text."""

    @classmethod
    def read(cls, dataset: Dataset, max_length: int) -> Material:
        if dataset.tokens < max_length:
            raise InputError(
                f"{dataset.url} has {dataset.tokens:,} tokens, fewer than a context of "
                f"{max_length:,}",
                hint="ask for shorter --lengths, or name a larger dataset: --data URL",
            )
        text = np.empty(min(dataset.tokens, max(TEXT, max_length)), np.int64)
        dataset.fill(0, text)
        end = dataset.manifest.tokenizer.end_of_document
        ids, counts = np.unique(text[text != end], return_counts=True)
        order = np.argsort(-counts, kind="stable")
        num_ids = int(np.searchsorted(counts[order].cumsum(), FREQUENT * counts.sum())) + 1
        if num_ids < 2:
            raise InputError(
                f"nearly all tokens of {dataset.url} are alike",
                hint="name a dataset of text: --data URL",
            )
        return cls(text.tolist(), sorted(ids[order[:num_ids]].tolist()))

    def draw_string(self, random: Random, length: int) -> list[int]:
        return random.choices(self.ids, k=length)

    def draw_words(self, random: Random, count: int, width: int) -> list[list[int]]:
        """Draw `count` distinct strings with `width` tokens."""
        base = len(self.ids)
        numbers = random.sample(range(base**width), count)
        return [
            [self.ids[number // base**digit % base] for digit in range(width)] for number in numbers
        ]

    def word_width(self, count: int) -> int:
        """Return the width in tokens at which far more words exist than `count`."""
        return math.ceil(math.log(SPARE * count) / math.log(len(self.ids)))


@dataclass(frozen=True)
class Example:
    row: ScoredRow
    answer_tokens: int
    """Tokens per answer. The scored tokens are consecutive answers."""


def needle(material: Material, random: Random, length: int, depth: float) -> Example:
    key, value = material.draw_string(random, KEY), material.draw_string(random, VALUE)
    text_length = length - 2 * (KEY + VALUE)
    start = random.randrange(len(material.text) - text_length + 1)
    text = material.text[start : start + text_length]
    position = round(depth * text_length)
    ids = [*text[:position], *key, *value, *text[position:], *key, *value]
    return Example(ScoredRow(ids, range(length - VALUE, length)), VALUE)


def copy(material: Material, random: Random, length: int, depth: float) -> Example:
    half = length // 2
    ids = material.draw_string(random, half) * 2
    return Example(ScoredRow(ids, range(half + KEY, 2 * half)), 1)


def mqar(material: Material, random: Random, length: int, depth: float) -> Example:
    width = material.word_width(length // 2)
    count = length // (4 * width)
    if count < 2:
        raise InputError(
            f"{length} tokens hold no two pairs for mqar: words have {width} of the "
            f"{len(material.ids)} frequent ids of the dataset",
            hint="ask for longer --lengths",
        )
    words = material.draw_words(random, 2 * count, width)
    pairs = list(zip(words[:count], words[count:], strict=True))
    shuffled = random.sample(pairs, count)
    ids = [token for key, value in (*pairs, *shuffled) for token in (*key, *value)]
    scored = [
        (count + number) * 2 * width + width + offset
        for number in range(count)
        for offset in range(width)
    ]
    return Example(ScoredRow(ids, scored), width)


TASKS: dict[str, Callable[[Material, Random, int, float], Example]] = {
    "needle": needle,
    "copy": copy,
    "mqar": mqar,
}


def build_examples(
    task: str, material: Material, length: int, *, count: int, seed: int
) -> Iterator[Example]:
    """Yield a task's examples. Needles lie at evenly spaced depths, the first at the start."""
    for number in range(count):
        random = Random(f"{seed}/{task}/{length}/{number}")
        yield TASKS[task](material, random, length, number / max(1, count - 1))


def measure_recall(
    team: Team,
    material: Material,
    tasks: Sequence[str],
    lengths: Sequence[int],
    *,
    count: int,
    seed: int,
    batch_tokens: int,
) -> dict[str, list[dict[str, Any]]]:
    """Return results by task, in the order of `lengths`: the share of answers whose tokens are all
    right, and the mean loss of the answers' tokens in nats."""
    results: dict[str, list[dict[str, Any]]] = {}
    for task in tasks:
        for length in lengths:
            examples = list(build_examples(task, material, length, count=count, seed=seed))
            scores = score_rows(team, [example.row for example in examples], batch_tokens)
            right = [
                all(score.likeliest[start : start + example.answer_tokens])
                for example, score in zip(examples, scores, strict=True)
                for start in range(0, len(score.likeliest), example.answer_tokens)
            ]
            tokens = sum(len(score.likeliest) for score in scores)
            results.setdefault(task, []).append(
                {
                    "length": length,
                    "accuracy": sum(right) / len(right),
                    "loss": -sum(score.total for score in scores) / tokens,
                    "answers": len(right),
                    "answer_tokens": examples[0].answer_tokens,
                }
            )
    return results
