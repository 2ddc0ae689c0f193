"""Enumeration of the layouts that `trainer run` can execute on a number of devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, get_args

from ...console.errors import LayoutError
from ...models.accounting.state import Degrees
from ...models.config.options.names import (
    AttentionForm,
    DeltaForm,
    LongFilterForm,
    RowForms,
)
from ...models.config.options.precision import Precision
from ...trainer.engines import ENGINES
from ...trainer.engines.config import EngineConfig
from ...trainer.layout.checks import problems
from ...trainer.layout.config import LayoutConfig
from ...trainer.layout.schedules import SCHEDULES
from ...trainer.loop.batches import micro_batches, micro_rows
from .split import Split

if TYPE_CHECKING:
    from ...dataplane.order.timeline import PhaseRows
    from ...models.config.config import ModelConfig


@dataclass(frozen=True)
class LayoutShape:
    """How ranks share layers, rows and micro-batches."""

    layout: LayoutConfig
    """Without schedule and chunks, which a `Grid` adds."""
    dp: int
    rows: int
    """Rows per micro-batch."""
    micro_batches: int

    @property
    def split(self) -> Split:
        layout = self.layout
        return Split(self.rows, layout.tp, layout.cp, **layout.row_forms)


@dataclass(frozen=True)
class Grid:
    """A layout without cuts and without choices for single layers."""

    shape: LayoutShape
    engine: EngineConfig
    layout: LayoutConfig

    @property
    def degrees(self) -> Degrees:
        layout = self.layout
        return Degrees(dp=self.shape.dp, tp=layout.tp, cp=layout.cp, ep=layout.ep)

    @property
    def has_early_gradients(self) -> bool:
        """True if gradients exist while micro-batches are in flight."""
        layout, micro_batches = self.layout, self.shape.micro_batches
        schedule = layout.pipeline_schedule
        return micro_batches > schedule.warm_up(layout.pp, layout.chunks, micro_batches)

    @property
    def _engine_for_ranks(self) -> EngineConfig:
        return self.engine.for_ranks(self.shape.dp * self.layout.cp)

    def settings(self) -> dict[str, Any]:
        """Return all settings by name, for people and for `--explain`."""
        layout, engine = self.layout, self._engine_for_ranks
        settings: dict[str, Any] = {
            "pp": layout.pp,
            "dp": self.shape.dp,
            "cp": layout.cp,
            "tp": layout.tp,
            "ep": layout.ep,
            "rows": self.shape.rows,
            "micro": self.shape.micro_batches,
            "schedule": layout.schedule,
            "chunks": layout.chunks,
            **layout.row_forms,
            "engine": self.engine.kind,
        }
        return {**settings, **engine.choices(layout)}

    def name(self) -> str:
        """Return one line with the settings in which layouts differ most."""
        layout = self.layout
        axes = {"pp": layout.pp, "dp": self.shape.dp, "cp": layout.cp, "tp": layout.tp}
        axes["ep"] = layout.ep
        degrees = [f"{name} {size}" for name, size in axes.items() if size > 1 or name == "dp"]
        return f"{' × '.join(degrees)}, {self.describe_variant()}"

    def describe_variant(self) -> str:
        """Return rows, engine, schedule and form: all but the degrees."""
        layout = self.layout
        details = [self._engine_for_ranks.describe_with_layout(layout)]
        if layout.pp > 1:
            chunks = f" × {layout.chunks}" if layout.chunks > 1 else ""
            details.append(f"{layout.schedule}{chunks}")
        if layout.cp > 1 and layout.attention != "a2a":
            details.append(layout.attention)
        batch = f"{self.shape.micro_batches} × {self.shape.rows} rows"
        return ", ".join([batch, *details])


def distinct_names(grids: Sequence[Grid]) -> list[str]:
    """Name grids. Equal names are followed by the settings that differ."""
    namesakes: dict[str, list[dict[str, Any]]] = {}
    for grid in grids:
        namesakes.setdefault(grid.name(), []).append(grid.settings())
    names = []
    for grid in grids:
        differences = [
            f"{setting} {value}"
            for setting, value in grid.settings().items()
            if any(namesake.get(setting) != value for namesake in namesakes[grid.name()])
        ]
        names.append(", ".join([grid.name(), *differences]))
    return names


def make_grid(
    layout: LayoutConfig, engine: EngineConfig, tokens: int, gpus: int, phase: PhaseRows
) -> Grid:
    """Return a layout's grid with `tokens` per micro-batch."""
    dp = layout.data_parallel(gpus)
    rows = micro_rows(tokens, phase, dp, layout.cp)
    shape_layout = LayoutConfig(
        pp=layout.pp, tp=layout.tp, cp=layout.cp, ep=layout.ep, **layout.row_forms,
    )  # fmt: skip
    return Grid(LayoutShape(shape_layout, dp, rows, micro_batches(rows, phase, dp)), engine, layout)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def enumerate_shapes(
    model: ModelConfig, gpus: int, per_node: int, phase: PhaseRows
) -> Iterator[tuple[LayoutShape | None, LayoutConfig, list[str]]]:
    """Yield (shape, layout, []) if the layout's checks accept it, else (None, layout, reasons).

    Tensor parallelism stays within a node: its messages cannot hide behind computation.
    """
    for layout in _enumerate_layouts(model, gpus, per_node, phase.seq_len):
        reasons = [
            *problems(layout, gpus, model, [phase.seq_len]),
            *_batch_problems(layout, gpus, phase),
        ]
        if reasons:
            yield None, layout, reasons
        else:
            for shape in _enumerate_batches(layout, gpus, phase):
                yield shape, layout, []


