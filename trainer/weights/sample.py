"""Generate text from prompts with a checkpoint's weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

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
class Completion:
    """A prompt and the generated text; the fields are keys of `trainer sample --json`."""

    prompt: str
    text: str
    """Generated text, without the end-of-document token."""
    tokens: int
    ended: bool
    """True if the model ended the document."""


def sample(
    model: Model,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    tokens: int,
    *,
    sampling: Sampling,
    agree: Callable[[Tensor], Tensor] = lambda ids: ids,
) -> list[Completion]:
    """Generate up to `tokens` tokens after each prompt. An empty prompt begins a document. `agree`
    is that of `generate`."""
    end = tokenizer.info.end_of_document
    ids = encode_prompts(tokenizer, prompts)
    check_vocabulary(tokenizer, model.config)
    generated = generate(
        model,
        ids,
        tokens,
        sampling=sampling,
        stop=end,
        vocab_size=tokenizer.info.vocab_size,
        agree=agree,
    )
    completions = []
    for prompt, new_ids in zip(prompts, generated, strict=True):
        ended = bool(new_ids) and new_ids[-1] == end
        text = tokenizer.decode(new_ids[:-1] if ended else new_ids)
        completions.append(Completion(prompt, text, len(new_ids), ended))
    return completions


def check_vocabulary(tokenizer: Tokenizer, model: ModelConfig) -> None:
    """Raise if the tokenizer has more ids than the model embeds."""
    vocab_size = tokenizer.info.vocab_size
    if vocab_size > model.vocab_size:
        raise InputError(
            f"the tokenizer has {vocab_size:,} ids, the model embeds {model.vocab_size:,}",
            hint="name a dataset with the tokenizer of the model's training data: --data URL",
        )


def load(source: WeightSource, device: DeviceKind = "auto") -> Model:
    """Load the model onto a device: fp32 on a CPU, bf16 on a GPU, as in training."""
    target = local_device(choose_device(device))
    model = Model(source.model)
    model.init_weights(0)  # computes the buffers; every parameter is overwritten
    weights = source.weights()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.copy_(weights[parameter_name])
    model.cast(default_precision(target.type))
    return model.to(target).eval()


def encode_prompts(tokenizer: Tokenizer, prompts: Sequence[str]) -> list[list[int]]:
    """Encode the prompts. An empty prompt becomes the end-of-document token, which precedes every
    document."""
    end = tokenizer.info.end_of_document
    try:
        encoded = tokenizer.encode(list(prompts))
    except TextError as error:
        raise InputError(
            f"prompt {error.number + 1} cannot be tokenized: {error.why}",
            hint="remove what the tokenizer has no id for",
        ) from None
    starts = encoded.starts.tolist()
    ids = [encoded.tokens[start : end - 1].tolist() for start, end in pairwise(starts)]
    if end is None and not all(ids):
        raise InputError(
            "a prompt is empty, and the tokenizer has no end-of-document token to begin with",
            hint="give a prompt of at least one token",
        )
    return [prompt or [int(end or 0)] for prompt in ids]
