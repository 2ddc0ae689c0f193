"""Peers' implementations in plain torch, although fla's kernels are installed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor


@contextmanager
def without_fla() -> Iterator[None]:
    """Inside, fla cannot be imported: modules of transformers that are imported here first take
    plain torch. With fla they call its kernels, on a CPU too, which fails."""
    imported = sys.modules.get("fla")
    sys.modules["fla"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["fla"]
        if imported is not None:
            sys.modules["fla"] = imported


@cache
def naive_fla(operation: str) -> Any:
    """Return the module fla.ops.OPERATION.naive, without importing fla and its kernels."""
    spec = find_spec("fla")
    assert spec is not None and spec.submodule_search_locations is not None
    file = Path(spec.submodule_search_locations[0]) / "ops" / operation / "naive.py"
    file_spec = spec_from_file_location(f"naive_{operation}", file)
    assert file_spec is not None and file_spec.loader is not None
    module = module_from_spec(file_spec)
    file_spec.loader.exec_module(module)
    return module


def in_fp64(function: Callable[..., Any], *inputs: Tensor, **options: Any) -> Any:
    """Call a function that converts its inputs to fp32, with fp64 in its place."""
    with (
        mock.patch.object(torch, "float32", torch.float64),
        mock.patch.object(torch, "float", torch.float64),
        mock.patch.object(Tensor, "float", Tensor.double),
    ):
        return function(*inputs, **options)


def load_theirs(folder: Path) -> Any:
    """Return transformers' model of a folder that has all its tensors, and no other."""
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager"
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    return model.eval()
