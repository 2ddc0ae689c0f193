"""Trace of a sequence of modules: operations and parameters of each kind, for one row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ...console.errors import PlanError
from ...models.config.options.precision import Precision
from ...models.config.precision import compute_dtype
from ..traces.recorder import Recorder
from ..traces.trace import LayerTrace, ModelTrace
from ..traces.work import Work, counted
from .load import build
from .model import ModuleKind, ModuleModel, Traced

CAUSAL = {"forward": 4, "backward": 7}
"""Place of `is_causal` among the arguments of torch's attention."""


def trace_modules(name: str, precision: Precision) -> Traced:
    """Trace the modules of `package:function`. Nothing is allocated."""
    known: dict[ModuleKind, LayerTrace] = {}
    layers: list[ModuleKind] = []
    built, given = build(name, compute_dtype(precision))
    standard = torch.get_default_dtype()
    torch.set_default_dtype(compute_dtype(precision))
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            row = torch.empty_like(given, device="cpu")
            for number, module in enumerate(built):
                parameters = tuple((key, tuple(p.shape)) for key, p in module.named_parameters())
                class_name, shape = type(module).__name__, tuple(row.shape)
                kind = ModuleKind(f"{class_name} {shape}", repr(module), parameters, shape)
                layers.append(kind)
                try:
                    module.to_empty(device="cpu")
                    if kind not in known:
                        known[kind] = _layer(kind.name, module, row, first=not number)
                    row = _result(module, row).detach()
                except Exception as error:
                    raise PlanError(
                        f"--module {name}: module {number} ({class_name}) fails on an input of "
                        f"{shape}: {error}",
                        hint="each module maps the result of the one before it, one tensor to one "
                        "tensor, without reading values",
                    ) from error
    finally:
        torch.set_default_dtype(standard)
    kinds = list(known)
    numbers = tuple(map(kinds.index, layers))
    stream = max(trace.stream for trace in known.values())
    end = LayerTrace("end", {}, (), (), stream, 1)
    trace = ModelTrace(1, 1, numbers, tuple(known.values()), end)
    return Traced(ModuleModel(name, tuple(kinds), numbers), trace)


def _result(module: nn.Module, row: Tensor) -> Tensor:
    found = module(row)
    if not isinstance(found, Tensor):
        raise TypeError(f"the result is {type(found).__name__}, not a tensor")
    return found


def _layer(name: str, module: nn.Module, row: Tensor, first: bool) -> LayerTrace:
    """Trace a module; its input needs a gradient unless it is the first."""
    needs = row.is_floating_point() and not first
    given = torch.empty(row.shape, dtype=row.dtype, requires_grad=needs)
    with ModuleRecorder() as forward:
        result = _result(module, given)
    with ModuleRecorder() as backward:
        if result.requires_grad:
            torch.autograd.backward([result], [torch.ones_like(result)])
    return LayerTrace(
        name=name,
        layer={"shared": None},
        forward=counted(forward.work),
        backward=counted(backward.work),
        stream=row.nbytes,
        calls=1,
    )


class ModuleRecorder(Recorder):
    """Records convolutions as the matrix products that they are, and attention over all pairs."""

    def __init__(self) -> None:
        super().__init__(seq_len=1)

    def __torch_dispatch__(
        self, operation: Any, types: Any, inputs: Any = (), options: Any = None
    ) -> Any:
        name = operation._schema.name
        if name not in ("aten::convolution", "aten::convolution_backward"):
            return super().__torch_dispatch__(operation, types, inputs, options)
        result = operation(*inputs, **(options or {}))
        if name.endswith("backward"):
            gradient, row, weight, *_ = inputs
            *_, transposed, _, groups, wanted = inputs
            for _ in range(sum(wanted[:2])):  # gradients of the input and of the weight
                self._convolution(row, weight, gradient, transposed, groups)
        else:
            row, weight, *_ = inputs
            *_, transposed, _, groups = inputs
            self._convolution(row, weight, result, transposed, groups)
        return result

    def _convolution(
        self, row: Tensor, weight: Tensor, result: Tensor, transposed: bool, groups: int
    ) -> None:
        """Record the product [positions, inputs × taps] × [inputs × taps, outputs] of a group."""
        many = row if transposed else result
        shape = (groups, many.numel() // many.shape[1], weight[0].numel(), len(weight) // groups)
        moved = row.nbytes + weight.nbytes + result.nbytes
        self.work.append(Work("matmul", "", shape, 1, moved, "convolution"))

    def _attention(self, name: str, inputs: Any, moved: int, saved: str) -> None:
        super()._attention(name, inputs, moved, saved)
        place = CAUSAL["backward" if "backward" in name else "forward"]
        if not (len(inputs) > place and inputs[place] is True):
            # Rates of attention count the pairs below the diagonal; here are all.
            self.work[-1] = replace(self.work[-1], count=2 * self.work[-1].count)
