"""Names that people and other programs use: flags, keys of YAML, tensors, curves, variables.

Each list is generated from the code and compared with its sample. A list names no class, function
or module of headrace: these may change.
"""

from __future__ import annotations

import dataclasses
import json
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import pytest
from formats.samples import compare, differing_lines

from headrace.console import config as reader
from headrace.console.commands import HEADRACE
from headrace.console.explain import NameIn, OneOf
from headrace.console.headrace import main
from headrace.models.accounting.count import build_meta
from headrace.models.config.config import ModelConfig, load_model_config
from headrace.models.config.options import OPTIONS

ROOT = Path(__file__).parents[2]
PRODUCT = (
    "configs",
    "console",
    "dataplane",
    "mixtures",
    "models",
    "planner",
    "reports",
    "tokenize",
    "trainer",
)


# Commands


PARTS = ("required", "nargs", "multiple", "default", "is_flag")
"""What click says about an option, besides its names, type and help."""


def commands(command: click.Command, path: str) -> Iterator[str]:
    """Yield the parameters of a command and of those below it, with defaults and help."""
    context = click.Context(command, info_name=path)
    yield f"{path}: {command.get_short_help_str(200)}"
    for parameter in command.get_params(context):
        if "--help" in parameter.opts:
            continue
        about = parameter.to_info_dict()
        words = {
            "names": [*parameter.opts, *parameter.secondary_opts],
            "type": type_of(about["type"]),
            **{key: about[key] for key in PARTS if key in about},
            "metavar": parameter.metavar,
            "help": about.get("help"),
        }  # fmt: skip
        yield "  " + json.dumps(
            {
                key: value
                for key, value in words.items()
                if value not in (None, False) and (key, value) != ("nargs", 1)
            },
            default=str,
        )
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from commands(below, f"{path} {name}")


def type_of(about: Mapping[str, Any]) -> str:
    limits = [
        f"{key}={about[key]}" for key in ("min", "max", "choices") if about.get(key) is not None
    ]
    return " ".join([str(about["name"]), *limits])


def test_commands_and_their_options() -> None:
    compare("commands.txt", "\n".join(commands(main, "headrace")) + "\n")
    assert set(HEADRACE) <= {
        line.split()[1].rstrip(":")
        for line in commands(main, "headrace")
        if re.match(r"headrace \w", line)
    }


# Keys of YAML


ROOTS = {
    "run": "headrace.trainer.run.config:RunConfig",
    "mixture": "headrace.mixtures.mixture_file.mixture:Mixture",
    "model": "headrace.models.config.config:ModelConfig",
    "statement": "headrace.mixtures.disclosure.statement:Statement",
    "layout plan": "headrace.trainer.run.layout_plan:LayoutPlan",
    "hardware": "headrace.planner.hardware.file:HardwareFile",
    "recipe": "headrace.trainer.guide.recipes:Recipe",
    "scores of a run": "headrace.trainer.scores.config:ScoresConfig",
    "--fp8": "headrace.models.config.options.precision:Fp8Config",
    "tokenize train": "headrace.tokenize.train:TrainConfig",
    "tokenize build": "headrace.tokenize.builder.build:BuildConfig",
    "tokenize index": "headrace.tokenize.index:IndexConfig",
    "tokenize neardup": "headrace.tokenize.neardup.find:NeardupConfig",
    "tokenize contamination": "headrace.tokenize.contamination:ContaminationConfig",
    "tokenize select": "headrace.tokenize.views.select:SelectConfig",
    "tokenize pack": "headrace.tokenize.views.pack:PackConfig",
    "tokenize sort": "headrace.tokenize.views.sort:SortConfig",
    "tokenize verify": "headrace.tokenize.executors:ExecutorConfig",
}
"""Configurations that are read from YAML or from options."""


