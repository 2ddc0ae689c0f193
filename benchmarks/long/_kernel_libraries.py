"""Kernels of other libraries as peers, where they are installed.

Liger, flash-linear-attention (fla), Cut Your Losses (cut_cross_entropy), and the Triton code of
mamba_ssm, which needs no compiled extension.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

Passes = Callable[..., Any]
CHUNK = 256
"""Tokens of a chunk of mamba_ssm's scan, as Mamba-2 trains."""


def installed(find: Callable[[], Iterator[tuple[str, Passes]]]) -> dict[str, Passes]:
    """Return the peers that `find` yields before a library is missing."""
    result: dict[str, Passes] = {}
    try:
        result.update(find())
    except Exception as error:  # a library that does not import is no peer
        if not isinstance(error, ModuleNotFoundError):
            print(f"  a peer does not import: {type(error).__name__}: {error}"[:200], flush=True)
    return result


def triton_code(module: str) -> ModuleType:
    """Import a module of mamba_ssm without the package's own imports, which need its extension."""
    if "mamba_ssm" not in sys.modules:
        spec = find_spec("mamba_ssm")
        if spec is None or spec.submodule_search_locations is None:
            raise ModuleNotFoundError("mamba_ssm")
        package = ModuleType("mamba_ssm")
        package.__path__ = list(spec.submodule_search_locations)
        sys.modules["mamba_ssm"] = package
    return importlib.import_module(f"mamba_ssm.ops.triton.{module}")


def norms(width: int, weight: torch.nn.Parameter) -> dict[str, Passes]:
    """Return Liger's norm: after a sum, and with the sum fused."""

    def find() -> Iterator[tuple[str, Passes]]:
        from liger_kernel.transformers.fused_add_rms_norm import LigerFusedAddRMSNorm
        from liger_kernel.transformers.rms_norm import LigerRMSNorm

        behind, fused = LigerRMSNorm(width), LigerFusedAddRMSNorm(width)
        behind.weight = fused.weight = weight

        def add(residual: Tensor, x: Tensor, weight: Tensor) -> Any:
            total = residual + x
            return total, behind(total)

        def add_within(residual: Tensor, x: Tensor, weight: Tensor) -> Any:
            normal, total = fused(x, residual)
            return total, normal

        yield "Liger", add
        yield "Liger, the sum fused", add_within

    return installed(find)


def gated_norms(eps: float) -> dict[str, Passes]:
    def find() -> Iterator[tuple[str, Passes]]:
        run = triton_code("layernorm_gated").rmsnorm_fn

        def mamba_ssm(y: Tensor, z: Tensor, weight: Tensor) -> Any:
            return run(y, weight, None, z=z, eps=eps, norm_before_gate=False)

        yield "mamba_ssm", mamba_ssm

    return installed(find)


def glus() -> dict[str, Passes]:
    def liger() -> Iterator[tuple[str, Passes]]:
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        yield "Liger", lambda x: LigerSiLUMulFunction.apply(*x.chunk(2, dim=-1))

    def fla() -> Iterator[tuple[str, Passes]]:
        from fla.modules.activations import swiglu

        yield "fla", lambda x: swiglu(*x.chunk(2, dim=-1))

    return installed(liger) | installed(fla)


def losses(targets: Tensor) -> dict[str, Passes]:
    """Return sums of losses without z-loss."""

    def liger() -> Iterator[tuple[str, Passes]]:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

        def run(hidden: Tensor, matrix: Tensor) -> Any:
            arguments = (hidden, matrix, targets, None, None, -100, 0.0, 0.0, "sum")
            return LigerFusedLinearCrossEntropyFunction.apply(*arguments)[0]

        yield "Liger", run

    def cut() -> Iterator[tuple[str, Passes]]:
        from cut_cross_entropy import linear_cross_entropy

        def run(hidden: Tensor, matrix: Tensor) -> Any:
            return linear_cross_entropy(hidden, matrix, targets, reduction="sum")

        yield "Cut Your Losses", run

    return installed(liger) | installed(cut)


def featurizers() -> dict[str, Passes]:
    def find() -> Iterator[tuple[str, Passes]]:
        from fla.modules.causal_conv1d import causal_conv1d

        # Its taps are in order of time, the newest last.
        yield "fla", lambda x, taps: causal_conv1d(x, taps.flip(-1).contiguous())[0]

    return installed(find)


def scans(head_dim: int, state_size: int) -> dict[str, Passes]:
    """Return Mamba-2's scan of x, B and C side by side, one group."""

    def find() -> Iterator[tuple[str, Passes]]:
        run = triton_code("ssd_combined").mamba_chunk_scan_combined

        def mamba_ssm(mixed: Tensor, dt: Tensor, bias: Tensor, A_log: Tensor, D: Tensor) -> Any:
            sizes = (mixed.shape[-1] - 2 * state_size, state_size, state_size)
            x, B, C = mixed.split(sizes, dim=-1)
            return run(
                x.unflatten(-1, (-1, head_dim)),
                dt,
                -A_log.float().exp(),
                B.unsqueeze(2),
                C.unsqueeze(2),
                chunk_size=CHUNK,
                D=D,
                dt_bias=bias,
                dt_softplus=True,
            )

        yield "mamba_ssm", mamba_ssm

    return installed(find)


def deltas(*, by_channel: bool) -> dict[str, Passes]:
    def find() -> Iterator[tuple[str, Passes]]:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla.ops.kda import chunk_kda

        def fla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Any:
            if by_channel:
                return chunk_kda(q, k, v, g, beta, scale=1.0)[0]
            return chunk_gated_delta_rule(q, k, v, g.squeeze(-1), beta, scale=1.0)[0]

        yield "fla", fla

    return installed(find)
