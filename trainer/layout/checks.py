"""Whether a model and its rows can be divided as a layout says. It is said before anything starts.

tp      must divide each operator's heads or channels; with cp, also what is left of a row
cp      must divide rows, and for attention by a2a the heads that tp leaves
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ...console.errors import LayoutError
from ...models.config import ModelConfig
from .config import LayoutConfig

SHOWN = 4


def check(layout: LayoutConfig, processes: int, model: ModelConfig, lengths: Sequence[int]) -> None:
    """`lengths` are those of the rows, of all phases."""
    wrong = list(problems(layout, model, lengths))
    if not wrong:
        return
    others = [
        other for other in layouts(layout, processes) if not any(problems(other, model, lengths))
    ]
    others.sort(key=lambda other: ((other.tp != layout.tp) + (other.cp != layout.cp), -other.tp))
    shown = "; ".join(f"layout.tp={other.tp} layout.cp={other.cp}" for other in others[:SHOWN])
    raise LayoutError(
        f"layout.tp={layout.tp} and layout.cp={layout.cp} do not divide this model and its rows",
        where="\n" + "\n".join(f"    {line}" for line in wrong),
        hint=f"on {processes} processes these would work: {shown}",
    )


def problems(layout: LayoutConfig, model: ModelConfig, lengths: Sequence[int]) -> Iterator[str]:
    tp, cp = layout.tp, layout.cp
    yield from model.undivided(tp)
    for name, options in model.operators.items():
        heads = options.attention_heads
        if layout.attention == "a2a" and heads and heads % tp == 0 and heads % (tp * cp):
            yield (
                f"operators.{name}: tp={tp} × cp={cp} does not divide its {heads} heads, as "
                "layout.attention=a2a must (ring need not)"
            )
    if model.vocab_size < tp:
        yield f"vocab_size: there are {model.vocab_size} ids for tp={tp} processes"
    for length in sorted(set(lengths)):
        if length % (tp * cp):
            yield f"rows of {length:,} tokens cannot be cut into tp × cp = {tp * cp} equal parts"


def layouts(layout: LayoutConfig, processes: int) -> list[LayoutConfig]:
    """All ways to divide a model among so many processes."""
    degrees = [n for n in range(1, processes + 1) if processes % n == 0]
    return [
        replace(layout, tp=tp, cp=cp)
        for tp in degrees
        for cp in degrees
        if processes % (tp * cp) == 0
    ]
