"""Names that options choose among."""

from __future__ import annotations

from typing import Annotated, Literal, TypedDict

from ....console.config import Elsewhere

NormKind = Literal["rms", "rms-eps-outside", "rms-zero-centered", "layer"]
NEXT_PROGRAMS = Elsewhere(next="is chosen in the run, for each kernel: `kernels.NAME: next`")
Kernel = Annotated[Literal["auto", "triton", "torch"], NEXT_PROGRAMS]
DeltaKernel = Annotated[Literal["auto", "triton", "torch", "fla"], NEXT_PROGRAMS]
"""fla: the programs of flash-linear-attention."""
FLA_INSTALL = 'pip install "headrace[fla]"'
Method = Literal["auto", "direct", "toeplitz", "fft"]
Activation = Literal["silu", "gelu", "gelu-tanh", "quick-gelu", "relu", "relu2", "identity"]
"""quick-gelu is x·sigmoid(1.702·x), relu2 is relu(x)²."""
AttentionForm = Literal["a2a", "ring"]
"""a2a: each rank has whole rows for some heads. ring: keys and values travel round the ranks."""
LongFilterForm = Literal["states", "a2a"]
"""states: each rank passes its final state to later ranks. a2a: whole rows for some channels."""
DeltaForm = Literal["states", "a2a"]
"""states: each rank passes its final state and transition matrix to later ranks. a2a: whole rows
for some heads."""


class RowForms(TypedDict):
    """How operators work on rows that ranks share, by the layout's key."""

    attention: AttentionForm
    hyena_li: LongFilterForm
    delta: DeltaForm


LinearForm = Literal["torch", "zero3"]
"""Function that computes linear layers: torch's, or DeepSpeed's for ZeRO-3."""
Backend = Literal["inductor", "aot_eager", "eager"]
"""inductor generates code; aot_eager traces forward and backward passes and runs torch's own
operations, eager traces the forward pass alone. These two need no compiler."""
Divisor = Literal["weights", "targets"]
"""Divisor of Σ w·ℓ: weights: Σ w; targets: the count of targets with nonzero weight. They differ
where weights are neither 0 nor 1. Savanna calls them `normalized_weighted` and `weighted`."""
