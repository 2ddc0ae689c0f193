"""Options that `trainer variants` and `trainer embed` share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from ...console import command
from ...models.config.options.precision import PRECISIONS
from ..layout.devices import DeviceKind
from ..scores.commands import batch_option, device_option
from ..weights.commands import data_option, ema_option, step_option

if TYPE_CHECKING:
    from ...dataplane.tokenizers import Tokenizer
    from ..weights.source import WeightSource
    from .placement import Placement

OPTIONS = (
    click.option(
        "--cp",
        type=click.IntRange(1),
        default=1,
        show_default=True,
        help="Ranks that share each row.",
    ),
    click.option(
        "--tp",
        type=click.IntRange(1),
        default=1,
        show_default=True,
        help="Ranks that share each matrix, and each row.",
    ),
    click.option(
        "--shard",
        type=click.IntRange(1),
        default=1,
        show_default=True,
        help="Ranks that share a copy of the weights; a block is gathered when it runs.",
    ),
    click.option(
        "--precision",
        type=click.Choice(tuple(PRECISIONS)),
        help="Number format of weights and products [the run's].",
    ),
    batch_option,
    step_option,
    ema_option,
    data_option,
    device_option,
    click.option(
        "--dry-run", is_flag=True, help="Read the input and print the memory; compute nothing."
    ),
    command.json_option,
)


@dataclass(frozen=True)
class RowOptions:
    """The values of these options."""

    cp: int
    tp: int
    shard: int
    precision: str | None
    batch_tokens: int
    step: int | None
    ema: bool
    data: str | None
    device: DeviceKind
    dry_run: bool
    as_json: bool

    def find_model(self, source: str) -> tuple[WeightSource, Tokenizer, Placement]:
        """Return the weights, the tokenizer of their data, and where the weights lie."""
        from ..weights import source as sources
        from ..weights.sample import check_vocabulary
        from ..weights.tokenizer import find_tokenizer
        from .placement import Placement, choose_precision

        weights = sources.find(source, self.step, average=self.ema)
        tokenizer = find_tokenizer(weights, self.data)
        check_vocabulary(tokenizer, weights.model)
        precision = choose_precision(weights, self.precision, self.device)
        placement = Placement.choose(
            weights.model, precision, self.device, tp=self.tp, cp=self.cp, shard=self.shard
        )
        return weights, tokenizer, placement


def row_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options to a command, which gets their values as `options`."""

    @functools.wraps(function)
    def collect(**values: Any) -> None:
        shared = {name: values.pop(name) for name in RowOptions.__annotations__}
        function(**values, options=RowOptions(**shared))

    for option in reversed(OPTIONS):
        option(collect)
    return collect
