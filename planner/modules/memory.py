"""Memory of modules that are not ours: traces of their passes, shards of their parameters."""

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
from ..memory.rank_memory import KindShards
from ..traces.trace import ModelTrace
from .load import build
from .model import ModuleModel

NOTHING = Passes((), ())
"""Embedding and loss are modules like the others."""


class ModuleParts:
    """Modules that data-parallel ranks and stages share."""

    def __init__(self, modules: ModuleModel, traced: ModelTrace, precision: Precision) -> None:
        self.modules, self.traced, self.precision = modules, traced, precision
        self._known: dict[tuple[int, int, Rule, LinearForm], Passes] = {}

    @cached_property
    def _built(self) -> Built:
        return Built(self.modules.module, self.precision)

    def traces(self, split: Split, ep: int, linear: LinearForm) -> Traces:
        return ModuleTraces(self.modules, split.rows, partial(self._traced, linear))

    def _traced(self, linear: LinearForm, number: int, rows: int, rule: Rule) -> Passes:
        key = self.modules.layers[number], rows, rule, linear
        if key not in self._known:
            with linear_layers(linear):
                self._known[key] = self._built.trace(number, rows, rule)
        return self._known[key]

    def inputs(self, split: Split) -> int:
        return split.rows * self.traced.kinds[self.modules.layers[0]].stream

    def stream(self, split: Split) -> int:
        return split.rows * self.traced.head.stream

    def parameters(self, run: RunConfig, *, whole: bool) -> ParameterState:
        layers, *_ = self.shards_by_kind(1, 1)
        shards = self.shards(1, 1) if whole else {k: v for each in layers for k, v in each.items()}
        parameters: Any = _Parameters(shards)
        return parameter_state(run, parameters, self.precision)

    def shards_by_kind(self, tp: int, ep: int) -> KindShards:
        return (
            [self._of(number, kind) for number, kind in enumerate(self.modules.kinds)],
            {},
            {},
            {},
        )

    def shards(self, tp: int, ep: int) -> Shards:
        found: dict[str, LocalShard] = {}
        for number, kind in enumerate(self.modules.layers):
            found |= self._of(number, self.modules.kinds[kind])
        return found

    def _of(self, number: int, kind: Any) -> dict[str, LocalShard]:
        return {f"blocks.{number}.{name}": LocalShard(shape) for name, shape in kind.parameters}

    def users(self, chunks: Sequence[range]) -> Mapping[str, set[int]]:
        return {}

    def tied(self, pp: int) -> bool:
        return False


class ModuleTraces:
    """Traced passes of the modules for some rows."""

    def __init__(
        self, modules: ModuleModel, rows: int, traced: Callable[[int, int, Rule], Passes]
    ) -> None:
        self.modules, self.rows, self.traced = modules, rows, traced

    def first(self) -> Passes:
        return NOTHING

    def last(self) -> Passes:
        return NOTHING

    def layer(self, number: int, rule: Rule) -> Passes:
        numbers = choose_traced_rows(self.rows)
        return fit_passes(numbers, [self.traced(number, n, rule) for n in numbers], self.rows)

    def whole(self, rules: Sequence[Rule]) -> ModelPasses:
        layers = [
            rename_gradients(self.layer(number, rule), {"": f"blocks.{number}."})
            for number, rule in enumerate(rules)
        ]
        names = [self.modules.kinds[kind].name for kind in self.modules.layers]
        return ModelPasses(NOTHING, layers, NOTHING, names)


class _Module(Recomputable):
    """A module that may be recomputed."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, u: Tensor) -> Tensor:
        found: Tensor = self.module(u)
        return found


class Built:
    """The modules, as fake tensors."""

    def __init__(self, name: str, precision: Precision) -> None:
        self.mode, self.compute = new_mode(), compute_dtype(precision)
        modules, given = build(name, compute_dtype(precision))
        self.modules = [_Module(module) for module in modules]
        self.inputs: list[tuple[tuple[int, ...], torch.dtype]] = []
        with fake_tensors(self.compute, self.mode):
            row = torch.empty_like(given, device="cpu")
            for module in self.modules:
                module.to_empty(device="cpu")
                self.inputs.append((tuple(row.shape), row.dtype))
                row = module(row).detach()

    def trace(self, number: int, rows: int, rule: Rule) -> Passes:
        module = self.modules[number]
        (one, *rest), dtype = self.inputs[number]
        module.recompute = rule != "none"
        module.saved = rule if isinstance(rule, Selective) else None
        leaves = dict(module.module.named_parameters())
        with fake_tensors(self.compute, self.mode):
            return trace(module, partial(torch.zeros, rows * one, *rest, dtype=dtype), leaves)


class _Parameters(nn.Module):
    """Parameters by name, for the state of an engine."""

    def __init__(self, shards: Shards) -> None:
        super().__init__()
        self.shapes = {name: each.shape for name, each in shards.items()}

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for name, shape in self.shapes.items():
            yield name, nn.Parameter(torch.empty(shape, device="meta"))

    def full_precision(self, precision: Precision) -> tuple[str, ...]:
        return ()
