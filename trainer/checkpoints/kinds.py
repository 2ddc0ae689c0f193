"""Kinds of the tensors that a checkpoint holds of a parameter."""

from __future__ import annotations

MASTER = "master"


AVERAGE = "ema"
"""Kind of the moving averages of the weights."""


def keyed(kind: str, parameter: str) -> str:
    return f"{kind}.{parameter}"
