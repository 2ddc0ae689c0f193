"""Export a checkpoint's weights to the formats of further programs.

A single process reads tensor after tensor from the checkpoint's files, whatever layout saved them.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...console.config import load
from ...console.errors import UserError
from ...dataplane.order.stream import Stream
from ...dataplane.runlog.decisions import load_run_plan
from ...dataplane.storage import storage
from ...mixtures.disclosure.eu import render_eu
from ...mixtures.disclosure.facts import gather_facts
from ...mixtures.disclosure.statement import Statement
from ...models.conversion.folders import write_model
from ...models.weights import Weights
from .chat_template import find_template
from .model_card import MODEL_CARD, render_model_card
from .source import Checkpoint, WeightSource
from .tokenizer_files import render_tokenizer_files
from .trained_length import max_positions, set_trained_length

if TYPE_CHECKING:
    from ...dataplane.tokenizers import Tokenizer

"""File name for the page about the training data, in an exported folder."""
SUMMARY = "SUMMARY.md"
"""File name for the summary of the training data that a law asks for."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def export(
    source: WeightSource,
    out: str,
    format: str,
    *,
    dtype: str,
    tokenizer: Tokenizer | None,
    family: str | None = None,
    statement: str | None = None,
) -> dict[str, Any]:
    """Write the folder `out` and return a summary. `statement`: a file of the provider's, for the
    summary of the training data."""
    stated = None if statement is None else _summarize(source, statement)
    weights = source.weights()
    model = set_trained_length(source)
    template = find_template(source)
    cast = Weights(weights.shapes, lambda tensor: weights[tensor].to(DTYPES[dtype]))
    with tempfile.TemporaryDirectory() as folder:
        files = render_tokenizer_files(
            tokenizer,
            chat_template=None if template is None else template.jinja,
            max_length=max_positions(model),
        )
        for file_name, data in files.items():
            (Path(folder) / file_name).write_bytes(data)
        variant = write_model(
            model,
            cast,
            out,
            format=format,
            tokenizer=folder if files else None,
            family=family,
        )
    stream = read_stream(source)
    pages = {}
    if isinstance(source, Checkpoint):
        pages[MODEL_CARD] = render_model_card(
            source, model, family=variant, format=format, stream=stream
        )
    if stated is not None:
        pages[SUMMARY] = stated
    for name, page in pages.items():
        storage.write(storage.join(out, name), page.encode())
    return {
        "from": source.where,
        "out": out,
        "format": format,
        "family": variant,
        "dtype": dtype,
        "tensors": len(weights),
        "tokenizer": sorted(files),
        "chat_template": None
        if template is None or not files
        else {"source": template.source, "different": template.different},
        "data": MODEL_CARD if MODEL_CARD in pages and stream is not None else None,
        "summary": SUMMARY if SUMMARY in pages else None,
    }


def read_stream(source: WeightSource) -> Stream | None:
    """Return the stream that trained the weights; None without a run's plan."""
    if not isinstance(source, Checkpoint) or source.run is None or not source.run.plan.exists():
        return None
    return Stream(load_run_plan(source.run.root))


def _summarize(source: WeightSource, statement: str) -> str:
    """Summarize what the weights of a run were trained on."""
    if not isinstance(source, Checkpoint) or source.run is None:
        raise UserError(
            "--statement summarizes the data of a run, and these weights have none",
            hint="export a checkpoint in its run's folder",
        )
    stated = load(Statement, statement)
    return render_eu(gather_facts(str(source.run.root), stated, statement, source.step))
