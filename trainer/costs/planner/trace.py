"""Trace of a model: the operations of one layer of each sort.

Nothing is computed: a layer of each sort runs forward and backward on fake tensors, one row of the
asked length. On a GPU the fused kernels are recorded by name, elsewhere their plain references. The
trace is stored (models/accounting/stored.py), because it takes seconds.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....models.accounting.sorts import one_of_each, sorts_of
from ....models.accounting.stored import stored
from .work import Work, counted

if TYPE_CHECKING:
    from ....models.config import ModelConfig
    from ....models.options.precision import Precision

PLANNER = Path(__file__).parent
"""Modules that record operations."""


@dataclass(frozen=True)
class LayerTrace:
    """A layer of one sort."""

    name: str
    layer: dict[str, Any]
    """Operators of the layer."""
    forward: tuple[Work, ...]
    backward: tuple[Work, ...]
    stream: int
    """Bytes of the layer's input."""
    calls: int
    """Operator calls."""


@dataclass(frozen=True)
class ModelTrace:
    """One row of `seq_len` tokens."""

    seq_len: int
    width: int
    layers: tuple[int, ...]
    """Sort of each layer."""
    sorts: tuple[LayerTrace, ...]
    head: LayerTrace
    """Final norm, logits and loss."""


def trace(model: ModelConfig, seq_len: int, precision: Precision, device: str) -> ModelTrace:
    """Return the stored trace, or make it."""
    question = f"operations {model!r} {seq_len} {precision!r} {device}"
    make = partial(_make, model, seq_len, precision, device)
    return stored(question, make, asdict, _from_json, PLANNER)


def _from_json(data: Any) -> ModelTrace:
    def layer(each: Any) -> LayerTrace:
        work = {
            name: tuple(Work.from_json(w) for w in each[name]) for name in ("forward", "backward")
        }
        return LayerTrace(**{**each, **work})

    sorts = tuple(layer(each) for each in data["sorts"])
    return ModelTrace(
        **{**data, "layers": tuple(data["layers"]), "sorts": sorts, "head": layer(data["head"])}
    )


def _make(model: ModelConfig, seq_len: int, precision: Precision, device: str) -> ModelTrace:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from ....models.kernels.choice import as_on_gpu
    from ....models.model import Model
    from ....models.operators import BatchContext
    from ....models.precision import compute_dtype

    sorts, layers = sorts_of(model)
    config = one_of_each(model)
    found = []
    standard = torch.get_default_dtype()
    torch.set_default_dtype(compute_dtype(precision))
    try:
        with FakeTensorMode(), as_on_gpu() if device == "cuda" else nullcontext():
            whole = Model(config)
            u = torch.empty(1, seq_len, config.width, requires_grad=True)
            batch = BatchContext(torch.arange(seq_len).unsqueeze(0), embeddings=u)
            for layer, block in zip(sorts, whole.typed_blocks(), strict=True):
                shared = whole.shared_block(layer)
                forward, backward = _record(lambda b=block, s=shared: b(u, batch, None, s), seq_len)
                found.append(
                    LayerTrace(
                        name=str(layer) + (f"/{layer.mlp}" if layer.mlp else ""),
                        layer=asdict(layer),
                        forward=forward,
                        backward=backward,
                        stream=u.nbytes,
                        calls=len(layer.branches) + (layer.shared is not None),
                    )
                )
            targets = torch.zeros(1, seq_len, dtype=torch.int64)
            weights = torch.ones(1, seq_len, dtype=torch.float32)

            def loss() -> Any:
                return whole.unembed.loss(whole.norm(u), targets, weights, 0.0, whole.axes.tensor)

            forward, backward = _record(loss, seq_len)
    finally:
        torch.set_default_dtype(standard)
    head = LayerTrace("head", {}, forward, backward, u.nbytes, 1)
    return ModelTrace(seq_len, config.width, layers, tuple(found), head)


def _record(run: Any, seq_len: int) -> tuple[tuple[Work, ...], tuple[Work, ...]]:
    """Return the operations of a computation's forward and backward pass."""
    import torch

    from .recorder import Recorder

    with Recorder(seq_len) as forward:
        outputs = run()
    wanted = [each for each in outputs if each.requires_grad]
    with Recorder(seq_len) as backward:
        torch.autograd.backward(wanted, [torch.ones_like(each) for each in wanted])
    return counted(forward.work), counted(backward.work)
