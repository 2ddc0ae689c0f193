"""Layouts that `trainer run` can execute on a number of devices, as points of a grid."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from ...console.errors import LayoutError
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
class Shape:
    """How the ranks share layers, rows and micro-batches."""

    layout: LayoutConfig
    """Without schedule and chunks, which variants add."""
    dp: int
    rows: int
    """Rows of a micro-batch."""
    micro_batches: int

    @property
    def split(self) -> Split:
        layout = self.layout
        return Split(self.rows, layout.tp, layout.cp, layout.attention, layout.hyena_li)


@dataclass(frozen=True)
class Grid:
    """A layout, but for cuts and the choices of layers."""

    shape: Shape
    engine: EngineConfig
    layout: LayoutConfig

    def words(self) -> dict[str, Any]:
        """Return the settings as words for a person, and for `--explain`."""
        layout, engine = self.layout, self.engine
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
            "attention": layout.attention,
            "hyena_li": layout.hyena_li,
            "engine": engine.kind,
        }
        return {**settings, **engine.choices(layout)}

    def name(self) -> str:
        """Return the settings in which layouts differ most, in one line."""
        layout = self.layout
        axes = [f"pp {layout.pp}", f"dp {self.shape.dp}", f"cp {layout.cp}", f"tp {layout.tp}"]
        axes += [f"ep {layout.ep}"] * (layout.ep > 1)
        details = [self.engine.describe_in(layout)]
        if layout.pp > 1:
            chunks = f" × {layout.chunks}" if layout.chunks > 1 else ""
            details.append(f"{layout.schedule}{chunks}")
        if layout.cp > 1 and layout.attention != "a2a":
            details.append(layout.attention)
        batch = f"{self.shape.micro_batches} × {self.shape.rows} rows"
        return f"{' × '.join(axes)}, {batch}, {', '.join(details)}"


def distinct_names(grids: Sequence[Grid]) -> list[str]:
    """Return the names of grids. Those that are alike are followed by the settings that differ."""
    names = [grid.name() for grid in grids]
    distinct = []
    for grid, name in zip(grids, names, strict=True):
        namesakes = [
            g.words() for g, same_name in zip(grids, names, strict=True) if same_name == name
        ]
        differ = [
            f"{word} {value}"
            for word, value in grid.words().items()
            if any(namesake.get(word) != value for namesake in namesakes)
        ]
        distinct.append(", ".join([name, *differ]))
    return distinct


def make_grid(
    layout: LayoutConfig, engine: EngineConfig, tokens: int, gpus: int, phase: PhaseRows
) -> Grid:
    """Return the grid of a layout with micro-batches of so many tokens."""
    dp = layout.data_parallel(gpus)
    rows = micro_rows(tokens, phase, dp, layout.cp)
    plain = LayoutConfig(
        pp=layout.pp, tp=layout.tp, cp=layout.cp, ep=layout.ep,
        attention=layout.attention, hyena_li=layout.hyena_li,
    )  # fmt: skip
    return Grid(Shape(plain, dp, rows, micro_batches(rows, phase, dp)), engine, layout)


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def shapes(
    model: ModelConfig, gpus: int, per_node: int, phase: PhaseRows
) -> Iterator[tuple[Shape | None, LayoutConfig, list[str]]]:
    """Yield the shapes that the layout's checks accept, and the reasons of those that they refuse.

    Tensor parallelism stays within a node: its messages cannot hide behind computation.
    """
    experts = max((o.expert_count or 0 for o in model.operators.values()), default=0)
    attends = any(options.attention_heads for options in model.operators.values())
    modal = any(options.kind == "hyena-li" for options in model.operators.values())
    for pp in divisors(gpus):
        if pp > len(model.layers):
            break
        for tp in divisors(gpus // pp):
            if tp > per_node:
                break
            for cp in divisors(gpus // (pp * tp)):
                if phase.seq_len % (tp * cp):
                    continue
                for ep in divisors(gpus // pp) if experts else [1]:
                    if ep > 1 and (experts % ep or ep % tp):
                        continue
                    for attention in ("a2a", "ring") if cp > 1 and attends else ("a2a",):
                        for hyena_li in ("states", "a2a") if cp > 1 and modal else ("states",):
                            layout = LayoutConfig(
                                pp=pp, tp=tp, cp=cp, ep=ep, attention=attention, hyena_li=hyena_li
                            )  # fmt: skip
                            reasons = list(problems(layout, gpus, model, [phase.seq_len]))
                            if reasons:
                                yield None, layout, reasons
                            else:
                                for shape in _batches(layout, gpus, phase):
                                    yield shape, layout, []


def _batches(layout: LayoutConfig, gpus: int, phase: PhaseRows) -> Iterator[Shape]:
    """Yield each number of rows of a micro-batch that the trainer would choose."""
    dp = layout.data_parallel(gpus)
    max_rows = -(-phase.batch_rows // dp)
    sizes = {1 << n for n in range(max_rows.bit_length())} | {max_rows}
    possible = {micro_rows(n * phase.seq_len // layout.cp, phase, dp, layout.cp) for n in sizes}
    for rows in sorted(possible):
        yield Shape(layout, dp, rows, micro_batches(rows, phase, dp))


def variants(
    shape: Shape, model: ModelConfig, gpus: int, per_node: int, precision: Precision
) -> Iterator[Grid]:
    """Yield the engines and schedules of a shape that the engines' checks accept."""
    for grid in tried(shape, model, per_node):
        if refusal(grid, gpus, precision) is None:
            yield grid


