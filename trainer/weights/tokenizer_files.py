"""The files from which transformers loads a run's tokenizer.

Ids are those of the training data for every text, but for names of special tokens in it:
transformers takes them for the tokens, and a build takes them for text.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...dataplane.tokenizers import Tokenizer

PADS = ("<|pad|>", "<pad>", "<|padding|>", "[PAD]", "<|finetune_right_pad_id|>")
"""Usual names of the padding token, tried in this order; without one, the end token pads."""
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|end_of_turn|>", "<|eot|>")
"""Usual names of the token that ends a turn. Where the chat template writes one, it ends generation
too."""


def tokenizer_files(
    tokenizer: Tokenizer | None, *, chat_template: str | None = None, length: int | None = None
) -> dict[str, bytes]:
    """Return the files by name; `length` is the most tokens that the model should read."""
    if tokenizer is None:
        return {}
    special, end = tokenizer.special, tokenizer.info.end_of_document
    pad = next((name for name in PADS if name in special), tokenizer.end_name)
    pad_id = special[pad].id if pad is not None and pad in special else end
    turn_ends = [name for name in TURN_ENDS if name in special and name in (chat_template or "")]
    ends = [end, *(special[name].id for name in turn_ends)]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",  # a prompt ends where the answer begins
        "eos_token": tokenizer.end_name,
        "pad_token": pad,
        "model_max_length": length,
        "chat_template": chat_template,
    }
    generation: dict[str, object] = {
        "eos_token_id": ends if turn_ends else end,
        "pad_token_id": pad_id,
    }
    return {
        "tokenizer.json": tokenizer.library_file(),
        "tokenizer_config.json": _json(settings),
        "generation_config.json": _json(generation),
    }


def _json(settings: dict[str, object]) -> bytes:
    """Return the settings that have a value."""
    return json.dumps({k: v for k, v in settings.items() if v is not None}, indent=2).encode()
