"""Initial weights: as published, from a seed, the same whatever the layout or the device.

Every tensor has a generator of its own, seeded by the run's seed and the tensor's logical name.
Modules say by what law each of their parameters begins; numbers are drawn when they are asked for,
one whole tensor at a time, so that whoever holds a part of a model never holds all of it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from .layers.linear import SplitLinear
from .layers.norms import GatedRMSNorm, LayerNorm, RMSNorm


@dataclass(frozen=True, kw_only=True)
class InitConfig:
    """How matrices begin. Operators with a law of their own (dt, A, filters) follow that."""

    weights: Literal["normal", "small", "uniform"] = "normal"
    """`normal`: N(0, std²); `small`: N(0, 2 / 5·width); `uniform`: U(±1/√inputs), torch's own."""
    std: float = 0.02
    """The standard deviation under `normal`, and of embeddings under `uniform`."""
    output: Literal["same", "depth", "wang"] = "same"
    """Matrices that write to the residual stream: as the others; divided by √(number of residual
    branches); or with a standard deviation of 2 / (layers · √width)."""

    def __post_init__(self) -> None:
        if not self.std > 0:
            raise ValueError(f"std must be above 0, not {self.std}")


Law = Callable[[torch.Generator], Tensor]
"""Draws a whole tensor, in a precision that may be above the parameter's."""


class Initialiser:
    """Takes down by what law each parameter of a whole model begins."""

    def __init__(
        self, root: nn.Module, config: InitConfig, *, width: int, layers: int, branches: int
    ) -> None:
        self.config = config
        self.width = width
        self.layers = layers
        self.branches = branches
        self.names = {id(parameter): name for name, parameter in root.named_parameters()}
        self.laws: dict[str, Law] = {}

    def draw(self, name: str, seed: int) -> Tensor:
        digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
        return self.laws[name](torch.Generator().manual_seed(int.from_bytes(digest, "little")))

    def begins(self, parameter: Tensor, law: Law) -> None:
        self.laws[self.names[id(parameter)]] = law

    def normal(self, parameter: Tensor, std: float) -> None:
        shape = parameter.shape
        self.begins(parameter, lambda numbers: torch.randn(shape, generator=numbers).mul_(std))

    def uniform(
        self,
        parameter: Tensor,
        low: float,
        high: float,
        then: Callable[[Tensor], Tensor] = lambda drawn: drawn,
    ) -> None:
        """Numbers in [low, high), in fp64 for what is done to them `then`."""
        shape = parameter.shape

        def law(numbers: torch.Generator) -> Tensor:
            drawn = torch.rand(shape, generator=numbers, dtype=torch.float64)
            return then(low + (high - low) * drawn)

        self.begins(parameter, law)

    def put(self, parameter: Tensor, value: float | Tensor) -> None:
        shape = parameter.shape
        self.begins(parameter, lambda _: torch.as_tensor(value).expand(shape))

    def embedding(self, parameter: Tensor) -> None:
        if self.config.weights == "small":
            self.matrix(parameter)
        else:
            self.normal(parameter, self.config.std)

    def linear(self, linear: nn.Linear | SplitLinear) -> None:
        """A matrix that reads the residual stream or lies inside an operator."""
        self.matrix(linear.weight)
        if linear.bias is not None:
            self.put(linear.bias, 0.0)

    def matrix(self, weight: Tensor) -> None:
        if self.config.weights == "uniform":
            bound = 1 / math.sqrt(weight.shape[-1])
            self.uniform(weight, -bound, bound)
        elif self.config.weights == "small":
            self.normal(weight, math.sqrt(2 / (5 * self.width)))
        else:
            self.normal(weight, self.config.std)

    def output(self, linear: nn.Linear) -> None:
        """A matrix that writes to the residual stream."""
        self.output_matrix(linear.weight)
        if linear.bias is not None:
            self.put(linear.bias, 0.0)

    def output_matrix(self, weight: Tensor) -> None:
        if self.config.output == "wang":
            self.normal(weight, 2 / (self.layers * math.sqrt(self.width)))
            return
        self.matrix(weight)
        if self.config.output == "depth":
            law, divisor = self.laws[self.names[id(weight)]], math.sqrt(self.branches)
            self.begins(weight, lambda numbers: law(numbers) / divisor)

    def short_filter(self, taps: Tensor, length: int) -> None:
        bound = 1 / math.sqrt(length)
        self.uniform(taps, -bound, bound)

    def norm(self, norm: nn.Module) -> None:
        assert isinstance(norm, (RMSNorm, GatedRMSNorm, LayerNorm))
        self.put(norm.weight, 1.0)
        if isinstance(norm, LayerNorm):
            self.put(norm.bias, 0.0)
