"""Times of the blocks of hybrid models: norm, operator and residual sum, forward and backward.

A block is a layer of a model of one layer, in the proportions of published models: heads of 128
channels, filters and states of Evo 2, Mamba and Mamba-2, MLPs of 8/3 of the width. It needs torch
alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...console.errors import MisuseError
from ...models.accounting.count import layer_flops
from ...models.config.config import ModelConfig
from ...models.config.options import OPTIONS
from ...models.model.model import Model
from ...models.operators import BatchContext, Operator
from .clock import Clock, dtype_of

VOCABULARY = 16
"""Rows of the embedding, which is not measured."""
BACKWARD = 2.0
"""Operations of a backward pass, in those of the forward pass."""

Options = dict[str, dict[str, Any]]


def _heads(width: int) -> int:
    return max(width // 128, 1)


def _hidden(width: int) -> int:
    """Return 8/3 of the width, rounded up to a multiple of 256 (or of 8 below 256)."""
    unit = 256 if width >= 256 else 8
    return -(-8 * width // (3 * unit)) * unit


def _zamba(width: int) -> Options:
    mamba = {"kind": "mamba2", "state_size": 128, "head_dim": 64}
    block = {"kind": "zamba-block", "heads": _heads(2 * width), "hidden": 4 * width}
    return {"mixer": mamba, "shared": block | {"lora_rank": 128}}


BLOCKS: dict[str, Callable[[int], Options]] = {
    "attention": lambda d: {"mixer": {"kind": "attention", "heads": _heads(d)}},
    "mamba1": lambda d: {"mixer": {"kind": "mamba1", "state_size": 16}},
    "mamba2": lambda d: {"mixer": {"kind": "mamba2", "state_size": 128, "head_dim": 64}},
    "se": lambda d: {"mixer": {"kind": "hyena-se", "groups": max(d // 16, 1), "taps": 7}},
    "mr": lambda d: {
        "mixer": {
            "kind": "hyena-mr", "groups": max(d // 16, 1), "taps": 128, "filter_horizon": 8192,
        }
    },
    "li": lambda d: {"mixer": {"kind": "hyena-li", "state_size": 16}},
    "mlp": lambda d: {"mixer": {"kind": "glu", "hidden": _hidden(d)}},
    "moe": lambda d: {
        "mixer": {"kind": "moe", "experts": 8, "top_k": 2, "hidden": _hidden(d)}
    },
    "zamba": _zamba,
}  # fmt: skip
"""Operators of each block at a width. `shared` is Zamba's shared block, measured without the mixer
that it feeds."""


@dataclass(frozen=True)
class BlockTime:
    """A measured block, both passes."""

    block: str
    width: int
    length: int
    rows: int
    precision: str
    device: str
    parameters: int
    forward: float
    """Seconds of the forward pass."""
    backward: float
    """Seconds of the backward pass."""
    flops: float
    """Operations of the forward pass; of attention, the pairs above the diagonal do not count."""
    bytes: tuple[float, float]
    """Bytes that the two passes must move: input, output, weights and gradients, once each."""

    @property
    def row(self) -> dict[str, Any]:
        """Columns of the table."""
        flops, (out, back) = self.flops, self.bytes
        return {
            "block": self.block,
            "width": self.width,
            "length": self.length,
            "rows": self.rows,
            "precision": self.precision,
            "device": self.device,
            "parameters": self.parameters,
            "forward ms": self.forward * 1e3,
            "backward ms": self.backward * 1e3,
            "forward TFLOP/s": flops / self.forward / 1e12,
            "backward TFLOP/s": BACKWARD * flops / self.backward / 1e12,
            "forward GB/s": out / self.forward / 1e9,
            "backward GB/s": back / self.backward / 1e9,
            "tokens/s": self.rows * self.length / (self.forward + self.backward),
        }


def measure(
    block: str, width: int, length: int, rows: int, precision: str, clock: Clock
) -> BlockTime:
    """Time a block of random weights on random input."""
    model = build(block, width)
    device, dtype = clock.device, dtype_of(precision)
    model.to_empty(device=device).to(dtype)
    model.init_weights(0)
    layer = model.typed_blocks()[0]
    u = torch.randn(rows, length, width, device=device).to(dtype).requires_grad_()
    positions = torch.arange(length, device=device).unsqueeze(0)
    batch = BatchContext(positions, embeddings=u.detach() if layer.call is not None else None)
    shared = model.shared_block(layer.layer)

    def run(u: torch.Tensor) -> torch.Tensor:
        if layer.call is not None:
            called: torch.Tensor = layer.call(shared, u, batch.call_context(None))
            return called
        y: torch.Tensor = layer(u, batch)[0]
        return y

    measured = [layer] if layer.call is None else [layer.call, shared]
    weights = [each for module in measured if module is not None for each in module.parameters()]
    forward, backward = clock.passes(run, {"u": u}, weights)
    [flops] = layer_flops(model, lambda operator: _causal(operator, length))
    own = {name: each for name, each in flops.items() if layer.call is None or "shared" in name}
    count = sum(weight.numel() for weight in weights)
    stream, held = float(u.nbytes), float(count * dtype.itemsize)
    return BlockTime(
        block=block,
        width=width,
        length=length,
        rows=rows,
        precision=precision,
        device=device.type,
        parameters=count,
        forward=forward,
        backward=backward,
        flops=sum(own.values()) * rows * length,
        bytes=(2 * stream + held, 3 * stream + 2 * held),
    )


def build(block: str, width: int) -> Model:
    """Return a model of one layer on the meta device."""
    if block not in BLOCKS:
        raise MisuseError(f"no block `{block}`", hint=f"choose among {', '.join(BLOCKS)}")
    operators = {name: OPTIONS[each["kind"]](**each) for name, each in BLOCKS[block](width).items()}
    problems = [text for each in operators.values() for text in each.problems(width)]
    if problems:
        what = f"a block {block} of width {width} cannot be built: {'; '.join(problems)}"
        raise MisuseError(what, hint="choose a multiple of 128")
    pattern = "[shared>mixer]" if "shared" in operators else "[mixer]"
    with torch.device("meta"):
        return Model(
            ModelConfig(vocab_size=VOCABULARY, width=width, pattern=pattern, operators=operators)
        )


def _causal(operator: Operator, length: int) -> dict[str, float]:
    """Return an operator's own operations, without the masked half of attention's."""
    parts = operator.flops(length)
    return {name: flops / 2 if name == "attention" else flops for name, flops in parts.items()}
