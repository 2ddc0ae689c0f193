"""Micro-batch and layout of a rank whose memory is counted."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..config.options.names import AttentionForm, LinearForm, LongFilterForm
from ..config.options.precision import Precision
from .state import Degrees


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Rows, precision, device and layout of one rank's micro-batch."""

    rows: int
    """Rows of a micro-batch; the ranks of tp and cp have parts of them."""
    seq_len: int
    precision: Precision
    device: str
    degrees: Degrees = field(default_factory=Degrees)
    attention: AttentionForm = "a2a"
    hyena_li: LongFilterForm = "states"
    linear: LinearForm = "torch"
    """The function of the engine."""
    threads: int = 1
    """Threads of a rank on a CPU: each has scores of its own in attention."""
