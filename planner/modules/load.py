"""Modules of another program: `--module package:function`.

The function takes nothing and returns (modules, input): a sequence of torch modules, each of which
maps the result of the one before it, and the input of the first for one row. It is called on
the meta device, so that its weights take no memory. The last result should be the loss.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...console.errors import PlanError

HINT = "it is package:function, and the function returns (modules, input of one row)"


def load_function(name: str) -> Callable[[], Any]:
    """Import `package:function`; modules beside the working directory are found too."""
    package, colon, function = name.partition(":")
    if not (package and colon and function):
        raise PlanError(f"--module {name} has no function", hint=HINT)
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(package), function)
    except (ImportError, AttributeError) as error:
        raise PlanError(f"--module {name} cannot be imported: {error}", hint=HINT) from error
    finally:
        sys.path.pop(0)
    if not callable(found):
        raise PlanError(f"--module {name} is not a function", hint=HINT)
    return found  # type: ignore[no-any-return]


def build(name: str, compute: torch.dtype) -> tuple[list[nn.Module], Tensor]:
    """Call the function on the meta device, where initializers that read values do nothing, with
    parameters of this number format."""
    function = load_function(name)
    standard = torch.get_default_dtype()
    torch.set_default_dtype(compute)
    try:
        with torch.device("meta"):
            made = function()
    finally:
        torch.set_default_dtype(standard)
    try:
        modules, row = made
        modules = list(modules)
    except (TypeError, ValueError) as error:
        raise PlanError(f"--module {name} does not return a pair: {error}", hint=HINT) from error
    if not modules or not all(isinstance(each, nn.Module) for each in modules):
        raise PlanError(f"--module {name}: the first part is no sequence of modules", hint=HINT)
    if not isinstance(row, Tensor):
        raise PlanError(f"--module {name}: the input is no tensor", hint=HINT)
    return modules, row
