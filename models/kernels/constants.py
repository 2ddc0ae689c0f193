"""Constants such as lags and decays: computed once, not once a layer and step."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .op import is_watched

MAX_CONSTANTS = 64
"""Constants kept at a time: a model has a few, but a process may build many models."""
_constants: dict[Hashable, Tensor] = {}


def constant(compute: Callable[..., Tensor], *arguments: Hashable) -> Tensor:
    """Return compute(*arguments), which nobody may write to. Where operations are traced or
    compiled, it is computed anew: a graph must not depend on earlier calls."""
    if is_compiling() or is_watched():
        return compute(*arguments)
    key = (compute, *arguments)
    tensor = _constants.get(key)
    if tensor is None:
        if len(_constants) >= MAX_CONSTANTS:
            _constants.clear()
        with torch.inference_mode(False), torch.no_grad():
            tensor = _constants[key] = compute(*arguments)
    return tensor
