"""Keys of a `config.json`: a table says each once, and it is read and written by the same line.

A table has an entry for each field of a model or of an operator's options: the name of a key, or a
`Field` that reads the value from all settings and writes it back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ...console.errors import ConfigProblem, ConfigProblems
from ...console.progress import exact_count
from ..config.config import ModelConfig
from ..config.options.base import OperatorOptions
from ..config.options.rope import Rope
from .family import Settings, Unsuitable, read_rope, require, rope_settings, write_rope

REQUIRED: Any = object()
"""Default of a key that must be there."""

LENGTH = "max_position_embeddings"
"""Its value says how far rotary positions reach; layers of several types may differ."""
NO_IDS: Mapping[str, Any] = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
"""Ids of the published tokenizer, which some classes have as defaults: generation would end at one,
and its embedding would not be trained."""


class Field(Protocol):
    """A field of a model or of options, as `config.json` holds it."""

    def read(self, settings: Mapping[str, Any]) -> Any:
        """Return the field's value; raise KeyError for a missing key, ConfigProblems for a value
        that we do not support."""
        ...

    def write(self, value: Any, holder: Any, width: int) -> Settings:
        """Return the keys for a value; raise Unsuitable if they cannot hold it. `holder` is the
        model's configuration or the operator's options, `width` the model's."""
        ...


@dataclass(frozen=True)
class Key:
    """A key that holds the field's value; `default` where it is missing or null. `older` names are
    read first."""

    name: str
    default: Any = REQUIRED
    older: tuple[str, ...] = ()

    def read(self, settings: Mapping[str, Any]) -> Any:
        for name in (*self.older, self.name):
            if settings.get(name) is not None:
                return settings[name]
        if self.default is REQUIRED:
            raise KeyError(self.name)
        return self.default

    def write(self, value: Any, holder: Any, width: int) -> Settings:
        return {self.name: value}


@dataclass(frozen=True)
class Computed:
    """A field that is computed from several settings. `write` receives the value, the holder and
    the width."""

    read: Callable[[Mapping[str, Any]], Any]
    write: Callable[[Any, Any, int], Settings]


@dataclass(frozen=True)
class Rotary:
    """Rotary positions on a fraction of a head's channels, of `base` where no key says it. If not
    `fixed`, `partial_rotary_factor` says another fraction. The class computes `head_dim` from the
    width, or has a default; `default` is its scaling, for files without one."""

    rotated: float = 1.0
    base: float = 10_000.0
    fixed: bool = True
    head_dim: int | None = None
    default: Mapping[str, Any] | None = None

    def read(self, settings: Mapping[str, Any]) -> Rope:
        if self.default is not None and not has_rope(settings):
            settings = {**settings, "rope_parameters": self.default}
        rotated = self.rotated
        if not self.fixed:
            rotated = float(rope_settings(settings).get("partial_rotary_factor", rotated))
        rope = read_rope(settings, rotated=rotated, base=self.base)
        if rotated == 1 or rope.proportion < 1:
            return rope
        dim = settings.get("head_dim") or self.head_dim
        dim = dim or settings["hidden_size"] // settings["num_attention_heads"]
        return replace(rope, channels=int(dim * rotated))

    def write(self, value: Rope | None, holder: Any, width: int) -> Settings:
        require(value is not None, "its attention has no rotary positions")
        assert value is not None
        dim = holder.dim(width)
        settings = write_rope(value, value.channels or dim)
        if self.default is not None and settings["rope_scaling"] is None:
            settings["rope_scaling"] = {
                "rope_type": "default",
                "rope_theta": settings["rope_theta"],
            }
        if not self.fixed:
            settings["partial_rotary_factor"] = (value.channels or dim) / dim
        return settings


def has_rope(settings: Mapping[str, Any]) -> bool:
    """True if the settings have a dictionary of rotary positions."""
    return any(settings.get(key) is not None for key in ("rope_scaling", "rope_parameters"))


def flag(name: str, default: bool, older: tuple[str, ...] = ()) -> Computed:
    """Return the field of a key that is true, false or, as null, false. `older` names are read
    first."""

    def read(settings: Mapping[str, Any]) -> bool:
        values = [settings.get(key) for key in older]
        known = [value for value in values if value is not None]
        return bool(known[0] if known else settings.get(name, default))

    return Computed(read, lambda value, holder, width: {name: value})


