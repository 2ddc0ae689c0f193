"""A checkpoint's weights in a folder that others read.

It works from the checkpoint's files, one tensor after the other, in one process, whatever layout
saved them.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...models.conversion.folders import write_model
from ...models.weights import Weights
from .source import WeightSource

if TYPE_CHECKING:
    from ...dataplane.tokenizers import Tokenizer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def export(
    origin: WeightSource, out: str, format: str, *, dtype: str, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """Write the folder `out`; what was written, for a program."""
    weights = origin.weights()
    cast = Weights(weights.shapes, lambda name: weights[name].to(DTYPES[dtype]))
    with tempfile.TemporaryDirectory() as folder:
        files = tokenizer_files(tokenizer)
        for name, data in files.items():
            (Path(folder) / name).write_bytes(data)
        source = folder if files else None
        written = write_model(origin.model, cast, out, format=format, tokenizer=source)
    return {
        "from": origin.where,
        "out": out,
        "format": format,
        "family": written,
        "dtype": dtype,
        "tensors": len(weights),
        "tokenizer": sorted(files),
    }


def tokenizer_files(tokenizer: Tokenizer | None) -> dict[str, bytes]:
    """A tokenizer as transformers loads it. One of bytes has no such form: there is only the id
    at which generation ends."""
    if tokenizer is None:
        return {}
    info = tokenizer.info
    found = {"generation_config.json": _json(eos_token_id=info.end_of_document)}
    if info.kind == "bpe":
        end = info.spec["end_of_document"]
        kind = "PreTrainedTokenizerFast"
        found["tokenizer_config.json"] = _json(tokenizer_class=kind, eos_token=end)
        (found["tokenizer.json"],) = tokenizer.files.values()
    return found


def _json(**content: object) -> bytes:
    return json.dumps(content, indent=2).encode()
