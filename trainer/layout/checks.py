"""Check before the start that a layout shards the ranks, the model and its rows evenly.

all     pp × tp × cp must divide the ranks
pp      must leave each chunk a layer; the layers of `cuts` must exist
tp      must divide each operator's heads or channels, and with cp the tokens of a row
cp      must divide the tokens of a row, and for attention=a2a the heads that tp leaves
ep      must be a multiple of tp, and divide the ranks and the experts of each operator
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from ...console.errors import LayoutError
from ...models.config.config import ModelConfig
from .config import LayoutConfig
from .schedules import PLAIN
from .stages import too_many_chunks

MAX_SHOWN = 4


def check(
    layout: LayoutConfig,
    processes: int,
    model: ModelConfig,
    lengths: Sequence[int],
    is_supported: Callable[[LayoutConfig], bool] = lambda layout: True,
) -> None:
    """Raise LayoutError if the layout does not fit the model or the phases' sequence `lengths`. The
    error names layouts that fit and that `is_supported` accepts."""
    reasons = list(problems(layout, processes, model, lengths))
    if not reasons:
        return
    candidates = list_layouts(layout, processes)
    candidates.sort(key=lambda c: (_count_changes(layout, c), -c.tp, -c.pp, -c.ep))
    fitting = (
        _overrides(candidate)
        for candidate in candidates
        if is_supported(candidate) and not any(problems(candidate, processes, model, lengths))
    )
    shown = list(islice(dict.fromkeys(fitting), MAX_SHOWN))
    raise LayoutError(
        f"{_overrides(layout)} does not shard this model and its rows",
        where="\n" + "\n".join(f"    {line}" for line in reasons),
        hint=f"layouts that work on {processes} rank{'s' * (processes > 1)}: {'; '.join(shown)}"
        if shown
        else f"no layout of {processes} ranks works with this engine and batch: change one of them",
    )


def problems(
    layout: LayoutConfig, processes: int, model: ModelConfig, lengths: Sequence[int]
) -> Iterator[str]:
    """Yield the reasons why the layout does not fit."""
    tp, cp = layout.tp, layout.cp
    if processes % layout.shards:
        yield (
            f"pp × tp × cp = {layout.shards} does not divide {processes} "
            f"process{'es' * (processes > 1)}"
        )
    else:
        yield from model.ep_problems(layout.ep, tp, processes // layout.pp)
    if layout.all_chunks > len(model.layers):
        yield too_many_chunks(layout, model)
    if layout.cuts and layout.cuts[-1] >= len(model.layers):
        yield f"cuts: there is no layer {layout.cuts[-1]}; the last is {len(model.layers) - 1}"
    yield from model.tp_problems(tp)
    for name, options in model.operators.items():
        for key, form, heads, divisible in (
            ("attention", layout.attention, options.attention_heads, "ring"),
            ("delta", layout.delta, options.state_heads, "states"),
        ):
            if form == "a2a" and heads and heads % tp == 0 and heads % (tp * cp):
                yield (
                    f"operators.{name}: tp={tp} × cp={cp} does not divide its {heads} heads, as "
                    f"layout.{key}=a2a requires ({divisible} does not)"
                )
    if model.vocab_size < tp:
        yield f"vocab_size: {model.vocab_size} ids are fewer than tp={tp} ranks"
    for length in sorted(set(lengths)):
        if length % (tp * cp):
            yield f"rows of {length:,} tokens do not divide by tp × cp = {tp * cp}"


def list_layouts(layout: LayoutConfig, processes: int) -> list[LayoutConfig]:
    """List the layouts for so many ranks. They keep cuts and schedule where these still apply."""
    degrees = [n for n in range(1, processes + 1) if processes % n == 0]
    return [
        replace(staged, tp=tp, cp=cp, ep=ep)
        for pp in degrees
        for staged in _with_stages(layout, pp)
        for tp in degrees
        for cp in degrees
        for ep in degrees
        if processes % (pp * tp * cp) == 0
    ]


def _with_stages(layout: LayoutConfig, pp: int) -> list[LayoutConfig]:
    schedule = PLAIN if layout.pipeline_schedule.has_chunks else layout.pipeline_schedule
    uncut = replace(layout, pp=pp, cuts=None, chunks=1, schedule=schedule.name)
    return [layout, replace(layout, cuts=None), uncut] if pp == layout.pp else [uncut]


def _count_changes(layout: LayoutConfig, candidate: LayoutConfig) -> int:
    keys = ("pp", "chunks", "cuts", "tp", "cp", "ep")
    return sum(getattr(layout, key) != getattr(candidate, key) for key in keys)


def _overrides(layout: LayoutConfig) -> str:
    """Format the layout as command-line overrides."""
    settings: dict[str, object] = {"tp": layout.tp, "cp": layout.cp}
    if layout.ep > 1:
        settings |= {"ep": layout.ep}
    if layout.pp > 1:
        settings = {"pp": layout.pp, **settings}
    if layout.chunks > 1:
        settings |= {"schedule": layout.schedule, "chunks": layout.chunks}
    if layout.cuts:
        settings |= {"cuts": str(list(layout.cuts)).replace(" ", "")}
    return " ".join(f"layout.{key}={value}" for key, value in settings.items())
