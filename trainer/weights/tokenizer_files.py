"""Render the files from which transformers loads a run's tokenizer.

A text has the same ids as in training, unless it contains names of special tokens: transformers
reads them as tokens, and a build reads them as text.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...dataplane.tokenizers import Tokenizer

PADS = ("<|pad|>", "<pad>", "<|padding|>", "[PAD]", "<|finetune_right_pad_id|>")
"""Usual padding tokens, in order of preference; without any, the end token pads."""
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|end_of_turn|>", "<|eot|>")
"""Usual tokens that end a turn. A token that the chat template writes ends generation too."""


def render_tokenizer_files(
    tokenizer: Tokenizer | None, *, chat_template: str | None = None, max_length: int | None = None
) -> dict[str, bytes]:
    """Return the files' contents by name. `max_length` is the model's longest context in tokens."""
    if tokenizer is None:
        return {}
    special, end = tokenizer.special, tokenizer.info.end_of_document
    pad = next((token for token in PADS if token in special), tokenizer.end_name)
    pad_id = special[pad].id if pad is not None and pad in special else end
    template = chat_template or ""
    turn_ends = [token for token in TURN_ENDS if token in special and token in template]
    ends = [end, *(special[token].id for token in turn_ends)]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",  # a prompt ends where the answer begins
        "eos_token": tokenizer.end_name,
        "pad_token": pad,
        "model_max_length": max_length,
        "chat_template": chat_template,
    }
    generation: dict[str, object] = {
        "eos_token_id": ends if turn_ends else end,
        "pad_token_id": pad_id,
    }
    return {
        "tokenizer.json": tokenizer.library_file(),
        "tokenizer_config.json": _encode_json(settings),
        "generation_config.json": _encode_json(generation),
    }


def _encode_json(settings: dict[str, object]) -> bytes:
    """Encode the settings that have a value."""
    return json.dumps({k: v for k, v in settings.items() if v is not None}, indent=2).encode()
