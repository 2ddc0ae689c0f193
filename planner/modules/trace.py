"""Trace foreign modules for a single row: parameters and operations by kind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ...console.errors import PlanError
from ...models.config.options.precision import Precision
from ...models.config.precision import compute_dtype
from ..traces.recorder import OperationRecorder
from ..traces.trace import LayerTrace, ModelTrace
from ..traces.work import Work, merge_equal
from .load import build_modules
from .model import ModuleKind, ModuleModel, TracedModules

IS_CAUSAL = {"forward": 4, "backward": 7}
"""Position of `is_causal` in the arguments to torch's attention."""


def trace_modules(name: str, precision: Precision) -> TracedModules:
    """Trace the modules from `package:function`. Nothing is allocated."""
    traces: dict[ModuleKind, LayerTrace] = {}
    layer_kinds: list[ModuleKind] = []
    modules, first_input = build_modules(name, compute_dtype(precision))
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(compute_dtype(precision))
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            row = torch.empty_like(first_input, device="cpu")
            for number, module in enumerate(modules):
                named_parameters = module.named_parameters()
                parameters = tuple((label, tuple(p.shape)) for label, p in named_parameters)
                class_name, shape = type(module).__name__, tuple(row.shape)
                kind = ModuleKind(f"{class_name} {shape}", repr(module), parameters, shape)
                layer_kinds.append(kind)
                try:
                    module.to_empty(device="cpu")
                    if kind not in traces:
                        traces[kind] = _trace_module(kind.name, module, row, is_first=number == 0)
                    row = _run_module(module, row).detach()
                except Exception as error:
                    raise PlanError(
                        f"--module {name}: module {number} ({class_name}) fails on an input of "
                        f"{shape}: {error}",
                        hint="each module maps the result of the one before it, one tensor to one "
                        "tensor, without reading values",
                    ) from error
    finally:
        torch.set_default_dtype(default_dtype)
    kinds = list(traces)
    layers = tuple(map(kinds.index, layer_kinds))
    stream = max(trace.stream for trace in traces.values())
    head = LayerTrace("end", {}, (), (), stream, 1)
    trace = ModelTrace(1, 1, layers, tuple(traces.values()), head)
    return TracedModules(ModuleModel(name, tuple(kinds), layers), trace)


def _run_module(module: nn.Module, row: Tensor) -> Tensor:
    result = module(row)
    if not isinstance(result, Tensor):
        raise TypeError(f"the result is {type(result).__name__}, not a tensor")
    return result


def _trace_module(name: str, module: nn.Module, row: Tensor, is_first: bool) -> LayerTrace:
    """Record both passes. Inputs need gradients, except for the first module's."""
    needs_gradient = row.is_floating_point() and not is_first
    x = torch.empty(row.shape, dtype=row.dtype, requires_grad=needs_gradient)
    with ModuleRecorder() as forward:
        y = _run_module(module, x)
    with ModuleRecorder() as backward:
        if y.requires_grad:
            torch.autograd.backward([y], [torch.ones_like(y)])
    return LayerTrace(
        name=name,
        operators={"shared": None},
        forward=merge_equal(forward.work),
        backward=merge_equal(backward.work),
        stream=row.nbytes,
        calls=1,
    )


class ModuleRecorder(OperationRecorder):
    """Records convolutions as matrix products, and attention over all query-key pairs."""

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
            *_, transposed, _, groups, output_mask = inputs
            for _ in range(sum(output_mask[:2])):  # gradients of the input and of the weight
                self._record_convolution(row, weight, gradient, transposed, groups)
        else:
            row, weight, *_ = inputs
            *_, transposed, _, groups = inputs
            self._record_convolution(row, weight, result, transposed, groups)
        return result

    def _record_convolution(
        self, row: Tensor, weight: Tensor, result: Tensor, transposed: bool, groups: int
    ) -> None:
        """Record a product [positions, inputs · taps] @ [inputs · taps, outputs] per group."""
        larger = row if transposed else result
        positions = larger.numel() // larger.shape[1]
        shape = (groups, positions, weight[0].numel(), len(weight) // groups)
        traffic = row.nbytes + weight.nbytes + result.nbytes
        self.work.append(Work("matmul", "", shape, 1, traffic, "convolution"))

    def _record_attention(self, name: str, inputs: Any, traffic: int, saved: str) -> None:
        super()._record_attention(name, inputs, traffic, saved)
        position = IS_CAUSAL["backward" if "backward" in name else "forward"]
        if not (len(inputs) > position and inputs[position] is True):
            # Attention's rates count the pairs below the diagonal; here all pairs are computed.
            self.work[-1] = replace(self.work[-1], count=2 * self.work[-1].count)
