"""Tokenizers by kind: text to ids when a dataset is built, ids to text when it is read.

They are part of the data plane because readers of a dataset (an audit, a sample of a run) show its
documents as text. A manifest holds the arguments that restore its tokenizer; larger files lie
beside the manifest, named by their content.

To add a kind, write a module beside this one that implements tokenizer.py, and add a line to
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
    "module_of",
    "restore",
]

TOKENIZERS = {
    "byte": "headrace.dataplane.tokenizers.byte",
    "bpe": "headrace.dataplane.tokenizers.bpe",
}


def load(info: TokenizerInfo, url: str) -> Tokenizer:
    """Load the tokenizer of the dataset at `url`, whose manifest holds `info`."""
    return restore(info, partial(read_named, url), url)


def restore(info: TokenizerInfo, read: Callable[[str], bytes], where: str) -> Tokenizer:
    """Restore a tokenizer from its manifest entry; `read` reads the files beside the manifest."""
    if info.kind not in TOKENIZERS:
        raise InputError(
            f"the manifest of {where} names no tokenizer, so its ids cannot be shown as text",
            hint="index it again with --tokenizer byte or --tokenizer FILE.json",
        )
    return module_of(info.kind).restore(info, read)


def module_of(kind: str) -> TokenizerModule:
    """Return the module of a kind of tokenizer."""
    module: TokenizerModule = import_module(TOKENIZERS[kind])
    return module
