"""What travels along a ring, and the gradients that return: keys and values, or the latents from
which each rank expands them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...config.precision import widen
from ..axes import Axis
from ..collectives import start_all_to_all, wait
from .zigzag import Zigzag

Expand = Callable[[Tensor, Tensor], Tensor]
Dealt = tuple[Tensor, tuple[Tensor, Tensor], Expand | None]
"""Queries in the zigzag; the ring's sources there, which are keys and values, or latents and the
weight of their expansion; this expansion."""


@dataclass(frozen=True)
class KeysAndValues:
    """Keys and values that travel, each [rows, local_length, kv_heads, dim]."""

    k: Tensor
    v: Tensor

    @property
    def value_dim(self) -> int:
        return self.v.shape[-1]

    def deal(self, q: Tensor, zigzag: Zigzag) -> Dealt:
        heads = [q.shape[2], self.k.shape[2], self.v.shape[2]]
        q, k, v = zigzag.deal(torch.cat([q, self.k, self.v], dim=2)).split(heads, dim=2)
        return q, (k, v), None


@dataclass(frozen=True)
class Latents:
    """Latents that travel in place of keys and values."""

    tokens: Tensor
    """[rows, local_length, channels]"""
    weight: Tensor
    expand: Expand
    """Maps latents [..., channels] and the weight to keys and values [2, ..., kv_heads, dim]."""
    value_dim: int
    """Channels of the values; the rest of `dim` is padding."""

    def deal(self, q: Tensor, zigzag: Zigzag) -> Dealt:
        sizes = [q.shape[2] * q.shape[3], self.tokens.shape[2]]
        dealt = zigzag.deal(torch.cat([q.flatten(2), self.tokens], dim=-1))
        dealt_q, tokens = dealt.split(sizes, dim=-1)
        return dealt_q.unflatten(-1, q.shape[2:]), (tokens, self.weight), self.expand


def circulate(x: Tensor, axis: Axis) -> Iterator[tuple[int, Tensor]]:
    """Yield (rank, that rank's x), starting with this rank. The next x travels meanwhile."""
    for hop in range(axis.size):
        wait_for_next = send_along_ring(x, axis) if hop + 1 < axis.size else None
        yield (axis.rank - hop) % axis.size, x
        if wait_for_next is not None:
            x = wait_for_next()


def circulate_keys(
    sources: tuple[Tensor, Tensor], expand: Expand | None, axis: Axis
) -> Iterator[tuple[int, Tensor]]:
    """Yield (rank, its keys and values [2, …]), starting with this rank; sources as in `Dealt`."""
    if expand is None:
        yield from circulate(torch.stack(sources), axis)
    else:
        latents, weight = sources
        for owner, remote_latents in circulate(latents, axis):
            yield owner, expand(remote_latents, weight)


Add = Callable[[int, Tensor, Tensor], None]
"""`add(rank, x, gradient)` adds this rank's contribution to the gradient of `rank`'s x."""


def circulate_with_gradients(
    sources: tuple[Tensor, Tensor], expand: Expand | None, axis: Axis, add: Add
) -> tuple[Tensor, Tensor]:
    """Return the gradients of this rank's sources, as in `Dealt`; x of `add` are keys and
    values."""
    if expand is None:
        k_grad, v_grad = _circulate_gradients(torch.stack(sources), axis, add).to(sources[0].dtype)
        return k_grad, v_grad
    latents, weight = sources
    weight_grad = torch.zeros_like(widen(weight))

    def add_expanded(owner: int, remote_latents: Tensor, gradient: Tensor) -> None:
        leaves = remote_latents.detach().requires_grad_(), weight.detach().requires_grad_()
        with torch.enable_grad():
            kv = expand(*leaves)
        kv_grad = torch.zeros_like(widen(kv.detach()))
        add(owner, kv.detach(), kv_grad)
        latent_grad, hop_weight_grad = torch.autograd.grad(kv, leaves, kv_grad.to(kv.dtype))
        gradient += latent_grad
        weight_grad.add_(hop_weight_grad)

    latent_grad = _circulate_gradients(latents, axis, add_expanded)
    return latent_grad.to(latents.dtype), weight_grad.to(weight.dtype)


def _circulate_gradients(x: Tensor, axis: Axis, add: Add) -> Tensor:
    """Return this rank's x gradient, in fp32 or wider, which follows x along the ring to its
    owner."""
    returning: Callable[[], Tensor] | None = None
    for owner, local in circulate(x, axis):
        gradient = torch.zeros_like(widen(local))
        add(owner, local, gradient)
        if returning is not None:
            gradient += returning()
        returning = send_along_ring(gradient, axis)
    assert returning is not None
    return returning()


def send_along_ring(x: Tensor, axis: Axis) -> Callable[[], Tensor]:
    """Start sending x to the next rank. Return a function that waits for the previous rank's
    tensor."""
    x = x.contiguous()
    if axis.size == 1:
        return lambda: x
    sent, received = ([0] * axis.size for _ in range(2))
    sent[(axis.rank + 1) % axis.size] = received[(axis.rank - 1) % axis.size] = x.numel()
    arriving = start_all_to_all(x.view(-1), received, sent, axis)

    def wait_for_arrival(_sent: Tensor = x) -> Tensor:  # keeps the sent tensor alive until then
        return wait(arriving).view_as(x)

    return wait_for_arrival