def _enumerate_layouts(
    model: ModelConfig, gpus: int, per_node: int, seq_len: int
) -> Iterator[LayoutConfig]:
    """Yield the layouts whose degrees divide the GPUs, the rows and the experts."""
    experts = max((o.expert_count or 0 for o in model.operators.values()), default=0)
    for pp in _divisors(gpus):
        if pp > len(model.layers):
            break
        for tp in _divisors(gpus // pp):
            if tp > per_node:
                break
            for cp in _divisors(gpus // (pp * tp)):
                if seq_len % (tp * cp):
                    continue
                for ep in _divisors(gpus // pp) if experts else [1]:
                    if ep > 1 and (experts % ep or ep % tp):
                        continue
                    for forms in _row_forms(model, cp):
                        yield LayoutConfig(pp=pp, tp=tp, cp=cp, ep=ep, **forms)


def _batch_problems(layout: LayoutConfig, gpus: int, phase: PhaseRows) -> Iterator[str]:
    """Yield why a data-parallel rank has no row; the start of a run refuses such a layout."""
    dp, rows = layout.data_parallel(gpus), phase.whole.batch_rows
    if rows < dp:
        yield f"a step has {rows} rows, and {dp} data-parallel ranks need one each"


def _row_forms(model: ModelConfig, cp: int) -> Iterator[RowForms]:
    """Yield the ways in which the model's operators can share rows among `cp` ranks."""
    options = model.operators.values()
    attends = cp > 1 and any(operator.attention_heads for operator in options)
    modal = cp > 1 and any(operator.kind == "hyena-li" for operator in options)
    has_states = cp > 1 and any(operator.state_heads for operator in options)
    for attention in get_args(AttentionForm)[: 1 + attends]:
        for hyena_li in get_args(LongFilterForm)[: 1 + modal]:
            for delta in get_args(DeltaForm)[: 1 + has_states]:
                yield {"attention": attention, "hyena_li": hyena_li, "delta": delta}


def _enumerate_batches(layout: LayoutConfig, gpus: int, phase: PhaseRows) -> Iterator[LayoutShape]:
    """Yield a shape for every number of rows per micro-batch that the trainer may choose."""
    dp = layout.data_parallel(gpus)
    whole = phase.whole
    max_rows = -(-whole.batch_rows // dp)
    sizes = {1 << n for n in range(max_rows.bit_length())} | {max_rows}
    possible = {micro_rows(n * whole.seq_len // layout.cp, phase, dp, layout.cp) for n in sizes}
    for rows in sorted(possible):
        yield LayoutShape(layout, dp, rows, micro_batches(rows, phase, dp))


def enumerate_grids(
    shape: LayoutShape,
    model: ModelConfig,
    gpus: int,
    per_node: int,
    precision: Precision,
    *,
    offload: bool = False,
) -> Iterator[Grid]:
    """Yield a shape's grids that the engines' checks accept, with the optimizer on the device or
    (`offload`) in host memory."""
    for grid in enumerate_unchecked_grids(shape, model, per_node):
        if grid.engine.offloads == offload and find_refusal(grid, gpus, precision) is None:
            yield grid


def find_refusal(grid: Grid, gpus: int, precision: Precision) -> str | None:
    """Return why the engine refuses this layout or precision, or None."""
    try:
        grid.engine.check(grid.layout, gpus, precision)
    except LayoutError as error:
        return error.message
    return None


def enumerate_unchecked_grids(
    shape: LayoutShape, model: ModelConfig, per_node: int
) -> Iterator[Grid]:
    """Yield a shape with every schedule and every engine, before the engines' checks."""
    layouts = [shape.layout]
    if shape.layout.pp > 1:
        layouts = [
            replace(shape.layout, schedule=name, chunks=chunks)
            for name, schedule in SCHEDULES.items()
            for chunks in schedule.chunk_counts(shape.layout.pp, len(model.layers))
        ]
    for layout in layouts:
        for engine in enumerate_engines(shape, per_node):
            yield Grid(shape, engine, layout)


def list_settings() -> list[str]:
    """Name all settings of grids, with any engine."""
    layout = LayoutConfig()
    shape = LayoutShape(layout, 2, 1, 1)  # one rank has fewer
    grids = (Grid(shape, engine, layout) for engine in enumerate_engines(shape, 1))
    return list(dict.fromkeys(name for grid in grids for name in grid.settings()))


def enumerate_engines(shape: LayoutShape, per_node: int) -> Iterator[EngineConfig]:
    """Yield all candidate engines, which share their state among all ranks of a stage or within a
    node. Among equally fast engines the first wins: the one that needs fewer packages."""
    ranks, shards = shape.dp * shape.layout.cp, list_shards(shape, per_node)
    for name, kind in sorted(ENGINES.items(), key=lambda item: len(item[1].packages)):
        for shard in shards:
            candidates = _candidates(kind, shard, ranks == 1)
            if shard is None and ranks > 1 and not candidates:
                raise LayoutError(
                    f"the engine `{name}` has no settings that the planner may try",
                    hint="name them in its `candidates`",
                )
            yield from candidates


def list_shards(shape: LayoutShape, per_node: int) -> list[int | None]:
    """Return how many ranks may share a copy of the state: all (None), or those of a node."""
    ranks, node_ranks = shape.dp * shape.layout.cp, max(1, per_node // shape.layout.tp)
    within_node = 1 < node_ranks < ranks and ranks % node_ranks == 0
    return [None, node_ranks] if within_node else [None]


@cache
def _candidates(
    kind: type[EngineConfig], shard: int | None, alone: bool
) -> tuple[EngineConfig, ...]:
    """Return one object per equal engine, because costs are cached by the object; those that
    offload the optimizer come last."""
    candidates = kind.candidates(shard, alone=alone)
    offloading = [engine.offloading() for engine in candidates if not engine.is_special_case]
    return (*candidates, *(engine for engine in offloading if engine is not None))
