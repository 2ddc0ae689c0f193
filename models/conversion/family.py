"""Model family interface, and functions that families share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, Protocol

from ...console.errors import ConfigError, ConfigProblem, ConfigProblems
from ..config.config import ModelConfig
from ..config.options import OPTIONS
from ..config.options.base import OperatorOptions
from ..config.options.names import NormKind
from ..config.options.rope import Rope
from ..config.pattern import parse_pattern
from ..layers.rope import yarn_amplitude
from .function import ntk_base
from .rules import Rule

Settings = dict[str, Any]
"""Parsed `config.json`."""


ROPE_TYPES = "linear, llama3, proportional, yarn"
TRANSFORMERS = "transformers 5.24.0"
"""The version beside which families are tested."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """What was published in a format: a row of `headrace models list --published`."""

    family: str
    models: str
    """Names or sizes of the published models."""
    operators: tuple[str, ...]
    """Kinds of our operators."""
    files: str
    """The folder that is read."""
    writes: bool
    """True if our models can be written so, too."""
    tested_with: str
    """What computes the expected numbers in tests."""


class Original(Protocol):
    """A readable format for published models: a `config.json` and tensors."""

    @property
    def published(self) -> Published: ...

    def read(self, settings: Mapping[str, Any]) -> ModelConfig:
        """Convert settings to a ModelConfig; raise ConfigProblems for unsupported settings."""
        ...

    def rules(self, config: ModelConfig) -> list[Rule]:
        """Return a rule for each of our tensors."""
        ...


class Family(Original, Protocol):
    """A family of transformers, which can be written too."""

    @property
    def model_type(self) -> str: ...

    @property
    def architecture(self) -> str: ...

    def write(self, config: ModelConfig) -> Settings:
        """Convert a ModelConfig to settings; raise Unsuitable if the family cannot represent it."""
        ...


class Unsuitable(Exception):
    """Raised with the reason why a family cannot represent a model."""


def published_family(
    architecture: str, models: str, kinds: Iterable[type[OperatorOptions]]
) -> Published:
    """Return the row of a family of transformers."""
    names = {options: kind for kind, options in OPTIONS.items()}
    return Published(
        family=architecture.partition("ForCausalLM")[0].removesuffix("LMHeadModel"),
        models=models,
        operators=tuple(dict.fromkeys(names[kind] for kind in kinds)),
        files="config.json, .safetensors or .bin",
        writes=True,
        tested_with=f"{TRANSFORMERS}: {architecture}",
    )


def require(condition: bool, reason: str) -> None:
    if not condition:
        raise Unsuitable(reason)


def refuse(key: str, message: str) -> NoReturn:
    """Raise ConfigProblems for a key."""
    raise ConfigProblems([ConfigProblem(key, message)])


def is_unset(stored: Any, value: Any) -> bool:
    """True if a key is null; where `value` is true, null is false."""
    return stored is None and value is not True


def expect(settings: Mapping[str, Any], **values: Any) -> None:
    """Raise ConfigProblems for settings with values that our operators do not support."""
    problems = [
        ConfigProblem(key, f"{settings[key]!r} is not supported, only {value!r}")
        for key, value in values.items()
        if key in settings and settings[key] != value and not is_unset(settings[key], value)
    ]
    if problems:
        raise ConfigProblems(problems)


@contextmanager
def settings_errors(file: Path, settings: Mapping[str, Any]) -> Iterator[None]:
    """Raise errors inside as a ConfigError that names the file."""
    try:
        yield
    except KeyError as error:
        problems: Sequence[ConfigProblem] = [ConfigProblem(str(error.args[0]), "is required")]
    except ConfigProblems as error:
        problems = error.problems
    except ValueError as error:
        problems = [ConfigProblem("", str(error))]
    except (TypeError, AttributeError, ArithmeticError) as error:  # usually a number in quotes
        problems = [
            ConfigProblem(name, f"should be a number, not the text {value!r}")
            for name, value in settings.items()
            if isinstance(value, str) and value.replace(".", "", 1).isdigit()
        ] or [ConfigProblem("", f"a value is of the wrong type: {error}")]
    else:
        return
    raise ConfigError(str(file), problems)


def build_pattern(
    names: Sequence[str], operators: Mapping[str, OperatorOptions], *, mlp: str | None = None
) -> dict[str, Any]:
    """Build the pattern for a list of layers, and select the operators that it uses."""
    equal = len(set(names)) == 1
    pattern = f"[{names[0]}] * {len(names)}" if equal else f"[{', '.join(names)}]"
    used = {name for layer in parse_pattern(pattern, mlp=mlp) for name in layer.names}
    used_operators = {name: options for name, options in operators.items() if name in used}
    return {"pattern": pattern, "mlp": mlp, "operators": used_operators}


def require_plain_decoder(config: ModelConfig) -> None:
    """Require RMSNorm with eps inside the root, no learned positions and no parallel layers."""
    require_norm(config, "rms")
    require_sequential(config)
    require(config.learned_positions is None, "it has learned positions")


def require_sequential(config: ModelConfig) -> None:
    """Require that every MLP follows its mixer."""
    parallel = any(layer.parallel for layer in config.layers)
    require(not parallel, "its MLPs stand beside the mixers, not after them")


def require_norm(config: ModelConfig, kind: NormKind) -> None:
    """Require this kind for every norm."""
    for norm in (config.norm, config.final_norm or kind):
        require(norm == kind, f"its norm is `{norm}`")


def rope_settings(settings: Mapping[str, Any]) -> Settings:
    """Return the RoPE settings; transformers 5 nests them in a dictionary. Like it, take an older
    dictionary before the newer, and values beside it where it has none."""
    nested = dict(settings.get("rope_scaling") or settings.get("rope_parameters") or {})
    top_level = {key: settings.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    return {**{key: value for key, value in top_level.items() if value is not None}, **nested}


def read_rope(settings: Mapping[str, Any], *, rotated: float = 1.0, base: float = 10_000.0) -> Rope:
    """Convert RoPE settings; `rotated` is the fraction of channels that turn, `base` the one where
    no key says it."""
    scaling = rope_settings(settings)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if any(isinstance(value, Mapping) for value in scaling.values()):
        refuse("rope_parameters", "lists types of layers, and this family's have equal positions")
    if kind != "proportional":
        expect(scaling, partial_rotary_factor=rotated)
    base = float(scaling.get("rope_theta") or base)
    original_length = scaling.get("original_max_position_embeddings")
    length = int(original_length or settings.get("max_position_embeddings") or 8192)
    if kind == "default":
        return Rope(base=base, original_length=length)
    factor = scaling.get("factor", 1.0) if kind == "proportional" else scaling["factor"]
    if factor is None:  # of yarn, as in old files of DeepSeek
        factor = settings["max_position_embeddings"] / length
    factor = float(factor)
    if kind == "linear":
        trained_length = max(1, round(length / factor))
        return Rope(base=base, scaling="linear", factor=factor, original_length=trained_length)
    if kind == "llama3":
        return Rope(
            base=base,
            scaling="llama3",
            factor=factor,
            original_length=length,
            low_freq_factor=float(scaling["low_freq_factor"]),
            high_freq_factor=float(scaling["high_freq_factor"]),
        )
    if kind == "yarn":
        rope = Rope(
            base=base,
            scaling="yarn",
            factor=factor,
            original_length=length,
            beta_fast=float(scaling.get("beta_fast") or 32.0),
            beta_slow=float(scaling.get("beta_slow") or 1.0),
            truncate=bool(scaling.get("truncate", True)),
        )
        amplitude = read_amplitude(scaling, factor)
        default = math.isclose(amplitude, yarn_amplitude(rope))
        return rope if default else replace(rope, attention_factor=amplitude)
    if kind == "proportional":
        proportion = float(scaling.get("partial_rotary_factor", 1.0))
        linear: Settings = {} if factor == 1 else {"scaling": "linear", "factor": factor}
        trained_length = max(1, round(length / factor))
        return Rope(base=base, proportion=proportion, original_length=trained_length, **linear)
    refuse("rope_scaling", f"`{kind}` is not supported; known: {ROPE_TYPES}")


def read_typed_rope(
    rope: Mapping[str, Any], settings: Mapping[str, Any], *, base: float = 10_000.0
) -> Rope:
    """Convert one of the dictionaries that a class lists by the layers' type: it overlooks
    `truncate` there."""
    expect(rope, truncate=True)
    length = settings.get("max_position_embeddings")
    return read_rope({"max_position_embeddings": length, "rope_parameters": rope}, base=base)


def write_typed_rope(rope: Rope, head_dim: int) -> Settings:
    require(rope.truncate, "its class bounds yarn's frequencies by whole channels (truncate)")
    return write_rope(rope, head_dim)


def read_amplitude(scaling: Mapping[str, Any], factor: float) -> float:
    """Return yarn's factor of queries and keys, which two `mscale` of DeepSeek may say."""
    amplitude = scaling.get("attention_factor")
    if amplitude is not None:
        return float(amplitude)
    pair = [float(scaling.get(key) or 0.0) for key in ("mscale", "mscale_all_dim")]
    if not all(pair):
        return yarn_mscale(factor, 1.0)
    return yarn_mscale(factor, pair[0]) / yarn_mscale(factor, pair[1])


def yarn_mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0


def write_rope(rope: Rope, head_dim: int) -> Settings:
    base = rope.base
    scaling: Settings = {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.proportion < 1:
        require(rope.scaling in ("none", "linear"), "only some pairs turn, by yarn's frequencies")
        scaling |= {"rope_type": "proportional", "partial_rotary_factor": rope.proportion}
    if rope.scaling == "ntk":
        base = ntk_base(rope, head_dim)
    if rope.scaling in ("yarn", "llama3"):
        scaling["original_max_position_embeddings"] = rope.original_length
    if rope.scaling == "yarn":
        scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
        if rope.attention_factor is not None:
            scaling["attention_factor"] = rope.attention_factor
        if not rope.truncate:
            scaling["truncate"] = False
    if rope.scaling == "llama3":
        scaling["low_freq_factor"] = rope.low_freq_factor
        scaling["high_freq_factor"] = rope.high_freq_factor
    scaled = rope.scaling not in ("none", "ntk") or rope.proportion < 1
    return {
        "rope_theta": base,
        "rope_scaling": scaling if scaled else None,
        "max_position_embeddings": int(rope.original_length * rope.factor),
    }
