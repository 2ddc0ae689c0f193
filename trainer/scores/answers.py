"""Generate answers up to their first stop sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor

from ...dataplane.tokenizers import Tokenizer
from ...models.model.generate import Sampling, generate
from ...models.model.model import Model
from ..placement.local_rows import shares_rows
from ..placement.ranks import RowRanks
from ..placement.team import Team
from ..weights.source import WeightSource
from .likelihood import SCORE, score_batch

GENERATE = "generate"
"""Name of the team's function that generates."""


@dataclass(frozen=True)
class GenerationRequest:
    """A context and the settings for the text after it. Requests in a batch differ in the context
    alone."""

    context: Sequence[int]
    max_tokens: int
    sampling: Sampling
    stop_sequences: tuple[str, ...]
    """The answer ends before the first of these."""


def batch_functions(
    load: Callable[[], tuple[Model, Tokenizer]], agree: Callable[[Tensor], Tensor] = lambda ids: ids
) -> dict[str, Callable[[Any], Any]]:
    """Return the functions for a `Team`, by name. A rank calls `load` at its first batch; `agree`
    is that of `generate`."""
    load_once = cache(load)
    return {
        SCORE: lambda batch: score_batch(load_once()[0], batch),
        GENERATE: lambda batch: generate_batch(*load_once(), batch, agree),
    }


def rank_team(ranks: RowRanks, weights: WeightSource, tokenizer: Tokenizer) -> Team:
    """Load the weights onto the ranks, and return the team that scores and generates. Ranks that
    share rows only score: no operator keeps a state for a part of a row."""
    model = ranks.load(weights)
    functions = batch_functions(lambda: (model, tokenizer), ranks.broadcast_ids)
    if shares_rows(model):
        del functions[GENERATE]
    return ranks.team(functions, functions[SCORE], joint=[GENERATE])


def generate_batch(
    model: Model,
    tokenizer: Tokenizer,
    batch: Sequence[GenerationRequest],
    agree: Callable[[Tensor], Tensor] = lambda ids: ids,
) -> list[str]:
    """Generate the answers. An answer that a stop sequence ended still contains it."""
    first, end = batch[0], tokenizer.info.end_of_document
    generated = generate(
        model,
        [request.context for request in batch],
        first.max_tokens,
        sampling=first.sampling,
        stop=end,
        vocab_size=tokenizer.info.vocab_size,
        ended=stop_condition(first.stop_sequences, tokenizer.decode),
        agree=agree,
    )
    return [tokenizer.decode(ids[:-1] if ids and ids[-1] == end else ids) for ids in generated]


def stop_condition(
    stop_sequences: Sequence[str], decode: Callable[[Sequence[int]], str]
) -> Callable[[Sequence[int]], bool]:
    """Return a function that tells whether the text of ids contains a stop sequence. It must be
    called after every new id."""
    stops = [stop for stop in stop_sequences if stop]
    max_bytes = max((len(stop.encode()) for stop in stops), default=0)

    def has_ended(ids: Sequence[int]) -> bool:
        # The last ids show a new stop sequence in time that does not grow with the text; the whole
        # text decides, because an incomplete character decodes to another one.
        candidates = (ids[-max_bytes - 1 :], ids)
        return bool(stops) and all(
            any(stop in text for stop in stops) for text in map(decode, candidates)
        )

    return has_ended
