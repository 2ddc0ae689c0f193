"""Initial weights: as published, from a seed, equal in every layout and on every device.

Each tensor has its own generator, seeded by the run's seed and the tensor's logical name. Modules
register an initial distribution per parameter. Whole tensors are drawn when they are read, so that
a rank with a sharded model never holds the whole model.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..config.options.init import InitConfig
from .linear import SplitLinear
from .norms import GatedRMSNorm, LayerNorm, RMSNorm

Initializer = Callable[[torch.Generator], Tensor]
"""Draws a whole tensor; its precision may be higher than the parameter's."""


class Initializers:
    """Initial distributions by parameter, for an unsharded model."""

    def __init__(
        self, root: nn.Module, config: InitConfig, *, width: int, layers: int, branches: int
    ) -> None:
        self.config = config
        self.width = width
        self.layers = layers
        self.branches = branches
        self.names = {
            id(parameter): parameter_name for parameter_name, parameter in root.named_parameters()
        }
        self.functions: dict[str, Initializer] = {}

    def draw(self, parameter_name: str, seed: int) -> Tensor:
        """Draw a parameter's initial value."""
        digest = hashlib.blake2b(f"{seed}/{parameter_name}".encode(), digest_size=8).digest()
        return self.functions[parameter_name](
            torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        )

    def set(self, parameter: Tensor, function: Initializer) -> None:
        self.functions[self.names[id(parameter)]] = function

    def normal(self, parameter: Tensor, std: float) -> None:
        shape = parameter.shape
        self.set(parameter, lambda numbers: torch.randn(shape, generator=numbers).mul_(std))

    def uniform(
        self,
        parameter: Tensor,
        low: float,
        high: float,
        transform: Callable[[Tensor], Tensor] = lambda drawn: drawn,
    ) -> None:
        """Draw from [low, high) in fp64, then apply `transform`."""
        shape = parameter.shape

        def draw(numbers: torch.Generator) -> Tensor:
            drawn = torch.rand(shape, generator=numbers, dtype=torch.float64)
            return transform(low + (high - low) * drawn)

        self.set(parameter, draw)

    def constant(self, parameter: Tensor, value: float | Tensor) -> None:
        shape = parameter.shape
        self.set(parameter, lambda _: torch.as_tensor(value).expand(shape))

    def embedding(self, parameter: Tensor) -> None:
        if self.config.weights == "small":
            self.matrix(parameter)
        else:
            self.normal(parameter, self.config.std)

    def linear(self, linear: nn.Linear | SplitLinear) -> None:
        """A matrix that reads the residual stream, or is internal to an operator."""
        self.matrix(linear.weight)
        if linear.bias is not None:
            self.constant(linear.bias, 0.0)

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
            self.constant(linear.bias, 0.0)

    def output_matrix(self, weight: Tensor) -> None:
        if self.config.output == "wang":
            self.normal(weight, 2 / (self.layers * math.sqrt(self.width)))
            return
        self.matrix(weight)
        if self.config.output == "depth":
            matrix, divisor = self.functions[self.names[id(weight)]], math.sqrt(self.branches)
            self.set(weight, lambda numbers: matrix(numbers) / divisor)

    def short_filter(self, taps: Tensor, length: int) -> None:
        bound = 1 / math.sqrt(length)
        self.uniform(taps, -bound, bound)

    def norm(self, norm: nn.Module) -> None:
        assert isinstance(norm, (RMSNorm, GatedRMSNorm, LayerNorm))
        centered = isinstance(norm, RMSNorm) and norm.zero_centered
        self.constant(norm.weight, 0.0 if centered else 1.0)
        if isinstance(norm, LayerNorm):
            self.constant(norm.bias, 0.0)
