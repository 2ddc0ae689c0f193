"""What a model says: text that goes on from prompts, by the weights of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from ...console.errors import InputError
from ...dataplane.tokenizers import TextError
from ...models.generate import Sampling, generate
from ...models.model import Model
from ..layout.devices import DeviceKind, choose_device
from .source import WeightSource

if TYPE_CHECKING:
    from ...dataplane.tokenizers import Tokenizer


@dataclass(frozen=True)
class Sample:
    prompt: str
    text: str
    """What was generated, without the mark that ends a document."""
    tokens: int
    ended: bool
    """Whether the model ended the document."""


def sample(
    origin: WeightSource,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    tokens: int,
    *,
    sampling: Sampling,
    device: DeviceKind = "auto",
) -> list[Sample]:
    """Up to `tokens` tokens after each prompt. An empty prompt begins a document."""
    end = tokenizer.info.end_of_document
    ids = _encode(tokenizer, prompts)
    model = load(origin, device)
    known = tokenizer.info.vocab_size
    if known > model.config.vocab_size:
        raise InputError(
            f"the tokenizer has {known:,} ids, the model embeds {model.config.vocab_size:,}",
            hint="take the tokenizer that the model was trained with",
        )
    said = generate(model, ids, tokens, sampling=sampling, stop=end, vocab_size=known)
    found = []
    for prompt, new in zip(prompts, said, strict=True):
        ended = bool(new) and new[-1] == end
        text = tokenizer.decode(new[:-1] if ended else new)
        found.append(Sample(prompt, text, len(new), ended))
    return found


def load(origin: WeightSource, device: DeviceKind = "auto") -> Model:
    """A model with these weights: fp32 on CPU, bf16 on a GPU."""
    place = choose_device(device)
    model = Model(origin.model)
    model.init_weights(0)  # whatever is computed, and no parameter
    weights = origin.weights()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    return model.to(place, torch.bfloat16 if place == "cuda" else torch.float32).eval()


def _encode(tokenizer: Tokenizer, prompts: Sequence[str]) -> list[list[int]]:
    """Each prompt's ids; where there are none, the mark before a document."""
    end = tokenizer.info.end_of_document
    try:
        encoded = tokenizer.encode(list(prompts))
    except TextError as error:
        raise InputError(f"prompt {error.number + 1} cannot be tokenized: {error.why}") from None
    edges = encoded.starts.tolist()
    ids = [encoded.tokens[first : last - 1].tolist() for first, last in pairwise(edges)]
    if end is None and not all(ids):
        raise InputError(
            "a prompt is empty, and the tokenizer has no mark to begin a document with"
        )
    return [each or [int(end or 0)] for each in ids]
