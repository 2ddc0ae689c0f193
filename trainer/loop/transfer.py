"""Numbers on their way from the device to the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Transfer:
    """A copy of vectors to host memory, as fp64. `wait` waits for the launches before the copy
    alone: the device may run those after it meanwhile."""

    def __init__(self, vectors: Sequence[Tensor]) -> None:
        self.lengths = [len(vector) for vector in vectors]
        joined = torch.cat([vector.double() for vector in vectors])
        self.numbers = joined.to("cpu", non_blocking=True)  # page-locked, if from a GPU
        self.arrived = torch.cuda.Event() if joined.device.type == "cuda" else None
        if self.arrived is not None:
            self.arrived.record()

    def wait(self) -> list[Tensor]:
        """Return the vectors in host memory."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return list(self.numbers.split(self.lengths))
