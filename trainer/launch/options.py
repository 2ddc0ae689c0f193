"""Options for a single start, such as `--stop-after`. They are not part of the run.

An option is declared once, as a field. The command line, the words in a Slurm script and the worker
processes' arguments follow from the fields.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import click


def check_step_range(context: click.Context, parameter: click.Parameter, value: Any) -> str | None:
    """Check steps written FIRST:LAST; `10:15` means steps 10 to 14."""
    if value is None:
        return None
    first, _, last = str(value).partition(":")
    if not (first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise click.BadParameter(f"steps are written FIRST:LAST, as in 10:15, not {value}")
    return str(value)


def option(default: Any, **settings: Any) -> Any:
    """Declare a field that is a command-line option; click receives the `settings`."""
    return field(default=default, metadata={"click": settings})


def _process_start() -> float:
    from ...console.machine import process_start

    return process_start()


@dataclass(frozen=True, kw_only=True)
class StartOptions:
    stop_after: int | None = option(
        None,
        type=click.IntRange(1),
        metavar="STEP",
        help="Interrupt the run after this step of the plan, as a scheduler would.",
    )
    fallback: bool = option(
        False,
        is_flag=True,
        help="If the newest checkpoint is damaged, resume from the one before it.",
    )
    new_ledger: bool = option(
        False,
        is_flag=True,
        help="If the ledger is lost or does not lead to the checkpoint, begin a new one there.",
    )
    profile: str | None = option(
        None,
        callback=check_step_range,
        metavar="FIRST:LAST",
        help="Trace these steps and their memory with torch's profiler, as in 10:15.",
    )
    memory_snapshot: int | None = option(
        None,
        type=click.IntRange(0),
        metavar="STEP",
        help="Write torch's snapshot of the GPU's memory in this step.",
    )
    debug: bool = False
    """Log debug messages (`--debug`)."""
    began: float = field(default_factory=_process_start)
    """When the command began, by a clock that all processes on this machine share."""

    @property
    def profiled_steps(self) -> range | None:
        if self.profile is None:
            return None
        first, last = self.profile.split(":")
        return range(int(first), int(last))

    @property
    def traced_steps(self) -> dict[str, range]:
        """Traced steps, by command-line option."""
        steps = {}
        if self.profiled_steps is not None:
            steps[f"--profile {self.profile}"] = self.profiled_steps
        if (step := self.memory_snapshot) is not None:
            steps[f"--memory-snapshot {step}"] = range(step, step + 1)
        return steps

    def to_json(self) -> str:
        """Encode the options as a worker process's argument."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, encoded: str) -> StartOptions:
        return cls(**json.loads(encoded))


def add_start_options(function: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command with the options of `StartOptions`."""
    for option_field in reversed(dataclasses.fields(StartOptions)):
        settings = option_field.metadata.get("click")
        if settings is not None:
            flag = f"--{option_field.name.replace('_', '-')}"
            function = click.option(flag, default=option_field.default, **settings)(function)
    return function


def command_words(context: click.Context, without: frozenset[str]) -> list[str]:
    """Return the running command's words for a batch job, `without` some options.

    `resume runs/a --stop-after 10` gives these four words.
    """
    words = [context.info_name or ""]
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        if parameter.name in without or value is None or value is False:
            continue
        if isinstance(parameter, click.Argument):
            words += value if isinstance(value, tuple) else [str(value)]
        elif value is True:
            words.append(parameter.opts[0])
        else:
            for item in value if isinstance(value, tuple) else (value,):
                words += [parameter.opts[0], str(item)]
    return words