def implied(read: Callable[[Mapping[str, Any]], Any]) -> Computed:
    """Return a field that other keys imply: it writes none."""
    return Computed(read, lambda value, holder, width: {})


def as_field(entry: Field | str) -> Field:
    return Key(entry) if isinstance(entry, str) else entry


def read_fields(fields: Mapping[str, Field | str], settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: as_field(entry).read(settings) for name, entry in fields.items()}


class RecordedSettings(dict[str, Any]):
    """Settings that record the keys that are read, in order."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        self.keys_read: dict[str, None] = {}

    def __getitem__(self, key: str) -> Any:
        self.keys_read[key] = None
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.keys_read[key] = None
        return super().get(key, default)


def find_keys(entry: Field | str, settings: Mapping[str, Any]) -> dict[str, None]:
    """Return the keys that a field is read from."""
    recorded = RecordedSettings(settings)
    as_field(entry).read(recorded)
    return recorded.keys_read


def write_fields(
    fields: Mapping[str, Field | str], holder: ModelConfig | OperatorOptions, width: int
) -> Settings:
    settings: Settings = {}
    for name, entry in fields.items():
        merge(settings, as_field(entry).write(getattr(holder, name), holder, width))
    return settings


def merge(settings: Settings, more: Settings) -> None:
    """Add keys, and those of nested settings; raise Unsuitable if one is there with another
    value. Of lengths, the largest stays."""
    for key, value in more.items():
        before = settings.setdefault(key, value)
        if isinstance(before, dict) and isinstance(value, dict):
            settings[key] = before = {**before}
            merge(before, value)
        elif key == LENGTH:
            settings[key] = max(before, value)
        elif before != value:
            raise Unsuitable(
                f"`{key}` has one value for all layers, not {settings[key]!r}, {value!r}"
            )


# Lists of layers -----------------------------------------------------------------------------


class LayerList(Protocol):
    """The layers, first to last, as `config.json` holds them: words of a pattern, such as
    `attention` or `attention/moe`."""

    def read(self, settings: Mapping[str, Any]) -> Sequence[str]: ...

    def write(self, layers: Sequence[str]) -> Settings: ...


@dataclass(frozen=True)
class EqualLayers:
    """Equal layers: a number of them."""

    layer: str
    count: str = "num_hidden_layers"

    def read(self, settings: Mapping[str, Any]) -> Sequence[str]:
        return [self.layer] * settings[self.count]

    def write(self, layers: Sequence[str]) -> Settings:
        require(set(layers) == {self.layer}, "its layers differ")
        return {self.count: len(layers)}


@dataclass(frozen=True)
class LayerTypes:
    """A list with the type of each layer; `derive` computes it for files without the list."""

    types: Mapping[str, str]
    """Our words by theirs."""
    derive: Callable[[Mapping[str, Any]], Sequence[str]] | None = None
    key: str = "layer_types"

    def read(self, settings: Mapping[str, Any]) -> Sequence[str]:
        types = settings.get(self.key)
        if types is None and self.derive is not None:
            types = self.derive(settings)
        elif types is None:
            raise KeyError(self.key)
        unknown = sorted({str(kind) for kind in types} - self.types.keys())
        if unknown or len(types) != settings.get("num_hidden_layers", len(types)):
            known = ", ".join(self.types)
            fault = (
                f"`{unknown[0]}` is not supported; known: {known}"
                if unknown
                else (
                    f"names {exact_count(len(types), 'layers')}, and num_hidden_layers is"
                    f" {settings['num_hidden_layers']}"
                )
            )
            raise ConfigProblems([ConfigProblem(self.key, fault)])
        return [self.types[kind] for kind in types]

    def write(self, layers: Sequence[str]) -> Settings:
        names = {ours: theirs for theirs, ours in self.types.items()}
        unknown = sorted(set(layers) - names.keys())
        require(not unknown, f"it has no layer like `{', '.join(unknown)}`")
        return {"num_hidden_layers": len(layers), self.key: [names[layer] for layer in layers]}
