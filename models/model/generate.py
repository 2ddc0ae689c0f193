"""Generation: constant-size states for the recurrent operators, a KV cache for attention.

Prompts of different lengths share a batch: a shorter prompt stands at its row's end, and the
padding before it is a separate document, which operators isolate like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...console.errors import ConfigError, ConfigProblem
from ..documents import Documents
from .model import Model


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen from the logits."""

    temperature: float = 1.0
    """0 takes the most likely token."""
    top_k: int | None = None
    """Sample from the k most likely tokens only."""
    top_p: float | None = None
    """Sample from the most likely tokens that reach this probability together."""
    seed: int = 0
    """Random seed."""

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature must be at least 0, not {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, not {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, not {self.top_p}")


@torch.no_grad()
def generate(
    model: Model,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    *,
    sampling: Sampling | None = None,
    stop: int | None = None,
    vocab_size: int | None = None,
    ended: Callable[[Sequence[int]], bool] = lambda row: False,
    agree: Callable[[Tensor], Tensor] = lambda ids: ids,
) -> list[list[int]]:
    """Generate up to `tokens` new tokens per prompt. A row ends with `stop`, which is kept, or when
    `ended(new_tokens)` is true. Ids from `vocab_size` on are embedding padding and never chosen.
    `agree` makes ranks that generate the same rows take the same ids [rows, 1]."""
    sampling = sampling or Sampling()
    max_length = max((len(prompt) for prompt in prompts), default=0)
    ragged = any(len(prompt) < max_length for prompt in prompts)
    vocabulary = model.config.vocab_size
    problems = [] if prompts else [ConfigProblem("prompts", "there is no prompt")]
    for index, prompt in enumerate(prompts):
        unknown_ids = [token for token in prompt if not 0 <= token < vocabulary]
        if not prompt:
            problems.append(ConfigProblem(f"prompt {index}", "is empty"))
        if unknown_ids:
            message = f"has the id {unknown_ids[0]}; the vocabulary has {vocabulary}"
            problems.append(ConfigProblem(f"prompt {index}", message))
    if ragged and not model.config.isolate_documents:
        message = "is false: prompts of different lengths cannot share a batch"
        problems.append(ConfigProblem("isolate_documents", message))
    if problems:
        raise ConfigError("generation", problems)

    device = model.embedding.weight.device
    generator = torch.Generator(device).manual_seed(sampling.seed)
    padding = torch.tensor([max_length - len(prompt) for prompt in prompts], device=device)[:, None]
    rows = [[0] * (max_length - len(prompt)) + list(prompt) for prompt in prompts]
    ids = torch.tensor(rows, device=device)
    column = torch.arange(max_length, device=device).expand_as(ids)
    positions = torch.where(column < padding, column, column - padding)

    training = model.training
    model.eval()
    try:
        states = model.new_states(max_length + tokens)
        new_tokens: list[list[int]] = [[] for _ in prompts]
        running_rows = list(range(len(prompts)))
        for index in range(tokens):
            documents = Documents(positions) if ragged else None
            hidden, _ = model.hidden(ids, documents, states=states)
            logits = model.logits(hidden[:, -1])[:, :vocab_size]
            ids = agree(sample_tokens(logits, sampling, generator)[:, None])
            positions = max_length - padding + index
            for row, token in enumerate(ids[:, 0].tolist()):
                if row in running_rows:
                    new_tokens[row].append(token)
            running_rows = [
                row
                for row in running_rows
                if new_tokens[row][-1] != stop and not ended(new_tokens[row])
            ]
            if not running_rows:
                break
    finally:
        model.train(training)
    return new_tokens


def sample_tokens(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """Sample a token per row, [rows], from logits [rows, vocabulary]."""
    if sampling.temperature == 0:
        return logits.argmax(dim=-1)
    scaled = logits.float() / sampling.temperature
    if sampling.top_k is not None:
        lowest_kept = scaled.topk(min(sampling.top_k, scaled.shape[-1])).values[:, -1:]
        scaled = scaled.masked_fill(scaled < lowest_kept, float("-inf"))
    if sampling.top_p is not None:
        sorted_logits, order = scaled.sort(dim=-1, descending=True)
        probability = sorted_logits.softmax(dim=-1)
        excluded = probability.cumsum(dim=-1) - probability >= sampling.top_p
        scaled = scaled.masked_fill(excluded.gather(-1, order.argsort(dim=-1)), float("-inf"))
    return torch.multinomial(scaled.softmax(dim=-1), 1, generator=generator).squeeze(-1)
