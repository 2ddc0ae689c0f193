"""Options of all commands that load weights: the ranks that share them, their number format."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from ...models.config.options.precision import PRECISIONS
from ..layout.devices import DEVICES, DeviceKind

if TYPE_CHECKING:
    from ..weights.source import WeightSource
    from .placement import Placement

Decorator = Callable[[Callable[..., None]], Callable[..., None]]

ROW_OPTIONS = (
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
)
SHARD_OPTION = click.option(
    "--shard",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Ranks that share a copy of the weights; a block is gathered when it runs.",
)
DEVICE_OPTION = click.option(
    "--device",
    type=click.Choice(DEVICES),
    default="auto",
    show_default=True,
    help="auto takes a GPU if there is one.",
)


@dataclass(frozen=True)
class PlacementOptions:
    """The values of these options."""

    shard: int
    precision: str | None
    device: DeviceKind
    cp: int = 1
    tp: int = 1

    @classmethod
    def take(cls, values: dict[str, Any]) -> PlacementOptions:
        """Remove the options' values from those of a command."""
        names = [name for name in cls.__annotations__ if name in values]
        return cls(**{name: values.pop(name) for name in names})

    def place(self, weights: WeightSource, *, as_trained: bool) -> Placement:
        """Choose where the weights lie. Default of the precision: `as_trained` that of the weights'
        run, else the device's."""
        from .placement import Placement, choose_precision

        precision = choose_precision(weights, self.precision, self.device, as_trained=as_trained)
        return Placement.choose(
            weights.model, precision, self.device, tp=self.tp, cp=self.cp, shard=self.shard
        )


def list_options(*, shares_rows: bool, precision: str) -> tuple[Decorator, ...]:
    """Return the options, with those by which ranks share rows. `precision` is the help for its
    default."""
    precision_option = click.option(
        "--precision",
        type=click.Choice(tuple(PRECISIONS)),
        help=f"Number format of weights and products [{precision}].",
    )
    return (*(ROW_OPTIONS if shares_rows else ()), SHARD_OPTION, precision_option, DEVICE_OPTION)


def placement_options(*, shares_rows: bool) -> Decorator:
    """Return a decorator that adds the options to a command, which gets their values as
    `placement`."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def collect(*arguments: Any, **values: Any) -> None:
            function(*arguments, placement=PlacementOptions.take(values), **values)

        for option in reversed(list_options(shares_rows=shares_rows, precision="the device's")):
            option(collect)
        return collect

    return decorate
