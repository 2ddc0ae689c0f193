"""Passes and parameter shards of another program's modules, for the memory accounting.

The modules run on fake tensors, as layers of our models do (models/accounting/). They count as the
layers `blocks.0`, `blocks.1`, … of a model without embedding and head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from ...models.accounting.extrapolate import fit_passes
from ...models.accounting.fake.linear import linear_layers
from ...models.accounting.fake.trace import fake_tensors, new_mode, trace
from ...models.accounting.passes import choose_traced_rows, rename_gradients
from ...models.accounting.pieces import ModelPasses, Passes
from ...models.accounting.state import Shards
from ...models.config.options.names import LinearForm
from ...models.config.options.precision import Precision
from ...models.config.options.recompute import Rule, Selective
from ...models.config.precision import compute_dtype
from ...models.layers.recompute import Recomputable
from ...models.parallel.local_shard import LocalShard
from ...trainer.accounting.parameters import parameter_state
from ...trainer.accounting.state import ParameterState
from ...trainer.run.config import RunConfig
from ..grid.split import Split
from ..memory.footprints import Traces
from ..memory.parts import PartTable
from ..traces.trace import ModelTrace
from .load import build_modules
from .model import ModuleKind, ModuleModel

NO_PASSES = Passes((), ())
"""Passes of embedding and head. Where another program has them, they are among its modules."""


class ModuleParts:
    """`ModelParts` of another program's modules."""

    def __init__(self, model: ModuleModel, trace: ModelTrace, precision: Precision) -> None:
        self.model, self.trace, self.precision = model, trace, precision
        self._passes: dict[tuple[int, int, Rule, LinearForm], Passes] = {}
        """By kind, rows, rule and the engine's linear function."""

    @cached_property
    def _modules(self) -> FakeModules:
        return FakeModules(self.model.module, self.precision)

    def traces(self, split: Split, ep: int, linear: LinearForm) -> Traces:
        return ModuleTraces(self.model, split.rows, partial(self._trace_passes, linear))

    def _trace_passes(self, linear: LinearForm, layer: int, rows: int, rule: Rule) -> Passes:
        key = self.model.layers[layer], rows, rule, linear
        if key not in self._passes:
            with linear_layers(linear):
                self._passes[key] = self._modules.trace_passes(layer, rows, rule)
        return self._passes[key]

    def input_bytes(self, split: Split) -> int:
        return split.rows * self.trace.kinds[self.model.layers[0]].stream

    def stream_bytes(self, split: Split) -> int:
        return split.rows * self.trace.head.stream

    def parameters(self, run: RunConfig, *, by_kind: bool) -> ParameterState:
        kinds = self.model.kinds if by_kind else self.model.layer_kinds
        parameters: Any = _NamedParameters(_merge(_shards_by_layer(kinds)))
        return parameter_state(run, parameters, self.precision)

    def shards_by_part(self, pp: int, tp: int, ep: int) -> PartTable[Shards]:
        return PartTable(_shards_by_layer(self.model.kinds), {}, {}, {})

    def shards(self, tp: int, ep: int) -> Shards:
        return _merge(_shards_by_layer(self.model.layer_kinds))

    def users(self, chunks: Sequence[range]) -> Mapping[str, set[int]]:
        return {}


def _shards_by_layer(kinds: Sequence[ModuleKind]) -> list[Shards]:
    """Return the parameters of a layer of each kind, whole: no tensor or expert ranks cut them."""
    return [
        {f"blocks.{number}.{name}": LocalShard(shape) for name, shape in kind.parameters}
        for number, kind in enumerate(kinds)
    ]


def _merge(layers: Sequence[Shards]) -> Shards:
    return {name: shard for shards in layers for name, shard in shards.items()}


class ModuleTraces:
    """`Traces` of modules for micro-batches of `rows` rows: traced, or extrapolated from fewer."""

    def __init__(
        self, model: ModuleModel, rows: int, trace_passes: Callable[[int, int, Rule], Passes]
    ) -> None:
        self.model, self.rows, self.trace_passes = model, rows, trace_passes

    def first(self) -> Passes:
        return NO_PASSES

    def last(self) -> Passes:
        return NO_PASSES

    def layer(self, number: int, rule: Rule) -> Passes:
        row_counts = choose_traced_rows(self.rows)
        samples = [self.trace_passes(number, rows, rule) for rows in row_counts]
        return fit_passes(row_counts, samples, self.rows)

    def trace_model(self, rules: Sequence[Rule]) -> ModelPasses:
        layers = [
            rename_gradients(self.layer(number, rule), {"": f"blocks.{number}."})
            for number, rule in enumerate(rules)
        ]
        names = [kind.name for kind in self.model.layer_kinds]
        return ModelPasses(NO_PASSES, layers, NO_PASSES, names)


class _RecomputableModule(Recomputable):
    """A module whose call may be recomputed."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, u: Tensor) -> Tensor:
        y: Tensor = self.module(u)
        return y


class FakeModules:
    """Modules with fake weights, ready to be traced."""

    def __init__(self, name: str, precision: Precision) -> None:
        """`name` is package:function."""
        self.mode, self.dtype = new_mode(), compute_dtype(precision)
        modules, first_input = build_modules(name, self.dtype)
        self.modules = [_RecomputableModule(module) for module in modules]
        self.inputs: list[tuple[torch.Size, torch.dtype]] = []
        """Shape and dtype of each module's input for one row."""
        with fake_tensors(self.dtype, self.mode):
            row = torch.empty_like(first_input, device="cpu")
            for module in self.modules:
                module.to_empty(device="cpu")
                self.inputs.append((row.shape, row.dtype))
                row = module(row).detach()

    def trace_passes(self, layer: int, rows: int, rule: Rule) -> Passes:
        module = self.modules[layer]
        (row_size, *shape), dtype = self.inputs[layer]
        module.recompute = rule != "none"
        module.saved = rule if isinstance(rule, Selective) else None
        leaves = dict(module.module.named_parameters())
        make_input = partial(torch.zeros, rows * row_size, *shape, dtype=dtype)
        with fake_tensors(self.dtype, self.mode):
            return trace(module, make_input, leaves)


class _NamedParameters(nn.Module):
    """Parameters on the meta device, in place of a model: `parameter_state` and optimizers ask for
    their names and shapes."""

    def __init__(self, shards: Shards) -> None:
        super().__init__()
        self.shapes = {name: shard.shape for name, shard in shards.items()}

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for name, shape in self.shapes.items():
            yield name, nn.Parameter(torch.empty(shape, device="meta"))

    def full_precision(self, precision: Precision) -> tuple[str, ...]:
        return ()
