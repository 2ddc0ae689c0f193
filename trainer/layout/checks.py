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

SHOWN = 4


def check(
    layout: LayoutConfig,
    processes: int,
    model: ModelConfig,
    lengths: Sequence[int],
    works: Callable[[LayoutConfig], bool] = lambda layout: True,
) -> None:
    """Raise unless the layout fits; `lengths` are the sequence lengths of all phases. The error
    names only layouts of which `works` is true."""
    reasons = list(problems(layout, processes, model, lengths))
    if not reasons:
        return
    others = layouts(layout, processes)
    others.sort(key=lambda other: (_changes(layout, other), -other.tp, -other.pp, -other.ep))
    fitting = (
        _words(other)
        for other in others
        if works(other) and not any(problems(other, processes, model, lengths))
    )
    shown = list(islice(dict.fromkeys(fitting), SHOWN))
    raise LayoutError(
        f"{_words(layout)} does not shard this model and its rows",
        where="\n" + "\n".join(f"    {line}" for line in reasons),
        hint=f"layouts that work on {processes} rank{'s' * (processes > 1)}: {'; '.join(shown)}"
        if shown
        else f"no layout of {processes} ranks works with this engine and batch: change one of them",
    )


def problems(
    layout: LayoutConfig, processes: int, model: ModelConfig, lengths: Sequence[int]
) -> Iterator[str]:
    """Yield each reason why the layout does not fit."""
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
        heads = options.attention_heads
        if layout.attention == "a2a" and heads and heads % tp == 0 and heads % (tp * cp):
            yield (
                f"operators.{name}: tp={tp} × cp={cp} does not divide its {heads} heads, as "
                "layout.attention=a2a requires (ring does not)"
            )
    if model.vocab_size < tp:
        yield f"vocab_size: {model.vocab_size} ids are fewer than tp={tp} ranks"
    for length in sorted(set(lengths)):
        if length % (tp * cp):
            yield f"rows of {length:,} tokens do not divide by tp × cp = {tp * cp}"


def layouts(layout: LayoutConfig, processes: int) -> list[LayoutConfig]:
    """Return all layouts of so many ranks, with the cuts and the schedule if they still apply."""
    degrees = [n for n in range(1, processes + 1) if processes % n == 0]
    return [
        replace(each, tp=tp, cp=cp, ep=ep)
        for pp in degrees
        for each in _with_stages(layout, pp)
        for tp in degrees
        for cp in degrees
        for ep in degrees
        if processes % (pp * tp * cp) == 0
    ]


def _with_stages(layout: LayoutConfig, pp: int) -> list[LayoutConfig]:
    schedule = PLAIN if layout.pipeline_schedule.has_chunks else layout.pipeline_schedule
    uncut = replace(layout, pp=pp, cuts=None, chunks=1, schedule=schedule.name)
    return [layout, replace(layout, cuts=None), uncut] if pp == layout.pp else [uncut]


def _changes(layout: LayoutConfig, other: LayoutConfig) -> int:
    """Count the settings in which another layout differs."""
    names = ("pp", "chunks", "cuts", "tp", "cp", "ep")
    return sum(getattr(layout, name) != getattr(other, name) for name in names)


def _words(layout: LayoutConfig) -> str:
    """Return the layout as overrides of a command line; stages and experts only
    where there are several."""
    words: dict[str, object] = {"tp": layout.tp, "cp": layout.cp}
    if layout.ep > 1:
        words |= {"ep": layout.ep}
    if layout.pp > 1:
        words = {"pp": layout.pp, **words}
    if layout.chunks > 1:
        words |= {"schedule": layout.schedule, "chunks": layout.chunks}
    if layout.cuts:
        words |= {"cuts": str(list(layout.cuts)).replace(" ", "")}
    return " ".join(f"layout.{name}={value}" for name, value in words.items())
