"""Generate text from prompts with the weights of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from ...console.errors import InputError
from ...dataplane.tokenizers import TextError
from ...models.config.options.precision import default_precision
from ...models.model.generate import Sampling, generate
from ...models.model.model import Model
from ..layout.devices import DeviceKind, choose_device, local_device
from .source import WeightSource

if TYPE_CHECKING:
    from ...dataplane.tokenizers import Tokenizer
    from ...models.config.config import ModelConfig


@dataclass(frozen=True)
class Sample:
    prompt: str
    text: str
    """Generated text, without the end-of-document token."""
    tokens: int
    ended: bool
    """True if the model ended the document."""


def sample(
    source: WeightSource,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    tokens: int,
    *,
    sampling: Sampling,
    device: DeviceKind = "auto",
) -> list[Sample]:
    """Generate up to `tokens` tokens after each prompt. An empty prompt begins a document."""
    end = tokenizer.info.end_of_document
    ids = _encode(tokenizer, prompts)
    model = load(source, device)
    check_vocabulary(tokenizer, model.config)
    vocabulary = tokenizer.info.vocab_size
    generated = generate(model, ids, tokens, sampling=sampling, stop=end, vocab_size=vocabulary)
    samples = []
    for prompt, new in zip(prompts, generated, strict=True):
        ended = bool(new) and new[-1] == end
        text = tokenizer.decode(new[:-1] if ended else new)
        samples.append(Sample(prompt, text, len(new), ended))
    return samples


def check_vocabulary(tokenizer: Tokenizer, model: ModelConfig) -> None:
    vocabulary = tokenizer.info.vocab_size
    if vocabulary > model.vocab_size:
        raise InputError(
            f"the tokenizer has {vocabulary:,} ids, the model embeds {model.vocab_size:,}",
            hint="name a dataset with the tokenizer of the model's training data: --data URL",
        )


def load(source: WeightSource, device: DeviceKind = "auto") -> Model:
    """Return a model with these weights: fp32 on CPU, bf16 on a GPU, as in training."""
    place = local_device(choose_device(device))
    model = Model(source.model)
    model.init_weights(0)  # for buffers, which are computed; every parameter is overwritten
    weights = source.weights()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    model.cast(default_precision(place.type))
    return model.to(place).eval()


def _encode(tokenizer: Tokenizer, prompts: Sequence[str]) -> list[list[int]]:
    """Return each prompt's ids; for an empty prompt, the end-of-document token, which stands before
    every document."""
    end = tokenizer.info.end_of_document
    try:
        encoded = tokenizer.encode(list(prompts))
    except TextError as error:
        raise InputError(
            f"prompt {error.number + 1} cannot be tokenized: {error.why}",
            hint="remove what the tokenizer has no id for",
        ) from None
    edges = encoded.starts.tolist()
    ids = [encoded.tokens[first : last - 1].tolist() for first, last in pairwise(edges)]
    if end is None and not all(ids):
        raise InputError(
            "a prompt is empty, and the tokenizer has no end-of-document token to begin with",
            hint="give a prompt of at least one token",
        )
    return [prompt or [int(end or 0)] for prompt in ids]
