"""Timed work: each kernel at the size of a large model, and the peers that would replace it.

Tensors hold rows in bf16. `moved` counts the bytes that a pass must move if it reads each input
once and writes each output once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from headrace.models.config.options.names import Kernel
from headrace.models.config.options.rope import Rope
from headrace.models.kernels import fft_convolution, gated_rms_norm, linear_cross_entropy, rms_norm
from headrace.models.layers.convolution import causal_convolution
from headrace.models.layers.delta.scan import kernel_delta_rule, normalize
from headrace.models.layers.gated_convolution import gated_convolution, gated_input, gated_modal
from headrace.models.layers.gated_scan import gated_scan
from headrace.models.layers.mixed_scan import mixed_scan
from headrace.models.layers.norms import GatedRMSNorm, RMSNorm
from headrace.models.layers.rope import plain, rotate, rotation
from headrace.models.layers.routed_rows import combine, dispatch
from headrace.models.model.loss import cross_entropy
from headrace.models.operators.mlp import apply_gate

from . import _kernel_libraries as libraries

Passes = Callable[..., Any]


@dataclass
class Timed:
    name: str
    inputs: dict[str, Tensor]
    """Inputs; those that require gradients are differentiated."""
    ours: Passes
    peers: dict[str, Passes]
    moved: tuple[float, float] = (0, 0)
    """Bytes of the forward and of the backward pass."""
    operations: float = 0
    """Operations of matrix products, forward and backward, if they are the limit."""


@dataclass(frozen=True)
class Size:
    """Device, dtype and sizes of the timed tensors; small in a dry run."""

    device: str
    dtype: torch.dtype
    length: int
    width: int

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        x = torch.randn(shape, device=self.device) * scale
        return x.to(self.dtype).requires_grad_()

    def ones(self, count: int) -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.ones(count, device=self.device, dtype=self.dtype))

    def compiled(self, function: Passes) -> Passes:
        """Apply torch.compile; without a GPU, trace only."""
        backend = "inductor" if self.device == "cuda" else "aot_eager"
        return torch.compile(function, backend=backend)

    @property
    def bytes(self) -> float:
        """Bytes of a tensor [length, width]."""
        return float(self.length * self.width * self.dtype.itemsize)


def timed(size: Size) -> dict[str, Callable[[], Timed]]:
    """Return functions that build the work, by kernel and name."""
    return {
        "rms_norm": lambda: norms(size),
        "gated_rms_norm": lambda: gated_norms(size),
        "rope": lambda: ropes(size),
        "glu": lambda: glus(size),
        "routed_rows": lambda: routed(size),
        "linear_cross_entropy": lambda: losses(size),
        "short_convolution": lambda: convolutions(size, 7, "Hyena-SE, 7 taps"),
        "short_convolution featurizer": lambda: featurizers(size),
        "toeplitz": lambda: convolutions(size, 128, "Hyena-MR, 128 taps"),
        "fft_convolution": lambda: transforms(size),
        "modal": lambda: modals(size),
        "ssd": lambda: ssds(size),
        "selective_scan": lambda: selective_scans(size),
        "delta": lambda: deltas(size, by_channel=False),
        "delta by channel": lambda: deltas(size, by_channel=True),
    }


def norms(size: Size) -> Timed:
    module = RMSNorm(size.width, 1e-5, kernel="torch")
    module.weight = size.ones(size.width)
    shape = (1, size.length, size.width)
    inputs = {
        "residual": size.normal(*shape),
        "x": size.normal(*shape),
        "weight": module.weight,  # all peers compute its gradient
    }

    def ours(residual: Tensor, x: Tensor, weight: Tensor) -> Any:
        return rms_norm.add_rms_norm(residual, x, weight, 1e-5, False)

    def plain_sum(residual: Tensor, x: Tensor, weight: Tensor) -> Any:
        return module(x, residual)

    peers = {"eager": plain_sum, "compiled": size.compiled(plain_sum)}
    moved = (4 * size.bytes, 4 * size.bytes)
    return Timed(
        "add + RMSNorm", inputs, ours, peers | libraries.norms(size.width, module.weight), moved
    )


def gated_norms(size: Size) -> Timed:
    module = GatedRMSNorm(size.width, 1e-5, kernel="torch")
    module.weight = size.ones(size.width)
    shape = (1, size.length, size.width)
    inputs = {"y": size.normal(*shape), "z": size.normal(*shape), "weight": module.weight}

    def ours(y: Tensor, z: Tensor, weight: Tensor) -> Any:
        return gated_rms_norm.gated_rms_norm(y, z, weight, 1e-5, 1, "")

    def plain_norm(y: Tensor, z: Tensor, weight: Tensor) -> Any:
        return module(y, z)

    peers = {"eager": plain_norm, "compiled": size.compiled(plain_norm)}
    peers |= libraries.gated_norms(1e-5)
    return Timed("gated RMSNorm", inputs, ours, peers, (3 * size.bytes, 5 * size.bytes))


def ropes(size: Size) -> Timed:
    heads = max(size.width // 128, 1)
    x = size.normal(1, size.length, heads, size.width // heads)
    positions = torch.arange(size.length, device=size.device).unsqueeze(0)
    cos, sin = rotation(Rope(), positions, x.shape[-1])
    peers = {
        "eager": lambda x: plain(x, cos, sin),
        "compiled": size.compiled(lambda x: plain(x, cos, sin)),
    }
    moved = (2 * size.bytes, 2 * size.bytes)
    return Timed("RoPE", {"x": x}, lambda x: rotate(x, cos, sin), peers, moved)


def glus(size: Size) -> Timed:
    inputs = {"x": size.normal(1, size.length, 2 * size.width)}

    def run(kernel: Kernel) -> Passes:
        return lambda x: apply_gate(x, "silu", kernel)

    peers = {"eager": run("torch"), "compiled": size.compiled(run("torch"))} | libraries.glus()
    return Timed("SwiGLU", inputs, run("auto"), peers, (3 * size.bytes, 5 * size.bytes))


def routed(size: Size) -> Timed:
    shape = (size.length, size.width)
    inputs = {"x": size.normal(*shape), "rows": size.normal(*shape)}
    inputs["weights"] = torch.rand(size.length, 1, device=size.device).requires_grad_()
    places = torch.randperm(size.length, device=size.device).unsqueeze(1)

    def run(kernel: Kernel) -> Passes:
        def there_and_back(x: Tensor, rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
            return dispatch(x, places, kernel), combine(rows, places, weights, kernel)

        return there_and_back

    peers = {"eager": run("torch"), "compiled": size.compiled(run("torch"))}
    moved = (4 * size.bytes, 5 * size.bytes)
    return Timed("rows of experts", inputs, run("auto"), peers, moved)


def losses(size: Size) -> Timed:
    tokens, vocabulary = max(size.length // 8, 8), 16 * size.width
    inputs = {
        "hidden": size.normal(tokens, size.width),
        "matrix": size.normal(vocabulary, size.width, scale=size.width**-0.5),
    }
    targets = torch.randint(vocabulary, (tokens,), device=size.device)
    weights = torch.ones(tokens, device=size.device)

    def ours(hidden: Tensor, matrix: Tensor) -> Tensor:
        return linear_cross_entropy.linear_cross_entropy(
            hidden, matrix, targets, weights, 1e-4, True, vocabulary, ""
        )[0]

    def eager(hidden: Tensor, matrix: Tensor) -> Tensor:
        return cross_entropy(hidden @ matrix.T, targets, weights, z_loss=1e-4)[0]

    operations = 6.0 * tokens * vocabulary * size.width
    peers = {"eager": eager} | libraries.losses(targets)
    return Timed("linear + cross-entropy", inputs, ours, peers, operations=operations)


def convolutions(size: Size, reach: int, name: str) -> Timed:
    groups = max(size.width // 16, 1)
    inputs = {
        "x": size.normal(1, size.length, 3 * size.width),
        "taps": size.normal(groups, reach, scale=reach**-0.5),
    }

    def ours(x: Tensor, taps: Tensor) -> Tensor:
        return gated_convolution(x, taps, gated=True)

    def conv1d(x: Tensor, taps: Tensor) -> Tensor:
        w = gated_input(x).transpose(1, 2)
        filters = taps.flip(-1).repeat_interleave(size.width // groups, dim=0).unsqueeze(1)
        y = F.conv1d(F.pad(w, (reach - 1, 0)), filters, groups=size.width)
        return x[..., : size.width] * y.transpose(1, 2)

    return Timed(name, inputs, ours, {"conv1d + gates": conv1d}, (4 * size.bytes, 7 * size.bytes))


def featurizers(size: Size) -> Timed:
    inputs = {"x": size.normal(1, size.length, size.width), "taps": size.normal(size.width, 3)}

    def conv1d(x: Tensor, taps: Tensor) -> Tensor:
        padded = F.pad(x.transpose(1, 2), (2, 0))
        y = F.conv1d(padded, taps.flip(-1).unsqueeze(1), groups=size.width)
        return y.transpose(1, 2)

    moved = (2 * size.bytes, 3 * size.bytes)
    peers = {"conv1d": conv1d} | libraries.featurizers()
    return Timed("featurizer, 3 taps", inputs, gated_convolution, peers, moved)


def transforms(size: Size) -> Timed:
    """Return a filter as long as the row. A copy is not its limit: the transforms read and write
    memory several times, in fp32 and at twice the length."""
    size = Size(size.device, size.dtype, size.length, size.width // 4)  # eager needs the memory
    inputs = {
        "x": size.normal(1, size.length, 3 * size.width),
        "taps": size.normal(size.width, size.length, scale=size.length**-0.5),
        "skip": size.normal(size.width),
    }

    def ours(x: Tensor, taps: Tensor, skip: Tensor) -> Tensor:
        return fft_convolution.fft_convolution(x, taps, skip, None, True)

    def eager(x: Tensor, taps: Tensor, skip: Tensor) -> Tensor:
        return gated_convolution(x, taps, gated=True, skip=skip, method="fft", kernel="torch")

    moved = (4 * size.bytes, 7 * size.bytes)
    return Timed("FFT convolution, a free filter", inputs, ours, {"eager": eager}, moved)


def modals(size: Size) -> Timed:
    size = Size(size.device, size.dtype, size.length, size.width // 4)  # the FFT needs the memory
    inputs = {
        "x": size.normal(1, size.length, 3 * size.width),
        "rates": (torch.rand(size.width, 16, device=size.device) * 0.1).requires_grad_(),
        "residues": torch.randn(size.width, 16, device=size.device, requires_grad=True),
        "skip": size.normal(size.width),
    }

    def ours(**inputs: Tensor) -> Tensor:
        return gated_modal(**inputs)[0]  # type: ignore[arg-type]

    def filters(rates: Tensor, residues: Tensor) -> Tensor:
        time = torch.arange(size.length, device=size.device)
        return (residues.unsqueeze(-1) * torch.exp(-rates.unsqueeze(-1) * time)).sum(1)

    def fft(filters: Passes) -> Passes:
        def run(x: Tensor, rates: Tensor, residues: Tensor, skip: Tensor) -> Tensor:
            w = gated_input(x)
            y = causal_convolution(w, filters(rates, residues), method="fft") + skip * w
            return x[..., : size.width] * y

        return run

    # Computing the filter op by op takes longer than applying it; fused, it does not.
    peers = {"FFT, its filter fused": fft(size.compiled(filters)), "FFT": fft(filters)}
    moved = (4 * size.bytes, 7 * size.bytes)
    return Timed("Hyena-LI, modal", inputs, ours, peers, moved)


def ssds(size: Size) -> Timed:
    """Return SSD in the proportions of Mamba-2: heads of 64 channels, 128 states, one group."""
    heads, length = max(size.width // 64, 1), max(size.length // 8, 8)  # the plain form is large
    inputs = {
        "xBC": size.normal(1, length, heads * 64 + 2 * 128),  # x, B and C
        "dt": size.normal(1, length, heads),
        "dt_bias": (torch.rand(heads, device=size.device) - 4).requires_grad_(),
        "A_log": torch.rand(heads, device=size.device).requires_grad_(),
        "D": torch.ones(heads, device=size.device, requires_grad=True),
    }

    def run(kernel: Kernel) -> Passes:
        return lambda **inputs: mixed_scan(**inputs, head_dim=64, state_size=128, kernel=kernel)[0]

    xBC, dt = float(inputs["xBC"].nbytes), float(inputs["dt"].nbytes)
    y = float(length * heads * 64 * size.dtype.itemsize)
    moved = (xBC + dt + y, 2 * xBC + 2 * dt + y)
    peers = {"the plain chunked form": run("torch")} | libraries.scans(64, 128)
    return Timed("SSD", inputs, run("auto"), peers, moved)


def selective_scans(size: Size) -> Timed:
    """Return the scan in the proportions of Mamba-1: 16 states for each channel."""
    width, length = size.width, max(size.length // 8, 8)  # the plain form is slow and large
    over = (1, length, 1)
    inputs = {
        "x": size.normal(*over, width),
        "dt": size.normal(*over, width),
        "bias": (torch.rand(1, width, device=size.device) - 4).requires_grad_(),
        "A": (-torch.rand(1, width, 16, device=size.device) * 16).requires_grad_(),
        "B": size.normal(*over, 16),
        "C": size.normal(*over, 16),
        "D": torch.ones(1, width, device=size.device, requires_grad=True),
        "z": size.normal(1, length, width),
    }

    def run(kernel: Kernel) -> Passes:
        return lambda **inputs: gated_scan(**inputs, kernel=kernel)[0]

    x = float(inputs["x"].nbytes)
    peers = {"the plain chunked form": run("torch")}
    return Timed("selective scan", inputs, run("auto"), peers, (4 * x, 7 * x))


def deltas(size: Size, *, by_channel: bool) -> Timed:
    """Return the delta rule with heads of 128 keys and values, and a decay for each head (gated
    DeltaNet) or for each channel of the keys (Kimi Delta Attention)."""
    heads, length = max(size.width // 128, 1), max(size.length // 8, 8)  # the plain form is large
    over = (1, length, heads)
    inputs = {
        "q": normalize(size.normal(*over, 128)).detach().requires_grad_(),
        "k": normalize(size.normal(*over, 128)).detach().requires_grad_(),
        "v": size.normal(*over, 128),
        "g": -torch.rand(*over, 128 if by_channel else 1, device=size.device),
        "beta": torch.rand(*over, device=size.device),
    }
    for name in ("g", "beta"):
        inputs[name].requires_grad_()

    def run(kernel: Kernel) -> Passes:
        return lambda **tensors: kernel_delta_rule(**tensors, kernel=kernel)[0]

    read, y = sum(float(x.nbytes) for x in inputs.values()), float(inputs["v"].nbytes)
    peers = {"the plain chunked form": run("torch")} | libraries.deltas(by_channel=by_channel)
    name = f"delta rule, decays by {'channel' if by_channel else 'head'}"
    return Timed(name, inputs, run("auto"), peers, (read + y, 2 * read + y))
