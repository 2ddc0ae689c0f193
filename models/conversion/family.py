"""What a family of published models is, and what the families share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from ...console.errors import ConfigError, Problem, Problems
from ..config import ModelConfig
from ..layers.norms import NormKind
from ..layers.rope import Rope
from ..operators import OperatorOptions
from ..operators.attention import AttentionOptions
from ..pattern import parse_pattern
from .rules import Rule

Settings = dict[str, Any]
"""The contents of a `config.json`."""


class Family(Protocol):
    """One `model_type` of transformers."""

    architecture: str

    def read(self, settings: Mapping[str, Any]) -> ModelConfig:
        """Their configuration as ours; ConfigError where it asks for what we do not have."""
        ...

    def write(self, config: ModelConfig) -> Settings:
        """Ours as theirs; Unsuitable where the family cannot say it."""
        ...

    def rules(self, config: ModelConfig) -> list[Rule]: ...


class Unsuitable(Exception):
    """A model is not one of a family: why."""


def require(suits: bool, why: str) -> None:
    if not suits:
        raise Unsuitable(why)


def expect(settings: Mapping[str, Any], **values: Any) -> None:
    """Refuse settings with a meaning that our operators do not have."""
    problems = [
        Problem(key, f"{settings[key]!r} is not supported, only {value!r}")
        for key, value in values.items()
        if key in settings and settings[key] is not None and settings[key] != value
    ]
    if problems:
        raise ConfigError("config.json", problems)


@contextmanager
def problems_told(file: Path, settings: Mapping[str, Any]) -> Iterator[None]:
    """Tell what is wrong with the settings of a file, where reading them stumbles over it."""
    try:
        yield
    except KeyError as error:
        problems: Sequence[Problem] = [Problem(str(error.args[0]), "is required")]
    except Problems as error:
        problems = error.problems
    except ValueError as error:
        problems = [Problem("", str(error))]
    except (TypeError, AttributeError) as error:  # numbers in quotes, most often
        problems = [
            Problem(name, f"should be a number, not the text {value!r}")
            for name, value in settings.items()
            if isinstance(value, str) and value.replace(".", "", 1).isdigit()
        ] or [Problem("", f"a value is of the wrong type: {error}")]
    else:
        return
    raise ConfigError(str(file), problems)


def alike(
    config: ModelConfig, mixer: type[OperatorOptions], mlp: type[OperatorOptions] | None
) -> None:
    """Require that every layer is of one mixer and one MLP, of these kinds."""
    require(
        len({(layer.mixer, layer.mlp, layer.shared) for layer in config.layers}) == 1,
        "layers differ",
    )
    layer = config.layers[0]
    require(layer.shared is None, "it has shared blocks")
    require(isinstance(config.operators[layer.mixer], mixer), f"`{layer.mixer}` is another kind")
    if mlp is None:
        require(layer.mlp is None, "it has MLPs")
    else:
        follows = config.operators[layer.mlp] if layer.mlp else None
        require(isinstance(follows, mlp), "its MLP is another kind")


def of_layers(
    names: Sequence[str], operators: Mapping[str, OperatorOptions], *, mlp: str | None = None
) -> dict[str, Any]:
    """The pattern of layers that are named one by one, and the operators that they need."""
    pattern = f"[{', '.join(names)}]"
    used = {name for layer in parse_pattern(pattern, mlp=mlp) for name in layer.names}
    kept = {name: options for name, options in operators.items() if name in used}
    return {"pattern": pattern, "mlp": mlp, "operators": kept}


def plain_decoder(config: ModelConfig) -> None:
    """Require RMSNorm with eps below the root and no table of positions."""
    one_norm(config, "rms")
    require(config.learned_positions is None, "it has learned positions")


def one_norm(config: ModelConfig, kind: NormKind) -> None:
    """Require that every norm is of this kind."""
    for norm in (config.norm, config.final_norm or kind):
        require(norm == kind, f"its norm is `{norm}`")


def rope_settings(settings: Mapping[str, Any]) -> Settings:
    """What is said of rotary positions; since its version 5, transformers keeps it together."""
    apart = {key: settings.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    known = {key: value for key, value in apart.items() if value is not None}
    for key in ("rope_scaling", "rope_parameters"):
        known |= dict(settings.get(key) or {})
    return known


def read_rope(settings: Mapping[str, Any], *, turning: float = 1.0) -> Rope:
    """`turning` is the share of a head's channels that the family turns."""
    scaling = rope_settings(settings)
    expect(scaling, partial_rotary_factor=turning)
    base = float(scaling.get("rope_theta") or 10_000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    original = scaling.get("original_max_position_embeddings")
    length = int(original or settings.get("max_position_embeddings") or 8192)
    if kind == "default":
        return Rope(base=base)
    factor = float(scaling["factor"])
    if kind == "linear":
        return Rope(base=base, scaling="linear", factor=factor)
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
        for key in ("attention_factor", "mscale", "mscale_all_dim"):
            expect(scaling, **{key: None})
        return Rope(
            base=base,
            scaling="yarn",
            factor=factor,
            original_length=length,
            beta_fast=float(scaling.get("beta_fast") or 32.0),
            beta_slow=float(scaling.get("beta_slow") or 1.0),
        )
    raise ConfigError(
        "config.json",
        [Problem("rope_scaling", f"`{kind}` is not supported: linear, llama3, yarn are")],
    )


def write_rope(rope: Rope, head_dim: int) -> Settings:
    base = rope.base
    scaling: Settings | None = None
    length = 8192
    if rope.scaling == "ntk":
        base *= rope.factor ** (head_dim / (head_dim - 2))
    elif rope.scaling != "none":
        length = int(rope.original_length * rope.factor)
        scaling = {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.scaling in ("yarn", "llama3"):
        assert scaling is not None
        scaling["original_max_position_embeddings"] = rope.original_length
    if rope.scaling == "yarn":
        assert scaling is not None
        scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
    if rope.scaling == "llama3":
        assert scaling is not None
        scaling["low_freq_factor"] = rope.low_freq_factor
        scaling["high_freq_factor"] = rope.high_freq_factor
    return {"rope_theta": base, "rope_scaling": scaling, "max_position_embeddings": length}


def attention_of(config: ModelConfig) -> AttentionOptions:
    """The options of a plain rotary attention."""
    options = config.operators[config.layers[0].mixer]
    assert isinstance(options, AttentionOptions)
    require(not options.qk_norm, "its attention has QK-norm")
    require(options.rope is not None, "its attention has no rotary positions")
    require(options.rope is not None and options.rope.channels is None, "some channels do not turn")
    return options
