from __future__ import annotations

import torch
from torch.nn import functional as F

from headrace.models.layers.norms import GatedRMSNorm, LayerNorm, RMSNorm


def filled(norm: torch.nn.Module) -> torch.nn.Module:
    for parameter in norm.parameters():
        parameter.data = torch.randn(parameter.shape, dtype=torch.float64)
    return norm


def test_eps_inside_and_outside_the_root() -> None:
    x = torch.randn(3, 8, dtype=torch.float64) * 1e-3
    mean = x.square().mean(-1, keepdim=True)
    inside, outside = filled(RMSNorm(8, 1e-3)), filled(RMSNorm(8, 1e-3, eps_outside=True))
    assert torch.allclose(inside(x), inside.weight * x / (mean + 1e-3).sqrt())
    assert torch.allclose(outside(x), outside.weight * x / (mean.sqrt() + 1e-3))


def test_gated_by_groups() -> None:
    y, z = torch.randn(2, 3, 8, dtype=torch.float64)
    norm = filled(GatedRMSNorm(8, 1e-5, groups=2))
    gated = y * F.silu(z)
    parts = [g / (g.square().mean(-1, keepdim=True) + 1e-5).sqrt() for g in gated.split(4, -1)]
    assert torch.allclose(norm(y, z), norm.weight * torch.cat(parts, -1))


def test_layer_norm() -> None:
    x = torch.randn(3, 8, dtype=torch.float64)
    norm = filled(LayerNorm(8, 1e-5))
    assert torch.allclose(norm(x), F.layer_norm(x, (8,), norm.weight, norm.bias, 1e-5))


def test_half_precision_is_normalised_in_fp32() -> None:
    x = (torch.randn(4, 512) * 1e4).bfloat16()
    norm = RMSNorm(512, 1e-6)
    norm.weight.data.fill_(1)
    y = norm.bfloat16()(x)
    exact = x.double() / x.double().square().mean(-1, keepdim=True).sqrt()
    assert ((y.double() - exact).abs() <= exact.abs() * 2**-8).all()


def test_the_twin_keeps_one_widened_copy() -> None:
    kept: set[int] = set()
    norm = RMSNorm(16, 1e-5, kernel="torch")
    x = torch.randn(3, 16).bfloat16().requires_grad_()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == torch.float32 and tensor.shape == x.shape:
            kept.add(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        norm(x)
    assert len(kept) == 1
