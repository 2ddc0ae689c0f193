"""Measured rates: fused kernels by width and length, matrix products, copies and attention.

The functions are those that operators call, so that a GPU runs the kernel and a CPU its twin. This
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
from ...models.layers.delta.scan import delta_scan
from ...models.layers.gated_convolution import gated_convolution, gated_modal
from ...models.layers.gated_scan import gated_scan
from ...models.layers.grouped import group_ends, grouped_product
from ...models.layers.mixed_scan import mixed_scan
from ...models.layers.norms import GatedRMSNorm, RMSNorm
from ...models.layers.rope import rotate, rotation
from ...models.model.embedding import EmbeddingTable, Unembedding
from ...models.operators.mlp import apply_gate
from ...models.parallel.axes import ALONE
from ...models.parallel.ring.attention import Hops, ring_attention
from ...models.parallel.ring.circulation import KeysAndValues
from ...models.parallel.ring.zigzag import Zigzag
from ..prices.machine import RING
from .clock import Clock, torch_dtype

BACKWARD = 2.5
"""Attention's backward operations per forward operation."""


@dataclass(frozen=True)
class RandomInputs:
    """Random inputs for a kernel, in one precision on a device."""

    rows: int
    length: int
    width: int
    precision: str
    device: torch.device

    def normal(self, *shape: int) -> Tensor:
        x = torch.randn(shape, device=self.device).to(torch_dtype(self.precision))
        return x.requires_grad_()

    def exact(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Return uniform numbers in fp32, for rates and steps."""
        x = torch.rand(shape, device=self.device) * (high - low) + low
        return x.requires_grad_()

    def sequences(self, *channels: int) -> Tensor:
        """Return normal numbers [rows, length, channels…]."""
        return self.normal(self.rows, self.length, *channels)

    def module(self, module: torch.nn.Module) -> Any:
        for parameter in module.parameters():
            torch.nn.init.ones_(parameter)
        return module.to(self.device, torch_dtype(self.precision))


@dataclass(frozen=True)
class KernelCall:
    """A call with inputs; those that require gradients get them."""

    run: Callable[..., Any]
    inputs: Mapping[str, Any]
    elements: int | None = None
    """Elements that the rate counts; rows × length × width if None."""


def rms_norm(draw: RandomInputs, size: int) -> KernelCall:
    return KernelCall(draw.module(RMSNorm(draw.width, 1e-5)), {"x": draw.sequences(draw.width)})


def add_rms_norm(draw: RandomInputs, size: int) -> KernelCall:
    norm = rms_norm(draw, size)
    return KernelCall(norm.run, {**norm.inputs, "residual": draw.sequences(draw.width)})


def gated_rms_norm(draw: RandomInputs, size: int) -> KernelCall:
    module = draw.module(GatedRMSNorm(draw.width, 1e-5))
    return KernelCall(module, {"y": draw.sequences(draw.width), "z": draw.sequences(draw.width)})


def rope(draw: RandomInputs, size: int) -> KernelCall:
    heads = max(draw.width // 128, 1)
    positions = torch.arange(draw.length, device=draw.device).unsqueeze(0)
    cos, sin = rotation(Rope(), positions, draw.width // heads)
    x = draw.sequences(heads, draw.width // heads)
    return KernelCall(lambda x: rotate(x, cos, sin), {"x": x})


def glu(draw: RandomInputs, size: int) -> KernelCall:
    return KernelCall(lambda x: apply_gate(x, "silu"), {"x": draw.sequences(2 * draw.width)})


def linear_cross_entropy(draw: RandomInputs, size: int) -> KernelCall:
    table = EmbeddingTable(size, draw.width)
    torch.nn.init.normal_(table.weight, std=draw.width**-0.5)
    unembedding = Unembedding(table.to(draw.device, torch_dtype(draw.precision)))
    shape = (draw.rows, draw.length)
    targets = torch.randint(size, shape, device=draw.device)
    weights = torch.ones(shape, device=draw.device)

    def run(hidden: Tensor) -> Tensor:
        return unembedding.loss(hidden, targets, weights, 0.0, ALONE)[0]

    return KernelCall(run, {"hidden": draw.sequences(draw.width)})


def convolution(draw: RandomInputs, size: int) -> KernelCall:
    """Return a gated convolution with `size` taps; groups of 16 channels share them."""
    x, taps = draw.sequences(3 * draw.width), draw.normal(max(draw.width // 16, 1), size)
    return KernelCall(
        lambda x, taps: gated_convolution(x, taps, gated=True), {"x": x, "taps": taps}
    )


def fft_convolution(draw: RandomInputs, size: int) -> KernelCall:
    """Return a gated convolution with a filter of `size` taps per channel."""
    inputs = {"x": draw.sequences(3 * draw.width), "taps": draw.normal(draw.width, size)}
    inputs["skip"] = draw.normal(draw.width)
    return KernelCall(
        lambda **inputs: gated_convolution(**inputs, gated=True, method="fft"), inputs
    )


def modal(draw: RandomInputs, size: int) -> KernelCall:
    inputs = {
        "x": draw.sequences(3 * draw.width),
        "rates": draw.exact(draw.width, size, high=0.1),
        "residues": draw.exact(draw.width, size, low=-1.0),
        "skip": draw.normal(draw.width),
    }
    return KernelCall(lambda **inputs: gated_modal(**inputs)[0], inputs)


def ssd(draw: RandomInputs, size: int) -> KernelCall:
    """Return Mamba-2's scan: heads with 64 channels, one group with `size` states."""
    heads = max(draw.width // 64, 1)
    dim = draw.width // heads
    inputs = {
        "xBC": draw.sequences(heads * dim + 2 * size),
        "dt": draw.sequences(heads),
        "dt_bias": draw.exact(heads, low=-4, high=-3),
        "A_log": draw.exact(heads),
        "D": draw.exact(heads),
    }
    return KernelCall(
        lambda **inputs: mixed_scan(**inputs, head_dim=dim, state_size=size)[0], inputs
    )


def delta(draw: RandomInputs, size: int) -> KernelCall:
    """Return the delta rule with `size` key channels for each of about as many value channels."""
    heads = max(draw.width // size, 1)
    value_dim = draw.width // heads
    inputs = {
        "qkv": draw.sequences(heads * (2 * size + value_dim)),
        "decay": draw.sequences(heads),
        "beta": draw.sequences(heads),
        "A_log": draw.exact(heads),
        "dt_bias": draw.exact(heads, low=-4, high=-3),
    }
    return KernelCall(
        lambda **inputs: delta_scan(**inputs, key_head_dim=size, value_head_dim=value_dim)[0],
        inputs,
    )


def selective_scan(draw: RandomInputs, size: int) -> KernelCall:
    """Return Mamba-1's scan with `size` states per channel."""
    inputs = {
        "x": draw.sequences(1, draw.width),
        "dt": draw.sequences(1, draw.width),
        "bias": draw.exact(1, draw.width, low=-4, high=-3),
        "A": draw.exact(1, draw.width, size, low=-16),
        "B": draw.sequences(1, size),
        "C": draw.sequences(1, size),
        "D": draw.exact(1, draw.width),
        "z": draw.sequences(draw.width),
    }
    return KernelCall(lambda **inputs: gated_scan(**inputs)[0], inputs)


def ring(draw: RandomInputs, size: int) -> KernelCall:
    """Return ring attention without a fused kernel, on one rank, with `size` channels per head."""
    zigzag = Zigzag(draw.length, ALONE)
    shape = max(draw.width // size, 1), size
    inputs = {name: draw.sequences(*shape) for name in "qkv"}
    pairs = sum(
        (tile.queries.stop - tile.queries.start) * (tile.keys.stop - tile.keys.start)
        for tile in Hops(None, zigzag, draw.device).tiles(0)
    )

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ring_attention(q, KeysAndValues(k, v), None, zigzag, scale=size**-0.5)

    return KernelCall(run, inputs, draw.rows * pairs * shape[0] * size)


MakeCall = Callable[[RandomInputs, int], KernelCall]
KERNELS: dict[str, tuple[MakeCall, tuple[int | str, ...]]] = {
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
    "delta": (delta, (128,)),
    "selective_scan": (selective_scan, (16,)),
    RING: (ring, (32, 64)),
}
"""Work of each kernel, by the name of its op, and the measured sizes: taps or states; `length` for
filters as long as the row, `vocabulary` for the loss."""


def list_sizes(kernel: str, length: int, vocabularies: Sequence[int]) -> list[int]:
    """List a kernel's measured sizes for rows with `length` tokens."""
    named = {"vocabulary": list(vocabularies), "length": [length]}
    sizes: list[int] = []
    for size in KERNELS[kernel][1]:
        sizes += named[size] if isinstance(size, str) else [size]
    return sizes


def measure_kernel(kernel: str, draw: RandomInputs, size: int, clock: Clock) -> tuple[float, float]:
    """Measure elements (rows · length · width) per second, forward and backward."""
    call = KERNELS[kernel][0](draw, size)
    elements = call.elements or draw.rows * draw.length * draw.width
    forward, backward = clock.passes(call.run, call.inputs)
    return elements / forward, elements / backward


def measure_attention(
    heads: int, head_width: int, length: int, rows: int, precision: str, clock: Clock
) -> tuple[float, float]:
    """Measure FLOP/s of causal attention, forward and backward; masked pairs do not count."""
    shape = (rows, heads, length, head_width)
    dtype = torch_dtype(precision)
    q, k, v = (torch.randn(shape, device=clock.device).to(dtype) for _ in range(3))
    inputs = {"query": q, "key": k, "value": v}
    for tensor in inputs.values():
        tensor.requires_grad_()

    def run(**inputs: Any) -> Tensor:
        return F.scaled_dot_product_attention(**inputs, is_causal=True)

    forward, backward = clock.passes(run, inputs)
    flops = 2.0 * rows * heads * head_width * length**2
    return flops / forward, BACKWARD * flops / backward


def measure_matmul(m: int, k: int, n: int, groups: int, precision: str, clock: Clock) -> float:
    """Measure FLOP/s of a product [m, k] × [k, n], as a linear layer calls it, or of a grouped
    product with `groups` matrices and m rows per group."""
    dtype = torch_dtype(precision)
    x = torch.randn(groups * m, k, device=clock.device).to(dtype)
    weights = torch.randn(groups, n, k, device=clock.device).to(dtype)
    with torch.no_grad():
        return 2.0 * groups * m * k * n / clock.seconds(make_product(x, weights))


def make_product(x: Tensor, weights: Tensor) -> Callable[[], Tensor]:
    """Return a function that multiplies x [groups · m, k] by weights [groups, n, k]."""
    if len(weights) == 1:
        return lambda: F.linear(x, weights[0])
    counts = torch.full((len(weights),), len(x) // len(weights), device=x.device)
    ends = group_ends(counts, x, weights)
    return lambda: grouped_product(x, weights, ends)


def measure_copy(size: int, clock: Clock) -> float:
    """Measure bytes read and written per second while `size` bytes are copied."""
    source = torch.ones(size, dtype=torch.uint8, device=clock.device)
    target = torch.empty_like(source)
    return 2 * size / clock.seconds(lambda: target.copy_(source))
