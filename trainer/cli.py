"""The command `trainer`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from ..console import command
from ..console.errors import UserError

if TYPE_CHECKING:
    from ..dataplane.tokenizers import Tokenizer
    from .job import Job
    from .layout import DeviceKind
    from .origin import Origin
    from .request import Start


@command.group("trainer")
def main() -> None:
    """Train a model on a mixture; go on where it stopped; report what it did."""


stop_option = click.option(
    "--stop-after",
    type=click.IntRange(1),
    metavar="STEP",
    help="Interrupt the run after so many steps of the plan, as a scheduler would.",
)
fallback_option = click.option(
    "--fallback",
    is_flag=True,
    help="Go on from the checkpoint before, if the newest is damaged.",
)
profile_option = click.option(
    "--profile", metavar="FIRST:LAST", help="Trace these steps with torch's profiler, as in 10:15."
)
slurm_option = click.option(
    "--slurm", is_flag=True, help="Submit a batch job that goes on until the run is finished."
)
dry_option = click.option(
    "--dry-run", is_flag=True, help="Resolve, check and print everything; start nothing."
)


@main.command()
@click.argument("arguments", nargs=-1, metavar="[RUN.yaml] [PATH.TO.KEY=VALUE]...")
@click.option("--mixture", metavar="FILE", help="The mixture's YAML.")
@click.option("--model", metavar="NAME|FILE", help="A shipped model or a YAML [tiny-hybrid].")
@click.option("--out", metavar="FOLDER", help="The run's folder [runs/NAME].")
@click.option(
    "--init-from",
    metavar="PATH",
    help="Begin with the weights of a run, a checkpoint, or a folder of transformers or Vortex.",
)
@click.option("--processes", type=click.IntRange(1), help="Processes on this machine.")
@stop_option
@fallback_option
@profile_option
@slurm_option
@dry_option
@command.json_option
@click.pass_context
def run(
    context: click.Context,
    arguments: tuple[str, ...],
    mixture: str | None,
    model: str | None,
    out: str | None,
    init_from: str | None,
    processes: int | None,
    stop_after: int | None,
    fallback: bool,
    profile: str | None,
    slurm: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Start a run; the same command restarts and resumes it.

    Overrides go to the run's own keys; those that begin with `mixture.` or `model.` go into these
    files. `--dry-run` shows every key with its value.

    Exit codes: 0 finished, 85 saved and stopped early (start it again), 1 failed, 2 misuse.
    """
    from . import job as jobs
    from .request import Request

    overrides = [word for word in arguments if "=" in word]
    files = [word for word in arguments if "=" not in word]
    if len(files) > 1:
        raise click.UsageError(f"one RUN.yaml at most, not {', '.join(files)}")
    if processes is not None:
        overrides.append(f"processes={processes}")
    if init_from is not None:
        overrides.append(f"init_from.path={init_from}")
    request = Request(
        run=files[0] if files else None,
        mixture=mixture,
        model=model,
        out=out,
        overrides=overrides,
        slurm=slurm,
    )
    job = jobs.resolve(request)
    asked = _asked(context, stop_after, fallback, profile)
    _go(job, asked, _again(context) if slurm else None, dry_run, as_json)


