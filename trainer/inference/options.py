"""Options that `trainer variants` and `trainer embed` share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from ...console import command
from ..placement.options import Decorator, PlacementOptions, list_options
from ..scores.commands import batch_option
from ..weights.commands import data_option, ema_option, step_option

if TYPE_CHECKING:
    from ...dataplane.tokenizers import Tokenizer
    from ..placement.placement import Placement
    from ..weights.source import WeightSource

OPTIONS: tuple[Decorator, ...] = (
    *list_options(shares_rows=True, precision="the run's"),
    batch_option,
    step_option,
    ema_option,
    data_option,
    click.option(
        "--dry-run", is_flag=True, help="Read the input and print the memory; compute nothing."
    ),
    command.json_option,
)


@dataclass(frozen=True)
class RowOptions:
    """The values of these options."""

    placement: PlacementOptions
    batch_tokens: int
    step: int | None
    ema: bool
    data: str | None
    dry_run: bool
    as_json: bool

    def find_model(self, source: str) -> tuple[WeightSource, Tokenizer, Placement]:
        """Return the weights, the tokenizer of their data, and where the weights lie."""
        from ..weights import source as sources
        from ..weights.sample import check_vocabulary
        from ..weights.tokenizer import find_tokenizer

        weights = sources.find(source, self.step, average=self.ema)
        tokenizer = find_tokenizer(weights, self.data)
        check_vocabulary(tokenizer, weights.model)
        return weights, tokenizer, self.placement.place(weights, as_trained=True)


def row_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options to a command, which gets their values as `options`."""

    @functools.wraps(function)
    def collect(**values: Any) -> None:
        values["placement"] = PlacementOptions.take(values)
        shared = {name: values.pop(name) for name in RowOptions.__annotations__}
        function(**values, options=RowOptions(**shared))

    for option in reversed(OPTIONS):
        option(collect)
    return collect
