"""Load another program's modules: `--module package:function`.

The function takes no arguments and returns (modules, input): a sequence of torch modules, where
every module maps its predecessor's result, and the first module's input for a single row. It runs
on the meta device, so that weights take no memory. The last result should be the loss.
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
    """Import `package:function`, also from the working directory."""
    package, colon, function = name.partition(":")
    if not (package and colon and function):
        raise PlanError(f"--module {name} has no function", hint=HINT)
    sys.path.insert(0, str(Path.cwd()))
    try:
        loaded = getattr(importlib.import_module(package), function)
    except (ImportError, AttributeError) as error:
        raise PlanError(f"--module {name} cannot be imported: {error}", hint=HINT) from error
    finally:
        sys.path.pop(0)
    if not callable(loaded):
        raise PlanError(f"--module {name} is not a function", hint=HINT)
    return loaded  # type: ignore[no-any-return]


def build_modules(name: str, dtype: torch.dtype) -> tuple[list[nn.Module], Tensor]:
    """Call the function on the meta device, where initializers that read values do nothing. Return
    the modules, with parameters in this dtype, and the input."""
    function = load_function(name)
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            result = function()
    finally:
        torch.set_default_dtype(default_dtype)
    try:
        modules, row = result
        modules = list(modules)
    except (TypeError, ValueError) as error:
        raise PlanError(f"--module {name} does not return a pair: {error}", hint=HINT) from error
    if not modules or not all(isinstance(module, nn.Module) for module in modules):
        raise PlanError(f"--module {name}: the first part is no sequence of modules", hint=HINT)
    if not isinstance(row, Tensor):
        raise PlanError(f"--module {name}: the input is no tensor", hint=HINT)
    return modules, row
