"""Tensors by name, read one at a time, so that a whole model never has to be in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor


class Weights(Mapping[str, Tensor]):
    """A mapping from names to tensors. Names and shapes are known before any tensor is read."""

    def __init__(self, shapes: Mapping[str, Sequence[int]], read: Callable[[str], Tensor]) -> None:
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self.read = read

    @classmethod
    def wrap(cls, tensors: Mapping[str, Tensor]) -> Weights:
        """Wrap tensors in memory."""
        return cls({name: tensor.shape for name, tensor in tensors.items()}, tensors.__getitem__)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.shapes:
            raise KeyError(name)
        return self.read(name)

    def __contains__(self, name: object) -> bool:
        return name in self.shapes  # does not read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def meta_tensor(self, name: str) -> Tensor:
        """Return a tensor with this name's shape on the meta device."""
        return torch.empty(self.shapes[name], device="meta")
