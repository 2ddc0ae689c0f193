"""Initial weights: as published, from a seed, the same whatever the layout or the device.

Every tensor has a generator of its own, seeded by the run's seed and the tensor's logical name.
A process that holds a part of a model draws the whole tensor and keeps its part.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from .linear import SplitLinear
from .norms import GatedRMSNorm, LayerNorm, RMSNorm


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


class Initialiser:
    """Fills tensors in place. Modules ask for a distribution; the name decides the numbers."""

    def __init__(
        self,
        root: nn.Module,
        config: InitConfig,
        seed: int,
        *,
        width: int,
        layers: int,
        branches: int,
    ) -> None:
        self.config = config
        self.seed = seed
        self.width = width
        self.layers = layers
        self.branches = branches
        self.names = {id(parameter): name for name, parameter in root.named_parameters()}

    def generator(self, parameter: Tensor) -> torch.Generator:
        text = f"{self.seed}/{self.names[id(parameter)]}".encode()
        seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
        return torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def normal(self, parameter: Tensor, std: float) -> None:
        drawn = torch.randn(parameter.shape, generator=self.generator(parameter), device="cpu")
        parameter.copy_(drawn * std)

    @torch.no_grad()
    def uniform(self, parameter: Tensor, low: float, high: float) -> None:
        parameter.copy_(self.drawn_uniform(parameter, low, high))

    def drawn_uniform(self, parameter: Tensor, low: float, high: float) -> Tensor:
        """fp64 numbers in [low, high) for laws that transform them before they are kept."""
        generator = self.generator(parameter)
        drawn = torch.rand(parameter.shape, generator=generator, device="cpu", dtype=torch.float64)
        return low + (high - low) * drawn

    @torch.no_grad()
    def put(self, parameter: Tensor, value: float | Tensor) -> None:
        parameter.copy_(torch.as_tensor(value, device="cpu").expand(parameter.shape))

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

    @torch.no_grad()
    def output_matrix(self, weight: Tensor) -> None:
        if self.config.output == "wang":
            self.normal(weight, 2 / (self.layers * math.sqrt(self.width)))
            return
        self.matrix(weight)
        if self.config.output == "depth":
            weight.div_(math.sqrt(self.branches))

    def short_filter(self, taps: Tensor, length: int) -> None:
        bound = 1 / math.sqrt(length)
        self.uniform(taps, -bound, bound)

    def norm(self, norm: nn.Module) -> None:
        assert isinstance(norm, (RMSNorm, GatedRMSNorm, LayerNorm))
        self.put(norm.weight, 1.0)
        if isinstance(norm, LayerNorm):
            self.put(norm.bias, 0.0)
