"""A model's calls to fused kernels and to attention: widths, dtypes and options.

The model runs on fake tensors, with a single layer for each kind: this needs no GPU and no memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..accounting.count import build_meta
from ..accounting.fake.model import FakeModel
from ..accounting.layer_kinds import reduce_to_kinds
from ..accounting.shape import Shape
from ..accounting.stored import load_or_compute
from ..config.config import ModelConfig
from ..config.options.precision import Precision
from ..config.precision import compute_dtype
from ..kernels import choice
from ..layers.attention.limits import AttentionCall
from ..operators.base import Operator

NAMESPACE = "headrace"


@dataclass(frozen=True)
class Call:
    """A call to an op, in JSON's values."""

    op: str
    shapes: Mapping[str, Sequence[int]]
    """Tensor shapes by argument."""
    dtypes: Mapping[str, str]
    options: Mapping[str, Any]
    """Arguments that are not tensors."""

    def __contains__(self, argument: str) -> bool:
        """Return True if this argument is a tensor."""
        return argument in self.shapes

    def width(self, argument: str) -> int:
        return self.shapes[argument][-1]

    def dtype(self, argument: str) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtypes[argument])
        return dtype

    def named_dtypes(self, **arguments: str) -> dict[str, torch.dtype]:
        """Return dtypes by new name, for arguments that are tensors."""
        return {name: self.dtype(arg) for name, arg in arguments.items() if arg in self}


def model_calls(config: ModelConfig, shape: Shape, z_loss: float = 0.0) -> list[Call]:
    """Return the distinct calls in a rank's forward pass."""
    return load_or_compute(
        f"kernel calls {config!r} {shape!r} {z_loss} {choice.FAULTY}",
        lambda: trace_calls(config, shape, z_loss),
        pack=lambda calls: [asdict(call) for call in calls],
        unpack=lambda packed: [Call(**call) for call in packed],
    )


def trace_calls(config: ModelConfig, shape: Shape, z_loss: float = 0.0) -> list[Call]:
    """Trace the calls, without the cache and without kernels that have failed. Raise if the model
    names such a kernel."""
    # Whether a product is in FP8 depends on the layer's number.
    traced = reduce_to_kinds(config) if shape.precision.fp8 is None else config
    recorder = CallRecorder()
    FakeModel(traced, shape).forward(recorder, z_loss)
    return recorder.calls


def attention_calls(config: ModelConfig, precision: Precision) -> list[AttentionCall]:
    """Return the model's distinct calls of attention, with the heads of all tensor-parallel
    ranks."""
    dtype = compute_dtype(precision)
    calls = [
        module.attention_call(dtype)
        for module in build_meta(reduce_to_kinds(config)).modules()
        if isinstance(module, Operator)
    ]
    return list(dict.fromkeys(call for call in calls if call is not None))


class CallRecorder(TorchDispatchMode):
    """Records distinct calls to headrace's ops."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []

    def __torch_dispatch__(
        self, operation: Any, types: Any, inputs: Any = (), options: Any = None
    ) -> Any:
        if operation.namespace == NAMESPACE:
            call = _describe(operation, inputs, options or {})
            if call not in self.calls:
                self.calls.append(call)
        return operation(*inputs, **(options or {}))


def _describe(operation: Any, inputs: Sequence[Any], options: Mapping[str, Any]) -> Call:
    names = [argument.name for argument in operation._schema.arguments]
    arguments = {**dict(zip(names, inputs, strict=False)), **options}
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    return Call(
        operation._schema.name.partition("::")[2],
        {name: list(tensor.shape) for name, tensor in tensors.items()},
        {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()},
        {name: value for name, value in arguments.items() if name not in tensors},
    )
