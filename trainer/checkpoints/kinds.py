"""Kinds of tensors that a checkpoint stores for a parameter."""

from __future__ import annotations

MASTER = "master"
AVERAGE = "ema"
"""Moving averages of the weights."""


def tensor_key(kind: str, parameter: str) -> str:
    return f"{kind}.{parameter}"