@main.command()
@click.argument("folder", metavar="RUN")
@command.overrides_argument
@stop_option
@fallback_option
@profile_option
@slurm_option
@dry_option
@command.json_option
@click.pass_context
def resume(
    context: click.Context,
    folder: str,
    overrides: tuple[str, ...],
    stop_after: int | None,
    fallback: bool,
    profile: str | None,
    slurm: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Go on with the run in the folder RUN; nothing else is needed."""
    from . import job as jobs
    from .folder import RunFolder

    job = jobs.load(RunFolder(folder), overrides, slurm=slurm)
    asked = _asked(context, stop_after, fallback, profile)
    _go(job, asked, _again(context) if slurm else None, dry_run, as_json)


@main.command()
@click.argument("folders", nargs=-1, required=True, metavar="RUN...")
@click.option("--compare", is_flag=True, help="One page that shows the runs side by side.")
@click.option("--out", metavar="FILE", help="[RUN/report.html, or RUN/compare.html of the first]")
@command.json_option
def report(folders: tuple[str, ...], compare: bool, out: str | None, as_json: bool) -> None:
    """Draw a run's report, or compare several.

    It is one HTML file that needs nothing else.
    """
    from .report import write

    if compare and len(folders) < 2:
        raise click.UsageError("--compare needs two runs or more")
    if out is not None and len(folders) > 1 and not compare:
        raise click.UsageError("--out is one file: give one RUN, or --compare")
    pages = [folders] if compare else [(folder,) for folder in folders]
    found = [write(page, out)[1] for page in pages]
    if as_json:
        command.emit(found[0] if len(found) == 1 else found)
    for summary in found:
        command.say(f"report: {summary['report']}")


SOURCE = "RUN|CHECKPOINT"
step_option = click.option(
    "--step", type=click.IntRange(0), metavar="STEP", help="Which checkpoint of the run [newest]."
)
data_option = click.option(
    "--data", metavar="URL", help="A dataset with the tokenizer [that of the run's datasets]."
)


@main.command()
@click.argument("source", metavar=SOURCE)
@click.argument("out", metavar="OUT")
@click.option(
    "--format",
    type=click.Choice(["huggingface", "vortex", "headrace"]),
    default="huggingface",
    show_default=True,
)
@step_option
@click.option(
    "--dtype", type=click.Choice(["fp32", "bf16", "fp16"]), default="fp32", show_default=True
)
@data_option
@command.json_option
def export(
    source: str,
    out: str,
    format: str,
    step: int | None,
    dtype: str,
    data: str | None,
    as_json: bool,
) -> None:
    """Write weights for transformers or Vortex.

    RUN is a run's folder; CHECKPOINT is the folder of one of its checkpoints, or its s3:// URL.
    """
    from . import export as exports
    from . import origin as origins

    origin = origins.find(source, step)
    tokenizer, without = None, ""
    try:
        tokenizer = _tokenizer(origin, data)
    except UserError as error:
        if data is not None:
            raise
        without = f"; without a tokenizer: {error.what}"
    done = exports.export(origin, out, format, dtype=dtype, tokenizer=tokenizer)
    if as_json:
        command.emit(done)
    else:
        command.say(f"{done['from']} → {out}: {done['family']}, {dtype}{without}")


@main.command()
@click.argument("source", metavar=SOURCE)
@click.option("--prompt", "prompts", multiple=True, metavar="TEXT", help="May be repeated.")
@click.option("--tokens", type=click.IntRange(1), default=128, show_default=True)
@click.option("--temperature", type=click.FloatRange(0), default=1.0, show_default=True)
@click.option("--top-k", type=click.IntRange(1))
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True))
@click.option("--seed", type=int, default=0, show_default=True)
@step_option
@data_option
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto")
@command.json_option
def sample(
    source: str,
    prompts: tuple[str, ...],
    tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
    step: int | None,
    data: str | None,
    device: DeviceKind,
    as_json: bool,
) -> None:
    """Let the model go on from prompts.

    Without --prompt, each line of stdin is one. A temperature of 0 takes the likeliest token. The
    same seed says the same.
    """
    from ..models.generate import Sampling
    from . import origin as origins
    from . import sample as samples

    origin = origins.find(source, step)
    tokenizer = _tokenizer(origin, data)
    asked = list(prompts) or [line.rstrip("\n") for line in sys.stdin]
    if not asked:
        raise click.UsageError("no prompt: give --prompt TEXT, or lines on stdin")
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    found = samples.sample(origin, tokenizer, asked, tokens, sampling=sampling, device=device)
    if as_json:
        command.emit({"from": origin.where, "samples": [vars(each) for each in found]})
        return
    for each in found:
        click.echo(f"{each.prompt}{each.text}")
        if len(found) > 1:
            click.echo("─" * 40)


def _tokenizer(origin: Origin, data: str | None) -> Tokenizer:
    from . import vocabulary

    if data is not None:
        return vocabulary.of_dataset(data)
    return vocabulary.of_run(getattr(origin, "run", None))


def _asked(
    context: click.Context, stop_after: int | None, fallback: bool, profile: str | None
) -> Start:
    from .request import Start, steps_between

    try:
        steps = steps_between(profile) if profile is not None else None
    except ValueError as error:
        raise click.UsageError(f"--profile: {error}") from None
    debug = bool(context.find_root().meta.get(command.DEBUG))
    return Start(stop_after=stop_after, fallback=fallback, profile=steps, debug=debug)


def _again(context: click.Context) -> list[str]:
    """The words of this command, for a batch job to say."""
    found = [context.info_name or ""]
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        if isinstance(parameter, click.Argument):
            found += value if isinstance(value, tuple) else [str(value)]
        elif value is True and parameter.name not in ("slurm", "dry_run", "as_json"):
            found.append(parameter.opts[0])
        elif value is not None and not isinstance(value, bool):
            found += [parameter.opts[0], str(value)]
    return found


def _go(job: Job, asked: Start, batch: list[str] | None, dry_run: bool, as_json: bool) -> None:
    """Start the job here, or submit one that says the words of `batch`."""
    from . import launch, start
    from .describe import configuration, describe, lines

    start.check(job, elsewhere=batch is not None)
    if dry_run:
        described = describe(job, activations=True)
        script = {} if batch is None else {"slurm": start.batch_script(job, batch)}
        if as_json:
            command.emit(described | script)
        else:
            told = [*lines(described), configuration(described), *script.values()]
            command.say("\n".join(told))
        return
    if batch is not None:
        number = start.submit(job, batch)
        if as_json:
            command.emit({"job": number, "script": str(job.folder.slurm)})
        command.say(f"submitted as job {number}: {job.folder.slurm}")
        return
    code = start.start(job, asked)
    if as_json and launch.speaks():
        command.emit(start.outcome(job, code))
    sys.exit(code)


if __name__ == "__main__":
    main()
