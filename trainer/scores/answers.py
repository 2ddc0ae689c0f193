"""Generated answers, each of which ends where a stop sequence is found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from ...dataplane.tokenizers import Tokenizer
from ...models.model.generate import Sampling, generate
from ...models.model.model import Model
from .likelihood import SCORE, score_batch

GENERATE = "generate"
"""Name of the work of a team."""


@dataclass(frozen=True)
class Question:
    """A context, and how the text after it is generated; those of a batch differ in the context
    alone."""

    context: Sequence[int]
    tokens: int
    """Most tokens of the answer."""
    sampling: Sampling
    until: tuple[str, ...]
    """The answer ends before the first of these."""


def works_of(load: Callable[[], tuple[Model, Tokenizer]]) -> dict[str, Callable[[Any], Any]]:
    """Return the functions of a batch that a team computes; `load` is called when a rank has its
    first batch."""
    loaded = cache(load)
    return {
        SCORE: lambda batch: score_batch(loaded()[0], batch),
        GENERATE: lambda batch: answer_batch(*loaded(), batch),
    }


def answer_batch(model: Model, tokenizer: Tokenizer, batch: Sequence[Question]) -> list[str]:
    """Return the answers; each holds its stop sequence, if it was found."""
    first, end = batch[0], tokenizer.info.end_of_document
    generated = generate(
        model,
        [question.context for question in batch],
        first.tokens,
        sampling=first.sampling,
        stop=end,
        vocab_size=tokenizer.info.vocab_size,
        ended=holds_one_of(first.until, tokenizer.decode),
    )
    return [tokenizer.decode(ids[:-1] if ids and ids[-1] == end else ids) for ids in generated]


def holds_one_of(
    until: Sequence[str], decode: Callable[[Sequence[int]], str]
) -> Callable[[Sequence[int]], bool]:
    """Return a function that says whether the text of ids holds a stop sequence, if it is asked
    after each new id."""
    stops = [stop for stop in until if stop]
    longest = max((len(stop.encode()) for stop in stops), default=0)

    def ended(ids: Sequence[int]) -> bool:
        # The last ids show a new stop sequence in time that does not grow with the text; the whole
        # text decides, because a part of a character has another text than the character.
        parts = (ids[-longest - 1 :], ids)
        return bool(stops) and all(
            any(stop in text for stop in stops) for text in map(decode, parts)
        )

    return ended
