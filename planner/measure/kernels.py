"""Work of each fused kernel by width and length, and rates of products, copies and attention.

Functions are those that the operators call, so that a GPU runs the kernel and a CPU its twin. It
needs torch alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...models.config.options.rope import Rope
from ...models.layers.gated_convolution import gated_convolution, gated_modal
from ...models.layers.gated_scan import gated_scan
from ...models.layers.grouped import group_ends, grouped_product
from ...models.layers.mixed_scan import mixed_scan
from ...models.layers.norms import GatedRMSNorm, RMSNorm
from ...models.layers.rope import rotate, rotation
from ...models.model.embedding import EmbeddingTable, Unembedding
from ...models.operators.mlp import apply_gate
from ...models.parallel.axes import ALONE
from ...models.parallel.ring import Hops, Zigzag, ring_attention
from ..prices.machine import RING
from .clock import Clock, dtype_of

BACKWARD = 2.5
"""Operations of attention's backward pass, in those of the forward pass."""


@dataclass(frozen=True)
class Draw:
    """Random inputs of one precision on a device."""

    rows: int
    length: int
    width: int
    precision: str
    device: torch.device

    def normal(self, *shape: int) -> Tensor:
        x = torch.randn(shape, device=self.device).to(dtype_of(self.precision))
        return x.requires_grad_()

    def exact(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Return uniform numbers in fp32, for rates and steps."""
        x = torch.rand(shape, device=self.device) * (high - low) + low
        return x.requires_grad_()

    def over(self, *channels: int) -> Tensor:
        """Return an input of [rows, length, channels…]."""
        return self.normal(self.rows, self.length, *channels)

    def module(self, module: torch.nn.Module) -> Any:
        for parameter in module.parameters():
            torch.nn.init.ones_(parameter)
        return module.to(self.device, dtype_of(self.precision))


@dataclass(frozen=True)
class Work:
    """A call with inputs; those that require gradients are differentiated."""

    run: Callable[..., Any]
    inputs: Mapping[str, Any]
    elements: int | None = None
    """Elements whose rate is measured; rows × length × width if None."""


def rms_norm(draw: Draw, size: int) -> Work:
    return Work(draw.module(RMSNorm(draw.width, 1e-5)), {"x": draw.over(draw.width)})


def add_rms_norm(draw: Draw, size: int) -> Work:
    norm = rms_norm(draw, size)
    return Work(norm.run, {**norm.inputs, "residual": draw.over(draw.width)})


def gated_rms_norm(draw: Draw, size: int) -> Work:
    module = draw.module(GatedRMSNorm(draw.width, 1e-5))
    return Work(module, {"y": draw.over(draw.width), "z": draw.over(draw.width)})


def rope(draw: Draw, size: int) -> Work:
    heads = max(draw.width // 128, 1)
    positions = torch.arange(draw.length, device=draw.device).unsqueeze(0)
    cos, sin = rotation(Rope(), positions, draw.width // heads)
    x = draw.over(heads, draw.width // heads)
    return Work(lambda x: rotate(x, cos, sin), {"x": x})


def glu(draw: Draw, size: int) -> Work:
    return Work(lambda x: apply_gate(x, "silu"), {"x": draw.over(2 * draw.width)})


def linear_cross_entropy(draw: Draw, size: int) -> Work:
    table = EmbeddingTable(size, draw.width)
    torch.nn.init.normal_(table.weight, std=draw.width**-0.5)
    unembedding = Unembedding(table.to(draw.device, dtype_of(draw.precision)))
    shape = (draw.rows, draw.length)
    targets = torch.randint(size, shape, device=draw.device)
    weights = torch.ones(shape, device=draw.device)

    def run(hidden: Tensor) -> Tensor:
        return unembedding.loss(hidden, targets, weights, 0.0, ALONE)[0]

    return Work(run, {"hidden": draw.over(draw.width)})


def convolution(draw: Draw, size: int) -> Work:
    """Return a gated convolution of `size` taps; groups of 16 channels share them."""
    x, taps = draw.over(3 * draw.width), draw.normal(max(draw.width // 16, 1), size)
    return Work(lambda x, taps: gated_convolution(x, taps, gated=True), {"x": x, "taps": taps})


def fft_convolution(draw: Draw, size: int) -> Work:
    """Return a gated convolution with a filter of `size` taps for each channel."""
    inputs = {"x": draw.over(3 * draw.width), "taps": draw.normal(draw.width, size)}
    inputs["skip"] = draw.normal(draw.width)
    return Work(lambda **given: gated_convolution(**given, gated=True, method="fft"), inputs)


def modal(draw: Draw, size: int) -> Work:
    inputs = {
        "x": draw.over(3 * draw.width),
        "rates": draw.exact(draw.width, size, high=0.1),
        "residues": draw.exact(draw.width, size, low=-1.0),
        "skip": draw.normal(draw.width),
    }
    return Work(lambda **given: gated_modal(**given)[0], inputs)


def ssd(draw: Draw, size: int) -> Work:
    """Return the scan of Mamba-2: heads of 64 channels, one group of `size` states."""
    heads = max(draw.width // 64, 1)
    dim = draw.width // heads
    inputs = {
        "xBC": draw.over(heads * dim + 2 * size),
        "dt": draw.over(heads),
        "dt_bias": draw.exact(heads, low=-4, high=-3),
        "A_log": draw.exact(heads),
        "D": draw.exact(heads),
    }
    return Work(lambda **given: mixed_scan(**given, head_dim=dim, state_size=size)[0], inputs)


def selective_scan(draw: Draw, size: int) -> Work:
    """Return the scan of Mamba-1 with `size` states for each channel."""
    inputs = {
        "x": draw.over(1, draw.width),
        "dt": draw.over(1, draw.width),
        "bias": draw.exact(1, draw.width, low=-4, high=-3),
        "A": draw.exact(1, draw.width, size, low=-16),
        "B": draw.over(1, size),
        "C": draw.over(1, size),
        "D": draw.exact(1, draw.width),
        "z": draw.over(draw.width),
    }
    return Work(lambda **given: gated_scan(**given)[0], inputs)


def ring(draw: Draw, size: int) -> Work:
    """Return attention by a ring without fused attention, on one rank, with heads of `size`."""
    zigzag = Zigzag(draw.length, ALONE)
    shape = max(draw.width // size, 1), size
    inputs = {name: draw.over(*shape) for name in "qkv"}
    pairs = sum(
        (tile.queries.stop - tile.queries.start) * (tile.keys.stop - tile.keys.start)
        for tile in Hops(None, zigzag, draw.device).tiles(0)
    )

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ring_attention(q, k, v, None, zigzag, scale=size**-0.5)

    return Work(run, inputs, draw.rows * pairs * shape[0] * size)


Make = Callable[[Draw, int], Work]
KERNELS: dict[str, tuple[Make, tuple[int | str, ...]]] = {
    "rms_norm": (rms_norm, (0,)),
    "add_rms_norm": (add_rms_norm, (0,)),
    "gated_rms_norm": (gated_rms_norm, (0,)),
    "rope": (rope, (0,)),
    "glu": (glu, (0,)),
    "linear_cross_entropy": (linear_cross_entropy, ("vocabulary",)),
    "short_convolution": (convolution, (4, 7)),
    "toeplitz": (convolution, (128,)),
    "fft_convolution": (fft_convolution, ("length",)),
    "modal": (modal, (16,)),
    "ssd": (ssd, (128,)),
    "selective_scan": (selective_scan, (16,)),
    RING: (ring, (32, 64)),
}
"""Work of each kernel, by the name of its op, and the measured sizes: taps or states; `length` for
filters as long as the row, `vocabulary` for the loss."""


def sizes_of(kernel: str, length: int, vocabularies: Sequence[int]) -> list[int]:
    """Return the measured sizes of a kernel for rows of a length."""
    named = {"vocabulary": list(vocabularies), "length": [length]}
    sizes = KERNELS[kernel][1]
    return [each for size in sizes for each in (named[size] if isinstance(size, str) else [size])]


def kernel_rates(kernel: str, draw: Draw, size: int, clock: Clock) -> tuple[float, float]:
    """Return elements (rows · length · width) by seconds of the forward and backward pass."""
    work = KERNELS[kernel][0](draw, size)
    elements = work.elements or draw.rows * draw.length * draw.width
    forward, backward = clock.passes(work.run, work.inputs)
    return elements / forward, elements / backward


def attention_rates(
    heads: int, head_width: int, length: int, rows: int, precision: str, clock: Clock
) -> tuple[float, float]:
    """Return FLOP/s of causal attention forward and backward; masked pairs do not count."""
    shape = (rows, heads, length, head_width)
    dtype = dtype_of(precision)
    q, k, v = (torch.randn(shape, device=clock.device).to(dtype) for _ in range(3))
    inputs = {"query": q, "key": k, "value": v}
    for each in inputs.values():
        each.requires_grad_()

    def run(**given: Any) -> Tensor:
        return F.scaled_dot_product_attention(**given, is_causal=True)

    forward, backward = clock.passes(run, inputs)
    flops = 2.0 * rows * heads * head_width * length**2
    return flops / forward, BACKWARD * flops / backward


def matmul_rate(m: int, k: int, n: int, groups: int, precision: str, clock: Clock) -> float:
    """Return FLOP/s of a product [m, k] × [k, n], as a linear layer calls it, or of a grouped
    one with `groups` matrices and m rows for each."""
    dtype = dtype_of(precision)
    x = torch.randn(groups * m, k, device=clock.device).to(dtype)
    weights = torch.randn(groups, n, k, device=clock.device).to(dtype)
    with torch.no_grad():
        return 2.0 * groups * m * k * n / clock.seconds(multiply(x, weights))


def multiply(x: Tensor, weights: Tensor) -> Callable[[], Tensor]:
    """Return the product of x [groups · m, k] and weights [groups, n, k]."""
    if len(weights) == 1:
        return lambda: F.linear(x, weights[0])
    counts = torch.full((len(weights),), len(x) // len(weights), device=x.device)
    ends = group_ends(counts, x, weights)
    return lambda: grouped_product(x, weights, ends)


def copy_rate(size: int, clock: Clock) -> float:
    """Return bytes read and written by seconds of a copy of `size` bytes."""
    source = torch.ones(size, dtype=torch.uint8, device=clock.device)
    target = torch.empty_like(source)
    return 2 * size / clock.seconds(lambda: target.copy_(source))
