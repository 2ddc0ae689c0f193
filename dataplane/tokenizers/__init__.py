"""Tokenizers by kind: text to ids when a dataset is built, ids to text when it is read.

They belong to the data plane because readers (an audit, a run's samples) show documents as text. A
manifest holds the arguments to restore the tokenizer; larger files lie beside it, named by content.

To add a kind, write a module beside this file that implements tokenizer.py, and add a line to
TOKENIZERS.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module

from ...console.errors import InputError
from ..datasets.manifest import TokenizerInfo
from ..storage.verified import read_named
from .tokenizer import Encoded, Raw, SpecialToken, TextError, Tokenizer, TokenizerModule, id_type

__all__ = [
    "TOKENIZERS",
    "Encoded",
    "Raw",
    "SpecialToken",
    "TextError",
    "Tokenizer",
    "id_type",
    "load",
    "restore",
    "tokenizer_module",
]

TOKENIZERS = {
    "byte": "headrace.dataplane.tokenizers.byte",
    "bpe": "headrace.dataplane.tokenizers.bpe",
}


def load(info: TokenizerInfo, url: str) -> Tokenizer:
    """Load the tokenizer for the dataset at `url`, whose manifest holds `info`."""
    return restore(info, partial(read_named, url), url)


def restore(info: TokenizerInfo, read: Callable[[str], bytes], where: str) -> Tokenizer:
    """Restore a tokenizer from a manifest entry; `read` reads files beside the manifest."""
    if info.kind not in TOKENIZERS:
        raise InputError(
            f"the manifest of {where} names no tokenizer, so its ids cannot be shown as text",
            hint="index it again with --tokenizer byte or --tokenizer FILE.json",
        )
    return tokenizer_module(info.kind).restore(info, read)


def tokenizer_module(kind: str) -> TokenizerModule:
    """Import the module for a kind of tokenizer."""
    module: TokenizerModule = import_module(TOKENIZERS[kind])
    return module
