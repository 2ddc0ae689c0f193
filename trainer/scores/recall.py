"""Recall of earlier tokens, by the length of the context: tests that need no download.

    needle  text … KEY VALUE … text … KEY VALUE       a random string in text of a dataset
    copy    abcdefgh abcdefgh                         a random sequence, twice
    mqar    k1 v1 k2 v2 k3 v3 … k2 v2 k1 v1 k3 v3     pairs, then all keys in another order

Only tokens that the context determines are scored: the last VALUE, the second half of the copy
after its first tokens, the values of the second part. The seed, the task, the length and the number
of an example decide its tokens.
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
from .likelihood import Row, score
from .team import Team

KEY, VALUE = 16, 8
"""Tokens of a needle's key and value."""
SHORTEST = 64
"""Tokens of the shortest context: it holds a needle twice."""
FREQUENT = 0.99
"""Share of the text that the ids of random strings make up: rare ids may be untrained."""
SPARE = 64
"""Words that exist for each one that is used, so that chance does not repeat their beginnings."""
TEXT = 1 << 20
"""Most tokens that are read of the dataset, unless a context is longer."""


@dataclass(frozen=True)
class Material:
    """Tokens of which examples are made."""

    text: list[int]
    """Consecutive tokens of a dataset, in which needles hide."""
    ids: list[int]
    """Ids of random strings: the most frequent ids of the text."""

    @classmethod
    def read(cls, dataset: Dataset, longest: int) -> Material:
        if dataset.tokens < longest:
            raise InputError(
                f"{dataset.url} has {dataset.tokens:,} tokens, fewer than a context of {longest:,}",
                hint="ask for shorter --lengths, or name a larger dataset: --data URL",
            )
        text = np.empty(min(dataset.tokens, max(TEXT, longest)), np.int64)
        dataset.fill(0, text)
        end = dataset.manifest.tokenizer.end_of_document
        known, counts = np.unique(text[text != end], return_counts=True)
        order = np.argsort(-counts, kind="stable")
        needed = int(np.searchsorted(counts[order].cumsum(), FREQUENT * counts.sum())) + 1
        if needed < 2:
            raise InputError(
                f"nearly all tokens of {dataset.url} are alike",
                hint="name a dataset of text: --data URL",
            )
        return cls(text.tolist(), sorted(known[order[:needed]].tolist()))

    def string(self, random: Random, length: int) -> list[int]:
        return random.choices(self.ids, k=length)

    def words(self, random: Random, count: int, width: int) -> list[list[int]]:
        """Return different strings of one width."""
        base = len(self.ids)
        numbers = random.sample(range(base**width), count)
        return [
            [self.ids[number // base**place % base] for place in range(width)] for number in numbers
        ]

    def width(self, count: int) -> int:
        """Return the width at which far more words exist than `count`."""
        return math.ceil(math.log(SPARE * count) / math.log(len(self.ids)))


@dataclass(frozen=True)
class Example:
    row: Row
    answer: int
    """Tokens of an answer: the scored tokens are answers of this size, one after the other."""


def needle(material: Material, random: Random, length: int, depth: float) -> Example:
    key, value = material.string(random, KEY), material.string(random, VALUE)
    room = length - 2 * (KEY + VALUE)
    start = random.randrange(len(material.text) - room + 1)
    text = material.text[start : start + room]
    place = round(depth * room)
    ids = [*text[:place], *key, *value, *text[place:], *key, *value]
    return Example(Row(ids, range(length - VALUE, length)), VALUE)


def copy(material: Material, random: Random, length: int, depth: float) -> Example:
    half = length // 2
    ids = material.string(random, half) * 2
    return Example(Row(ids, range(half + KEY, 2 * half)), 1)


def mqar(material: Material, random: Random, length: int, depth: float) -> Example:
    width = material.width(length // 2)
    count = length // (4 * width)
    if count < 2:
        raise InputError(
            f"{length} tokens hold no two pairs for mqar: words have {width} of the "
            f"{len(material.ids)} frequent ids of the dataset",
            hint="ask for longer --lengths",
        )
    words = material.words(random, 2 * count, width)
    pairs = list(zip(words[:count], words[count:], strict=True))
    asked = random.sample(pairs, count)
    ids = [token for key, value in (*pairs, *asked) for token in (*key, *value)]
    scored = [
        (count + number) * 2 * width + width + place
        for number in range(count)
        for place in range(width)
    ]
    return Example(Row(ids, scored), width)


TASKS: dict[str, Callable[[Material, Random, int, float], Example]] = {
    "needle": needle,
    "copy": copy,
    "mqar": mqar,
}


def examples(
    task: str, material: Material, length: int, *, count: int, seed: int
) -> Iterator[Example]:
    """Yield the examples of a task; needles lie at evenly spread depths, the first at the start."""
    for number in range(count):
        random = Random(f"{seed}/{task}/{length}/{number}")
        yield TASKS[task](material, random, length, number / max(1, count - 1))


def measure(
    team: Team,
    material: Material,
    tasks: Sequence[str],
    lengths: Sequence[int],
    *,
    count: int,
    seed: int,
    batch_tokens: int,
) -> dict[str, list[dict[str, Any]]]:
    """Return the results of each task by length: the share of answers that are right in all tokens,
    and the mean loss of their tokens in nats."""
    results: dict[str, list[dict[str, Any]]] = {}
    for task in tasks:
        for length in lengths:
            asked = list(examples(task, material, length, count=count, seed=seed))
            scores = score(team, [example.row for example in asked], batch_tokens)
            right = [
                all(each.likeliest[place : place + example.answer])
                for example, each in zip(asked, scores, strict=True)
                for place in range(0, len(each.likeliest), example.answer)
            ]
            tokens = sum(len(each.likeliest) for each in scores)
            results.setdefault(task, []).append(
                {
                    "length": length,
                    "accuracy": sum(right) / len(right),
                    "loss": -sum(each.total for each in scores) / tokens,
                    "answers": len(right),
                    "answer_tokens": asked[0].answer,
                }
            )
    return results
