"""Options of a start: stated once, on the fields of StartOptions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import click
import pytest
from click.testing import CliRunner

from headrace.trainer.launch import options
from headrace.trainer.launch.options import StartOptions, add_start_options, command_words


@click.command("resume")
@click.argument("folder")
@click.argument("overrides", nargs=-1)
@add_start_options
@click.option("--slurm", is_flag=True)
def echo(folder: str, overrides: tuple[str, ...], slurm: bool, **options: Any) -> None:
    click.echo(StartOptions(began=7.5, **options).to_json())
    click.echo(" ".join(command_words(click.get_current_context(), frozenset({"slurm"}))))


def test_options_reach_the_worker_and_the_batch_script() -> None:
    words = ["runs/a", "seed=2", "--stop-after", "3", "--fallback", "--profile", "10:15"]
    result = CliRunner().invoke(echo, [*words, "--slurm"])
    assert result.exit_code == 0, result.output
    worker, script = result.output.splitlines()
    received = StartOptions.from_json(worker)
    assert received == StartOptions(stop_after=3, fallback=True, profile="10:15", began=7.5)
    assert received.profiled_steps == range(10, 15)
    assert script == "resume runs/a seed=2 --stop-after 3 --fallback --profile 10:15"


def test_options_that_are_not_given_are_not_repeated() -> None:
    result = CliRunner().invoke(echo, ["runs/a"])
    worker, script = result.output.splitlines()
    assert StartOptions.from_json(worker) == StartOptions(began=7.5)
    assert script == "resume runs/a"


@pytest.mark.parametrize("text", ["10", "10:10", "15:10", "a:b", ":5", "1:2:3"])
def test_steps_are_written_first_last(text: str) -> None:
    result = CliRunner().invoke(echo, ["runs/a", "--profile", text])
    assert result.exit_code == 2 and "FIRST:LAST" in result.output


def test_a_new_field_becomes_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """One statement is enough: the command line, the worker and the script follow."""

    @dataclass(frozen=True, kw_only=True)
    class More(StartOptions):
        limit: int = options.option(0, type=int, help="A new option.")

    monkeypatch.setattr(options, "StartOptions", More)

    @click.command("go")
    @add_start_options
    def echo_options(**options: Any) -> None:
        click.echo(More(**options).to_json())
        click.echo(" ".join(command_words(click.get_current_context(), frozenset())))

    result = CliRunner().invoke(echo_options, ["--limit", "4"])
    worker, script = result.output.splitlines()
    assert More.from_json(worker).limit == 4  # type: ignore[attr-defined]
    assert script == "go --limit 4"
