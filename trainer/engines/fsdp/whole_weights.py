"""Weights of a rank that holds the whole state alone: nothing is gathered or reduced.

    fp32 masters ─► one cast after each update ─► weights in the compute precision ─► passes
    gradients of the weights ─► fp32 sums over micro-batches: the gradients of the masters

The modules hold the weights; optimizer, checkpoints and norm see the masters. In fp32 the weights
are the masters, and autograd sums their gradients.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from ..objective import Objective, parameters
from .one_rank_memory import MAX_PENDING


class WholeWeights:
    """The weights of an objective, and their masters."""

    def __init__(
        self, objective: Objective, rounded: torch.dtype | None, device: torch.device
    ) -> None:
        """Allocate the weights of an objective on the meta device: masters rounded to a dtype;
        None: the fp32 masters themselves."""
        _allocate(objective, rounded, device)
        self.weights = self.masters = parameters(objective)
        self.pending: list[tuple[nn.Parameter, Tensor]] = []
        """Masters, and gradients to add to theirs."""
        self.pending_numel = 0
        if rounded is not None:
            self.masters = {
                name: nn.Parameter(torch.empty_like(weight, dtype=torch.float32))
                for name, weight in self.weights.items()
            }
            for name, weight in self.weights.items():
                collect = partial(self._collect, self.masters[name], weight.numel())
                weight.register_post_accumulate_grad_hook(collect)

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the masters into the weights."""
        if self.masters is not self.weights:
            torch._foreach_copy_(list(self.weights.values()), list(self.masters.values()))

    @torch.no_grad()
    def add_pending(self) -> None:
        """Add the gradients of weights to those of their masters. Call after a backward pass."""
        new = [(master, grad) for master, grad in self.pending if master.grad is None]
        later = [(master.grad, grad) for master, grad in self.pending if master.grad is not None]
        for master, _ in new:
            master.grad = torch.empty_like(master)
        if new:
            sums = [master.grad for master, _ in new if master.grad is not None]
            torch._foreach_copy_(sums, [grad for _, grad in new])
        if later:
            torch._foreach_add_([total for total, _ in later], [grad for _, grad in later])
        self.pending.clear()
        self.pending_numel = 0

    def _collect(self, master: nn.Parameter, numel: int, weight: Tensor) -> None:
        """Take a gradient from a weight as soon as autograd has summed it."""
        gradient = weight.grad
        assert gradient is not None
        self.pending.append((master, gradient))
        self.pending_numel += numel
        weight.grad = None
        if self.pending_numel > MAX_PENDING:
            self.add_pending()


def _allocate(module: nn.Module, dtype: torch.dtype | None, device: torch.device) -> None:
    """Replace the tensors of a module on the meta device; `dtype` None: parameters keep theirs."""
    allocated: dict[nn.Parameter, nn.Parameter] = {}  # several modules may share one
    for child in module.modules():
        for name, parameter in list(child.named_parameters(recurse=False)):
            if parameter not in allocated:
                empty = torch.empty_like(parameter, dtype=dtype, device=device)
                allocated[parameter] = nn.Parameter(empty)
            setattr(child, name, allocated[parameter])
        for name, buffer in list(child.named_buffers(recurse=False)):
            setattr(child, name, torch.empty_like(buffer, device=device))
