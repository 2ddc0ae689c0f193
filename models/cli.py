"""`headrace models`: list the shipped models, show counts and memory of any, convert formats."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..console import command
from ..console.progress import exact_count

if TYPE_CHECKING:
    from .accounting.summary import FindEngineState
    from .config.config import ModelConfig


def precisions() -> Collection[str]:
    from .config.options.precision import PRECISIONS

    return PRECISIONS


def formats() -> Collection[str]:
    from .conversion.folders import FORMATS

    return FORMATS


def families() -> Collection[str]:
    from .conversion import FAMILIES

    return FAMILIES


@command.group("models")
def main() -> None:
    """List the shipped models, count their parameters and memory, convert models.

    \b
    Examples:
      headrace models list
      headrace models show tiny-hybrid

    More: docs/models.md
    """


@main.command("list")
@click.option(
    "--published", is_flag=True, help="List the published families that can be converted."
)
@command.json_option
def list_models(published: bool, as_json: bool) -> None:
    """List the shipped models with their exact parameter counts and layers.

    --published lists families instead: their operators and models, what `headrace models convert`
    reads and writes, and what they are tested with.

    \b
    Examples:
      headrace models list
      headrace models list --published

    More: docs/models.md
    """
    from collections import Counter
    from dataclasses import asdict

    from .config.config import list_shipped_models, load_model_config

    if published:
        from .conversion.published import list_published

        rows = [asdict(row) for row in list_published()]
        if as_json:
            command.emit(rows)
        else:
            _print_published(rows)
        return
    configs = {name: load_model_config(name) for name in list_shipped_models()}
    sizes = {name: _parameters(config) for name, config in configs.items()}
    if as_json:
        command.emit([{"name": name, "parameters": size} for name, size in sizes.items()])
        return
    for name, config in configs.items():
        counts = Counter(str(layer) for layer in config.layers)
        layers = "  ".join(f"{layer} ×{count}" for layer, count in counts.items())
        click.echo(f"{name:<20} {sizes[name]:>16,}   {layers}")


def _print_published(rows: Sequence[dict[str, Any]]) -> None:
    for row in rows:
        click.echo(f"{row['family']:<15} {row['models']}")
        click.echo(f"  operators    {', '.join(row['operators'])}")
        click.echo(f"  reads        {row['files']}")
        click.echo(f"  writes       {'yes' if row['writes'] else 'no'}")
        click.echo(f"  tested with  {row['tested_with']}")


def _parameters(config: ModelConfig) -> int:
    """Return the cached parameter count; only the first call for a model imports torch."""
    from .accounting.stored import load_or_compute

    def count() -> int:
        from .accounting.count import build_meta, count_parameters

        return count_parameters(build_meta(config))

    return load_or_compute(f"parameters {config!r}", count)


def keys() -> Iterator[str]:
    """Yield all key paths in a model file."""
    from ..console.config import key_paths
    from .config.config import ModelConfig

    return key_paths(ModelConfig)


def _load_model(name_or_file: str, overrides: Sequence[str]) -> ModelConfig:
    """Load a shipped model by name, a YAML file, or a model folder."""
    from ..console import config as reader
    from .config.config import ModelConfig, list_shipped_models, load_model_config

    folder = Path(name_or_file)
    if name_or_file in list_shipped_models() or not folder.is_dir():
        return load_model_config(name_or_file, overrides)
    if (model_file := folder / "model.yaml").is_file():
        return load_model_config(model_file, overrides)
    from .conversion.folders import read_model

    data = reader.apply_overrides(reader.plain(read_model(folder)[0]), overrides)
    return reader.build(ModelConfig, data, source=name_or_file)


@main.command("show", keys=keys)
@click.argument("name_or_file")
@command.overrides_argument
@command.positive_option("--seq-len", 4096, "Tokens of a row.")
@command.positive_option("--rows", 1, "Rows of a micro-batch.")
@click.option(
    "--precision",
    default="bf16",
    show_default=True,
    metavar="NAME",
    callback=command.name_check(precisions),
    help="Precision of weights and activations, as in a run.",
)
@click.option(
    "--fp8",
    "fp8",
    multiple=True,
    metavar="KEY=VALUE",
    help="A key of a run's fp8 section, with --precision fp8; repeatable.",
)
@click.option(
    "--zero", type=click.IntRange(0, 3), help="ZeRO stage; short for --run engine.zero=N."
)
@click.option(
    "--run",
    "run",
    multiple=True,
    metavar="KEY=VALUE",
    help="An engine or optimizer key of a run, such as engine.kind=fsdp2; repeatable.",
)
@command.positive_option("--dp", 1, "Data-parallel ranks.")
@command.positive_option("--tp", 1, "Tensor-parallel ranks.")
@command.positive_option("--cp", 1, "Context-parallel ranks.")
@command.positive_option("--ep", 1, "Ranks that split experts, among dp × cp × tp.")
@command.json_option
@click.pass_obj
def show_model(
    find_engine_state: FindEngineState | None,
    name_or_file: str,
    overrides: tuple[str, ...],
    seq_len: int,
    rows: int,
    precision: str,
    fp8: tuple[str, ...],
    zero: int | None,
    run: tuple[str, ...],
    dp: int,
    tp: int,
    cp: int,
    ep: int,
    as_json: bool,
) -> None:
    """Show a model: its layers, exact parameters and operations, and memory on one rank.

    NAME_OR_FILE is a shipped model (`headrace models list`), a YAML file, or a folder with a model:
    a run, a checkpoint, or a folder of transformers or of Vortex. Memory is that of the trainer's
    engine, as `trainer run --dry-run` counts it.

    \b
    Examples:
      headrace models show evo2-7b-8k --seq-len 8192
      headrace models show evo2-40b-8k --zero 3 --dp 8 --tp 8
      headrace models show evo2-40b-8k --run engine.kind=fsdp2 --dp 64
      headrace models show hybrid-1b --precision fp8 --fp8 smallest=1024
      headrace models show mine.yaml width=512 --json

    More: docs/models.md
    """
    from dataclasses import replace

    from ..console import config as reader
    from ..console import sources
    from ..console.machine import gpus_seen
    from .accounting.show import render
    from .accounting.state import Degrees
    from .accounting.stored import load_or_compute
    from .config.options.precision import PRECISIONS, Fp8Config

    if find_engine_state is None:
        raise click.UsageError(
            "use the command `headrace models show`: this entry point cannot list engine state"
        )
    config = _load_model(name_or_file, overrides)
    degrees, number_format = Degrees(dp=dp, tp=tp, cp=cp, ep=ep), PRECISIONS[precision]
    if fp8 and number_format.fp8 is None:
        raise click.UsageError("--fp8 needs --precision fp8")
    if fp8:
        settings = reader.build(Fp8Config, reader.apply_overrides({}, fp8), source="--fp8")
        number_format = replace(number_format, fp8=settings)
    words = [*run, *([] if zero is None else [f"engine.zero={zero}"])]

    def count() -> dict[str, Any]:
        from .accounting.count import build_meta
        from .accounting.summary import describe

        engine = find_engine_state(words, build_meta(config), number_format, degrees)
        return describe(
            config, seq_len, engine, rows=rows, precision=number_format, degrees=degrees
        )

    # All that decides the answer: the engines too, which are above this package.
    asked = [config, seq_len, rows, number_format, degrees, words, gpus_seen(), sources.digest()]
    summary = load_or_compute(f"show {asked!r}", count)
    if as_json:
        command.emit(summary)
    else:
        click.echo(render(summary))


@main.command("convert")
@click.argument("source", type=click.Path(), nargs=-1, required=True)
@click.argument("out", type=click.Path(), callback=command.local_path)
@click.option(
    "--format",
    required=True,
    metavar="NAME",
    callback=command.name_check(formats),
    help="Format of OUT.",
)
@click.option("--tokenizer", type=click.Path(), help="Folder with a tokenizer, if SOURCE has none.")
@click.option(
    "--family",
    metavar="NAME",
    callback=command.name_check(families),
    help="model_type to write, if several can say the model [SOURCE's, or the first].",
)
@click.option(
    "--dp",
    type=click.IntRange(1),
    help="Data-parallel ranks of a Savanna configuration that has no train_batch_size.",
)
def convert_model(
    source: tuple[str, ...],
    out: str,
    format: str,
    tokenizer: str | None,
    family: str | None,
    dp: int | None,
) -> None:
    """Convert the model in folder SOURCE, of any format, into the new folder OUT.

    \b
    Formats:
      headrace      model.yaml  and safetensors
      huggingface   config.json and safetensors, which transformers loads
      vortex        config.yml  and model.pt (StripedHyena 2)

    SOURCE may be a checkpoint of Savanna, too: mp_rank_*_model_states.pt and configs/*.yml.
    Tensors are only renamed and reordered. A tokenizer in SOURCE is copied.

    If SOURCE are YAML files, they are a configuration of Savanna: OUT gets model.yaml,
    mixture.yaml and run.yaml, and every key that headrace cannot express is listed.

    \b
    Examples:
      headrace models convert llama-folder ours --format headrace
      headrace models convert exported evo2 --format vortex
      headrace models convert 7b.yml data.yml evo2-run --format headrace --dp 256

    More: docs/models.md (Other libraries), docs/savanna.md
    """
    from pathlib import Path

    from .conversion.folders import convert

    if len(source) == 1 and not Path(source[0]).is_file():
        written = convert(source[0], out, format=format, tokenizer=tokenizer, family=family)
        command.say(f"{out}: {written}")
        return
    if format != "headrace" or tokenizer is not None:
        raise click.UsageError(
            "a configuration of Savanna becomes --format headrace, without tokenizer"
        )
    from .conversion.savanna.convert import convert_settings

    report = convert_settings(source, out, data_parallel=dp)
    command.say(
        f"{out}: model.yaml, mixture.yaml, run.yaml; {exact_count(len(report.used), 'keys')} used, "
        f"{len(report.elsewhere)} set elsewhere or not needed (listed in run.yaml)"
    )
    for line in report.missing:
        command.say(f"not expressible: {line}")


if __name__ == "__main__":
    main()
