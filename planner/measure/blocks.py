"""Times of blocks in hybrid models: norm, operator and residual sum, forward and backward.

A block is the only layer of a model, in published proportions: heads with 128 channels, filters and
states as in Evo 2, Mamba and Mamba-2, MLPs 8/3 times as wide. It needs torch alone.
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
from .clock import Clock, torch_dtype

VOCABULARY = 16
"""Embedding rows; the embedding is not measured."""
BACKWARD = 2.0
"""Backward operations per forward operation."""

Options = dict[str, dict[str, Any]]


def _heads(width: int) -> int:
    return max(width // 128, 1)


def _hidden(width: int) -> int:
    """Return 8/3 · width, rounded up to a multiple of 256 (or 8 below 256)."""
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
"""A block's operators by width. `shared` is Zamba's shared block, measured without the mixer."""


@dataclass(frozen=True)
class BlockTime:
    """A measured block."""

    block: str
    width: int
    length: int
    rows: int
    precision: str
    device: str
    parameters: int
    forward: float
    """Forward seconds."""
    backward: float
    """Backward seconds."""
    flops: float
    """Forward FLOP; attention's pairs above the diagonal do not count."""
    bytes: tuple[float, float]
    """Bytes that the two passes must move: input, output, weights and gradients once."""

    @property
    def row(self) -> dict[str, Any]:
        """Table columns."""
        flops, (forward_bytes, backward_bytes) = self.flops, self.bytes
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
            "forward GB/s": forward_bytes / self.forward / 1e9,
            "backward GB/s": backward_bytes / self.backward / 1e9,
            "tokens/s": self.rows * self.length / (self.forward + self.backward),
        }


def measure_block(
    block: str, width: int, length: int, rows: int, precision: str, clock: Clock
) -> BlockTime:
    """Time a block with random weights on u [rows, length, width]."""
    model = build_block(block, width)
    device, dtype = clock.device, torch_dtype(precision)
    model.to_empty(device=device).to(dtype)
    model.init_weights(0)
    layer = model.typed_blocks()[0]
    u = torch.randn(rows, length, width, device=device).to(dtype).requires_grad_()
    positions = torch.arange(length, device=device).unsqueeze(0)
    batch = BatchContext(positions, embeddings=u.detach() if layer.call is not None else None)
    shared = model.shared_block(layer.layer)

    def run(u: torch.Tensor) -> torch.Tensor:
        if layer.call is not None:
            shared_output: torch.Tensor = layer.call(shared, u, batch.call_context(None))
            return shared_output
        y: torch.Tensor = layer(u, batch)[0]
        return y

    measured = [layer] if layer.call is None else [layer.call, shared]
    weights = [w for module in measured if module is not None for w in module.parameters()]
    forward, backward = clock.passes(run, {"u": u}, weights)
    [flops_by_operator] = layer_flops(model, lambda operator: _causal_flops(operator, length))
    flops = sum(
        operator_flops
        for name, operator_flops in flops_by_operator.items()
        if layer.call is None or "shared" in name
    )
    num_parameters = sum(weight.numel() for weight in weights)
    stream_bytes, weight_bytes = float(u.nbytes), float(num_parameters * dtype.itemsize)
    return BlockTime(
        block=block,
        width=width,
        length=length,
        rows=rows,
        precision=precision,
        device=device.type,
        parameters=num_parameters,
        forward=forward,
        backward=backward,
        flops=flops * rows * length,
        bytes=(2 * stream_bytes + weight_bytes, 3 * stream_bytes + 2 * weight_bytes),
    )


def build_block(block: str, width: int) -> Model:
    """Build a model with one layer on the meta device."""
    if block not in BLOCKS:
        raise MisuseError(f"no block `{block}`", hint=f"choose among {', '.join(BLOCKS)}")
    operators = {
        name: OPTIONS[options["kind"]](**options) for name, options in BLOCKS[block](width).items()
    }
    problems = [problem for operator in operators.values() for problem in operator.problems(width)]
    if problems:
        raise MisuseError(
            f"a block {block} of width {width} cannot be built: {'; '.join(problems)}",
            hint="choose a multiple of 128",
        )
    pattern = "[shared>mixer]" if "shared" in operators else "[mixer]"
    with torch.device("meta"):
        return Model(
            ModelConfig(vocab_size=VOCABULARY, width=width, pattern=pattern, operators=operators)
        )


def _causal_flops(operator: Operator, length: int) -> dict[str, float]:
    """Return an operator's FLOP per token, without the masked half of attention."""
    terms = operator.flops(length)
    return {term: flops / 2 if term == "attention" else flops for term, flops in terms.items()}
