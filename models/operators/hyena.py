"""What the Hyena operators share: y = (q ⊙ op(k ⊙ v))·W_out + b, behind a short featurizer.

z = u·W                      D → 3D, no bias
q, k, v = conv3(z)           a causal filter of three taps for each channel
w = k ⊙ v                    the gate before the operator
y = q ⊙ (h ∗ w + d·w)        the gate after it; d only for MR and LI
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..initialise import Initialiser
from ..linear import SplitLinear
from .base import Context, Operator, Options
from .short_conv import ShortConvolution


@dataclass(frozen=True, kw_only=True)
class HyenaOptions(Options):
    """Options of every Hyena operator."""

    featurizer: int = 3
    """Taps of the short filter on q, k and v."""
    featurizer_bias: bool = False
    qkv_bias: bool = False
    output_bias: bool = True


class Hyena(Operator):
    """Subclasses give `mix`: the operator between the gates."""

    def __init__(self, options: HyenaOptions, width: int, *, skip: bool) -> None:
        super().__init__(options, width)
        parts = {"q": width, "k": width, "v": width}
        self.qkv = SplitLinear(width, parts, bias=options.qkv_bias)
        self.featurizer = ShortConvolution(
            3 * width, options.featurizer, bias=options.featurizer_bias
        )
        self.skip = nn.Parameter(torch.empty(width)) if skip else None
        self.output = nn.Linear(width, width, bias=options.output_bias)

    def forward(self, u: Tensor, context: Context) -> Tensor:
        z = torch.cat(self.qkv(u), dim=-1)
        q, k, v = self.featurizer(z, context).chunk(3, dim=-1)
        w = k * v
        y = self.mix(w, context)
        if self.skip is not None:
            y = y + self.skip * w
        result: Tensor = self.output(q * y.to(q.dtype))
        return result

    @abstractmethod
    def mix(self, w: Tensor, context: Context) -> Tensor: ...

    def init_weights(self, init: Initialiser) -> None:
        init.linear(self.qkv)
        self.featurizer.init_weights(init)
        init.output(self.output)
        if self.skip is not None:
            init.short_filter(self.skip, self.featurizer.taps.shape[1])

    def flops(self, length: int) -> dict[str, float]:
        return {"convolution": 2.0 * self.featurizer.taps.numel()}