def refusal(grid: Grid, gpus: int, precision: Precision) -> str | None:
    """Return why the engine does not have this layout or precision; None if it does."""
    try:
        grid.engine.check(grid.layout, gpus, precision)
    except LayoutError as error:
        return error.message
    return None


def tried(shape: Shape, model: ModelConfig, per_node: int) -> Iterator[Grid]:
    """Yield each engine with each schedule of a shape, before the engines' checks."""
    layouts = [shape.layout]
    if shape.layout.pp > 1:
        layouts = [
            replace(shape.layout, schedule=name, chunks=chunks)
            for name, schedule in SCHEDULES.items()
            for chunks in schedule.chunk_counts
            if shape.layout.pp * chunks <= len(model.layers)
        ]
    for layout in layouts:
        for engine in engines(shape, per_node):
            yield Grid(shape, engine, layout)


def settings() -> list[str]:
    """Return the names of the settings that grids have, whatever their engine."""
    layout = LayoutConfig()
    shape = Shape(layout, 1, 1, 1)
    grids = (Grid(shape, engine, layout) for engine in engines(shape, 1))
    return list(dict.fromkeys(name for grid in grids for name in grid.words()))


def engines(shape: Shape, per_node: int) -> Iterator[EngineConfig]:
    """Yield the candidates of all engines: their state is shared among all ranks of a stage, or
    among those of a node. Of engines that are equally fast the first is better: the one that needs
    fewer packages."""
    ranks, layout = shape.dp * shape.layout.cp, shape.layout
    near = max(1, per_node // layout.tp)
    shards = [None, near] if 1 < near < ranks and ranks % near == 0 else [None]
    for name, kind in sorted(ENGINES.items(), key=lambda item: len(item[1].packages)):
        for shard in shards:
            candidates = _candidates(kind, shard)
            if shard is None and not candidates:
                raise LayoutError(
                    f"the engine `{name}` has no settings that the planner may try",
                    hint="name them in its `candidates`",
                )
            yield from candidates


@cache
def _candidates(kind: type[EngineConfig], shard: int | None) -> tuple[EngineConfig, ...]:
    """Equal engines are one object, so that the costs of an engine are found by it."""
    return tuple(kind.candidates(shard))