def named(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def keys(kind: Any, path: str) -> Iterator[str]:
    """Yield the keys of a configuration with their types and defaults."""
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        if not field.init:
            continue
        place = f"{path}.{field.name}".lstrip(".")
        yield f"{place}: {type_text(hints[field.name])} = {default_text(field)}"
        for tag, below in below_of(hints[field.name]):
            yield from keys(below, f"{place}{tag}")


def default_text(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return json.dumps(reader.plain(field.default), default=str, ensure_ascii=False)
    if field.default_factory is not dataclasses.MISSING:
        return json.dumps(reader.plain(field.default_factory()), default=str, ensure_ascii=False)
    return "required"


def type_text(hint: Any) -> str:
    """Return a type without names of headrace's classes."""
    if hint is type(None) or hint is None:
        return "null"
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return "keys"
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        for mark in hint.__metadata__:
            if isinstance(mark, OneOf):
                return f"keys by {mark.tag}"
            if isinstance(mark, NameIn):
                return f"one of {', '.join(map(str, sorted(names_of(mark))))}"
        return type_text(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return " | ".join(type_text(argument) for argument in arguments)
    if origin is typing.Literal:
        return " | ".join(map(json.dumps, arguments))
    if origin is not None:
        inner = ", ".join("…" if argument is ... else type_text(argument) for argument in arguments)
        return f"{origin.__name__}[{inner}]"
    if isinstance(hint, type) and hint.__module__ == "builtins":
        return hint.__name__
    return "any" if hint is Any else "value"


def names_of(mark: NameIn) -> list[str]:
    return [*mark.table, *mark.extra]


def below_of(hint: Any) -> Iterator[tuple[str, Any]]:
    """Yield the configurations within a type, with what their keys follow."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        yield "", hint
        return
    for mark in getattr(hint, "__metadata__", ()):
        if isinstance(mark, OneOf):
            yield from ((f"({name})", choice) for name, choice in mark.registry.items())
            return
    origin = typing.get_origin(hint)
    mark = (
        ".NAME" if origin in (dict, Mapping) else "[]" if origin in (list, tuple, Sequence) else ""
    )
    for argument in typing.get_args(hint):
        yield from ((f"{mark}{tag}", below) for tag, below in below_of(argument))


def listed(kind: Any) -> str:
    return "".join(f"{line}\n" for line in dict.fromkeys(keys(kind, "")))


@pytest.mark.parametrize("name", ROOTS)
def test_keys_of_configurations(name: str) -> None:
    compare(f"keys-of-yaml/{name.replace(' ', '-').strip('-')}.txt", listed(named(ROOTS[name])))


READ = re.compile(r"\b(?:config|reader|options)\.(?:build|load|build_checked)\(\s*([A-Z]\w+)")


def test_every_configuration_that_is_read_has_a_sample() -> None:
    """A class that is built by `config.build`, `config.load` or `build_checked` is listed."""
    result = set(READ.findall("\n".join(sources().values())))
    listed = {place.partition(":")[2] for place in ROOTS.values()}
    assert result <= listed, result - listed
    assert len(result) > 8


def test_a_renamed_key_is_found() -> None:
    """Negative control: a copy of the run's configuration with one field renamed."""
    kind = named(ROOTS["run"])
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = [
        (
            "thread_count" if field.name == "threads" else field.name,
            hints[field.name],
            with_default(field),
        )
        for field in dataclasses.fields(kind)
    ]
    renamed = dataclasses.make_dataclass("Renamed", fields, kw_only=True)
    difference = differing_lines("run", listed(kind), listed(renamed))
    assert [line for line in difference if line[0] in "-+" and line[1] not in "-+"] == [
        "-threads: int | null = null",
        "+thread_count: int | null = null",
    ]


def with_default(field: dataclasses.Field[Any]) -> Any:
    defaults = {"default": field.default, "default_factory": field.default_factory}
    set_ = {name: value for name, value in defaults.items() if value is not dataclasses.MISSING}
    return dataclasses.field(**set_)


# Tensors


MODELS = (
    "tiny-deepseek", "tiny-delta", "tiny-hybrid", "tiny-mamba", "tiny-moe", "tiny-transformer",
    "tiny-zamba",
)  # fmt: skip


def test_names_of_parameters() -> None:
    """Names of modules' attributes are keys of checkpoints and exports. Every operator is there."""
    lines = []
    kinds: set[str] = set()
    configs = {name: load_model_config(name) for name in MODELS}
    configs |= {kind: model_of(kind) for kind in OPTIONS}
    for name, config in configs.items():
        model = build_meta(config)
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        lines += [f"{name} {tensor} {list(value.shape)}" for tensor, value in tensors.items()]
        kinds |= {options.kind for options in config.operators.values()}
    assert kinds == set(OPTIONS)
    compare("parameters.txt", "\n".join(lines) + "\n")


def model_of(kind: str) -> ModelConfig:
    """Return a model of one operator with its default options."""
    data = {
        "vocab_size": 16,
        "width": 64,
        "pattern": PATTERNS.get(kind, "[x]"),
        "operators": {
            "x": {"kind": kind, **NEEDED.get(kind, {})},
            **({"m": {"kind": "mamba2"}} if kind in PATTERNS else {}),
        },
    }
    return reader.build(ModelConfig, data, source=kind)


PATTERNS = {"zamba-block": "[x>m]"}
NEEDED: dict[str, dict[str, int]] = {
    "attention": {"heads": 2},
    "delta": {"heads": 2},
    "mla": {
        "heads": 2,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
    },
    "hyena-se": {"groups": 4},
    "hyena-mr": {"groups": 4},
    "glu": {"hidden": 32},
    "mlp": {"hidden": 32},
    "hyena-mlp": {"hidden": 32, "groups": 4},
    "moe": {"experts": 2, "hidden": 32},
    "zamba-block": {"heads": 2, "hidden": 32},
}
"""Options without a default."""


# The environment


VARIABLE = re.compile(r"""(?<![\w.-])"([A-Z][A-Z0-9]*_[A-Z0-9_]+|RANK|TERM)[="]""")


def test_variables_of_the_environment() -> None:
    """Words in capitals that stand in quotes: names that the product reads or sets. (Those of
    kernels are constants of Triton programs.)"""
    texts = (text for path, text in sources().items() if not str(path).startswith("models/kernels"))
    result = set(VARIABLE.findall("\n".join(texts)))
    compare("environment.txt", "".join(f"{name}\n" for name in sorted(result)))


@cache
def sources() -> dict[str, str]:
    """Return the text of the product's modules by their path."""
    files = [file for folder in PRODUCT for file in sorted((ROOT / folder).rglob("*.py"))]
    return {str(file.relative_to(ROOT)): file.read_text() for file in files}
