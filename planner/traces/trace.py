"""Traces: a model's operations, recorded for one layer per kind and for the head.

Nothing is computed: the layers run forward and backward on fake tensors, for one row with `seq_len`
tokens. For GPUs the fused kernels are recorded by name, for CPUs their plain references. Recording
takes seconds, so traces are stored (models/accounting/stored.py).
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...models.accounting.layer_kinds import find_layer_kinds, reduce_to_kinds
from ...models.accounting.stored import load_or_compute
from .work import Work, merge_equal

if TYPE_CHECKING:
    from ...models.config.config import ModelConfig
    from ...models.config.options.precision import Precision

PLANNER = Path(__file__).parents[1]
"""Code that a stored trace depends on."""


@dataclass(frozen=True)
class LayerTrace:
    """One kind of layer."""

    name: str
    operators: dict[str, Any]
    """Operator names by role (mixer, mlp, shared)."""
    forward: tuple[Work, ...]
    backward: tuple[Work, ...]
    stream: int
    """Input bytes."""
    calls: int
    """Operator calls."""


@dataclass(frozen=True)
class ModelTrace:
    """A model on one row with `seq_len` tokens."""

    seq_len: int
    width: int
    layers: tuple[int, ...]
    """Kinds by layer."""
    kinds: tuple[LayerTrace, ...]
    head: LayerTrace
    """Final norm, logits and loss."""


def trace_model(model: ModelConfig, seq_len: int, precision: Precision, device: str) -> ModelTrace:
    """Load the stored trace, or record it."""
    question = f"operations {model!r} {seq_len} {precision!r} {device}"
    record = partial(_record_model, model, seq_len, precision, device)
    return load_or_compute(question, record, asdict, _parse_trace, PLANNER)


def _parse_trace(data: Any) -> ModelTrace:
    def parse_layer(layer: Any) -> LayerTrace:
        work = {
            direction: tuple(map(Work.parse, layer[direction]))
            for direction in ("forward", "backward")
        }
        return LayerTrace(**{**layer, **work})

    fields = {
        "layers": tuple(data["layers"]),
        "kinds": tuple(map(parse_layer, data["kinds"])),
        "head": parse_layer(data["head"]),
    }
    return ModelTrace(**{**data, **fields})


def _record_model(
    model: ModelConfig, seq_len: int, precision: Precision, device: str
) -> ModelTrace:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from ...models.config.precision import compute_dtype
    from ...models.kernels.choice import as_on_gpu
    from ...models.model.model import Model
    from ...models.operators import BatchContext

    layer_kinds, layers = find_layer_kinds(model)
    config = reduce_to_kinds(model)
    kinds = []
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(compute_dtype(precision))
    try:
        with FakeTensorMode(), as_on_gpu() if device == "cuda" else nullcontext():
            reduced = Model(config)
            u = torch.empty(1, seq_len, config.width, requires_grad=True)
            batch = BatchContext(torch.arange(seq_len).unsqueeze(0), embeddings=u)
            for layer, block in zip(layer_kinds, reduced.typed_blocks(), strict=True):
                shared = reduced.shared_block(layer)
                forward, backward = _record_passes(
                    lambda b=block, s=shared: b(u, batch, None, s), seq_len
                )
                kinds.append(
                    LayerTrace(
                        name=str(layer) + (f"/{layer.mlp}" if layer.mlp else ""),
                        operators=asdict(layer),
                        forward=forward,
                        backward=backward,
                        stream=u.nbytes,
                        calls=len(layer.branches) + (layer.shared is not None),
                    )
                )
            targets = torch.zeros(1, seq_len, dtype=torch.int64)
            weights = torch.ones(1, seq_len, dtype=torch.float32)

            def compute_loss() -> Any:
                return reduced.unembed.loss(
                    reduced.norm(u), targets, weights, 0.0, reduced.axes.tensor
                )

            forward, backward = _record_passes(compute_loss, seq_len)
    finally:
        torch.set_default_dtype(default_dtype)
    head = LayerTrace("head", {}, forward, backward, u.nbytes, 1)
    return ModelTrace(seq_len, config.width, layers, tuple(kinds), head)


def _record_passes(compute: Any, seq_len: int) -> tuple[tuple[Work, ...], tuple[Work, ...]]:
    """Record a computation forward and backward."""
    import torch

    from .recorder import OperationRecorder

    with OperationRecorder(seq_len) as forward:
        outputs = compute()
    tensors = (output for output in outputs if isinstance(output, torch.Tensor))
    roots = [tensor for tensor in tensors if tensor.requires_grad]
    with OperationRecorder(seq_len) as backward:
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
    return merge_equal(forward.work), merge_equal(backward.work)
