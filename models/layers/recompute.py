"""Recompute: a module keeps only its inputs for the backward pass, and runs again there."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

Recompute = Literal["none", "operator", "block"]
"""Unit that the backward pass recomputes: nothing, each operator call, or whole blocks."""


class Recomputable(nn.Module):
    """A module whose call may be recomputed, with no change to its `forward`.

    The whole call is recomputed, hooks included: engines that shard weights gather them again.
    """

    recompute: bool = False

    def __call__(self, *inputs: Any) -> Any:
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(super().__call__, *inputs, use_reentrant=False)
        return super().__call__(*inputs)
