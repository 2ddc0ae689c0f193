"""Torchvision's vision transformer as a sequence of modules, for `trainer plan --module`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchvision.models import VisionTransformer, vit_b_16


class Patches(nn.Module):
    """From an image to the vectors of its patches and of the class."""

    def __init__(self, model: VisionTransformer) -> None:
        super().__init__()
        self.project, self.token = model.conv_proj, model.class_token
        self.position = model.encoder.pos_embedding

    def forward(self, images: Tensor) -> Tensor:
        patches = self.project(images).flatten(2).transpose(1, 2)
        tokens = self.token.expand(len(images), -1, -1)
        return torch.cat([tokens, patches], dim=1) + self.position


class Head(nn.Module):
    """From the vector of the class to logits."""

    def __init__(self, model: VisionTransformer) -> None:
        super().__init__()
        self.norm, self.heads = model.encoder.ln, model.heads

    def forward(self, u: Tensor) -> Tensor:
        logits: Tensor = self.heads(self.norm(u)[:, 0])
        return logits


def transformer() -> tuple[Sequence[nn.Module], Tensor]:
    model = vit_b_16()
    return [Patches(model), *model.encoder.layers, Head(model)], torch.empty(1, 3, 224, 224)


def widths_that_differ() -> tuple[Sequence[nn.Module], Tensor]:
    """A sequence whose second module cannot take the result of the first."""
    return [nn.Linear(4, 8), nn.Linear(4, 8)], torch.empty(1, 4)


def linear() -> tuple[Sequence[nn.Module], Tensor]:
    return [nn.Linear(4, 8)], torch.empty(1, 4)


def no_pair() -> nn.Module:
    return nn.Linear(4, 8)


def no_modules() -> tuple[Sequence[str], Tensor]:
    return ["linear"], torch.empty(1, 4)
