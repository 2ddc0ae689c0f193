"""Matrices that FSDP2 gathers in FP8: half as many bytes as bf16.

Each rank rounds its rows as the products will (fp8.py), and sends their values, as bytes, and their
scales. The whole matrix comes back in the compute precision. Rounding twice changes nothing, so
products are equal to the bit to those after a bf16 gather.

torch calls these hooks on a sharded tensor (`fsdp_pre_all_gather`, `fsdp_post_all_gather`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from ..kernels.fp8 import E4M3, Quantized
from .fp8 import quantize
from .linear import OutputLinear, SplitLinear


def gather_matrices(model: nn.Module) -> None:
    """Gather a model's sharded matrices in FP8 where the products round them anyway: rows are whole
    on a rank, all in FP8, and equally many on all ranks that share the matrix."""
    for module in model.modules():
        weight: Any = module._parameters.get("weight")
        if weight is None:  # no matrix, or a frozen one, which is whole on each rank
            continue
        if isinstance(module, SplitLinear):
            rounded = module.fp8 and module.narrow_rows() == len(weight)
        elif isinstance(module, OutputLinear):
            rounded = module.takes_stored
        else:
            continue
        ranks = weight.device_mesh.size(-1)  # the last dimension of a mesh is that of the shards
        if rounded and ranks > 1 and len(weight) % ranks == 0:
            shard = weight._local_tensor
            shard.fsdp_pre_all_gather = partial(_send, shard)
            shard.fsdp_post_all_gather = _receive
            shard.fsdp_should_release_all_gather_outputs_after_post_all_gather = lambda: True


def _send(
    shard: Tensor, mesh: Any, size: Any, stride: Any, module: nn.Module, policy: Any
) -> tuple[tuple[Tensor, ...], None]:
    """Return the tensors to gather. (torch counts the parameters.)"""
    values, scales = quantize(shard.to(policy.param_dtype or shard.dtype))
    return (values.view(torch.uint8), scales), None


def _receive(
    gathered: tuple[Tensor, ...], _: None, dtype: torch.dtype, *, out: Tensor | None = None
) -> tuple[Tensor, tuple[Tensor, ...]] | None:
    """Return the whole matrix, and the tensors whose memory torch frees; or write to `out`."""
    values, scales = gathered
    matrix = Quantized(values.view(E4M3), scales).dequantized(dtype)
    if out is None:
        return matrix, (matrix,)
    with torch.no_grad(), _unsafe_preserve_version_counter(out):
        out.copy_(matrix)  # the forward pass has saved it
    return None
