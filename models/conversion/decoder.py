"""A family as tables: keys of `config.json` and names of tensors, each said once for both ways.

Reading builds a configuration from the keys. Writing fills the same keys from a configuration, and
reads them back: what comes back different cannot be said, and the difference is the reason.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...console.errors import ConfigProblem, ConfigProblems
from ..accounting.count import build_meta
from ..config.config import ModelConfig
from ..config.options.base import OperatorOptions
from ..config.pattern import Layer
from .family import (
    Published,
    Settings,
    Unsuitable,
    build_pattern,
    expect,
    published_family,
    require,
)
from .function import differences
from .keys import (
    NO_IDS,
    Field,
    Key,
    LayerList,
    find_keys,
    flag,
    merge,
    read_fields,
    write_fields,
)
from .names import Names, build_rule
from .rules import Rule


@dataclass(frozen=True, kw_only=True)
class Part:
    """An operator of a family."""

    options: type[OperatorOptions]
    module: str
    """Their module in a layer."""
    names: Names
    """Names of its tensors, within that module."""
    norms: Names
    """Names of its norms, in a layer."""
    fields: Mapping[str, Field | str]
    """Options that `config.json` says."""
    also: str = ""
    """Another module under which a folder may store it."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Options that differ from our defaults and are the same in all models of the family."""
    optional: bool = False
    """True if a model of the family may do without it."""


MODEL_FIELDS: Mapping[str, Field | str] = {
    "vocab_size": "vocab_size",
    "width": "hidden_size",
    "norm_eps": Key("rms_norm_eps", 1e-6),
    "tie_embeddings": flag("tie_word_embeddings", False),
}
UNTIED: Mapping[str, Field | str] = {
    name: entry for name, entry in MODEL_FIELDS.items() if name != "tie_embeddings"
}
"""For classes that never tie the head to the embedding, whatever `tie_word_embeddings` says."""
ENDS: Names = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
}


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """A family of transformers."""

    model_type: str
    architecture: str
    models: str
    """Sizes of the published models."""
    parts: Mapping[str, Part]
    layers: LayerList
    fields: Mapping[str, Field | str] = field(default_factory=lambda: MODEL_FIELDS)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the model that are the same in the whole family."""
    expected: Mapping[str, Any] = field(default_factory=dict)
    """Keys with the only value that we support; they are written too."""
    refused: Mapping[str, Any] = field(default_factory=dict)
    """Keys that are only read, and must have this value if they are there."""
    written: Mapping[str, Any] = field(default_factory=dict)
    """Keys that are only written: they do not change the model."""
    ends: Names = field(default_factory=lambda: ENDS)
    """Names of the tensors outside the layers."""
    blocks: str = "model.layers"
    """Their module of layers."""
    need: str = ""
    """Why transformers needs a layer of each part."""

    @property
    def published(self) -> Published:
        kinds = (part.options for part in self.parts.values())
        return published_family(self.architecture, self.models, kinds)

    def read(self, settings: Mapping[str, Any]) -> ModelConfig:
        expect(settings, **self.expected, **self.refused)
        layers = [word.partition("/")[::2] for word in self.layers.read(settings)]
        if not layers:
            raise ConfigProblems([ConfigProblem("num_hidden_layers", "must be at least 1")])
        ((common, _),) = Counter(mlp for _, mlp in layers).most_common(1)
        used = {name for layer in layers for branch in layer for name in branch.split("|")}
        words = [mixer if mlp == common else f"{mixer}/{mlp or 'none'}" for mixer, mlp in layers]
        operators = {
            name: part.options(**part.fixed, **read_fields(part.fields, settings))
            for name, part in self.parts.items()
            if name in used
        }
        pattern = build_pattern(words, operators, mlp=common or None)
        try:
            return ModelConfig(**read_fields(self.fields, settings), **self.fixed, **pattern)
        except ConfigProblems as error:
            raise ConfigProblems([self.name_keys(p, settings) for p in error.problems]) from None

    def name_keys(self, problem: ConfigProblem, settings: Mapping[str, Any]) -> ConfigProblem:
        """Return a problem of our fields with the keys that say them."""
        part = self.parts.get(problem.path.removeprefix("operators."))
        words = {problem.path, *re.findall(r"\w+", problem.message)}
        fields = {**self.fields, **(part.fields if part is not None else {})}
        keys: dict[str, None] = {}
        for name in words & fields.keys():
            keys |= find_keys(fields[name], settings)
        named = f"{problem.message} (from {', '.join(keys)})" if keys else problem.message
        return replace(problem, message=named)

    def write(self, config: ModelConfig) -> Settings:
        parts = {name: self.match(name, options) for name, options in config.operators.items()}
        unused = [name for name in self.parts if name not in parts.values()]
        missing = [name for name in unused if not self.parts[name].optional]
        reason = f", and {self.need}" if self.need else ""
        require(not missing, f"it has no layer like `{', '.join(missing)}`{reason}")
        settings = {"model_type": self.model_type, **self.expected, **NO_IDS, **self.written}
        for name, options in config.operators.items():
            merge(settings, write_fields(self.parts[parts[name]].fields, options, config.width))
        merge(settings, write_fields(self.fields, config, config.width))
        merge(settings, self.layers.write([self.word(layer, parts) for layer in config.layers]))
        try:
            reasons = list(differences(config, self.read(settings)))
        except KeyError as error:  # a key of an operator that the model does not have
            raise Unsuitable(f"`{error.args[0]}` has no value") from None
        except ConfigProblems as error:
            raise Unsuitable(str(error)) from None
        require(not reasons, "; ".join(reasons[:3]))
        return settings

    def match(self, name: str, options: OperatorOptions) -> str:
        """Return the part that an operator is: of those of its kind, the one with most fixed
        options that are equal."""
        candidates = [key for key, part in self.parts.items() if part.options is type(options)]
        require(bool(candidates), f"operators.{name} is of kind {options.kind}")
        fitting = [
            key
            for key in candidates
            if all(getattr(options, f) == value for f, value in self.parts[key].fixed.items())
        ]
        return max(fitting or candidates, key=lambda key: len(self.parts[key].fixed))

    def word(self, layer: Layer, parts: Mapping[str, str]) -> str:
        """Return a layer as the family's word."""
        if layer.shared is not None or layer.parallel:
            raise Unsuitable(f"it has layers like `{layer}`")
        mixer = "|".join(parts[name] for name in layer.mixers)
        return mixer if layer.mlp is None else f"{mixer}/{parts[layer.mlp]}"

    def rules(self, config: ModelConfig) -> list[Rule]:
        model = build_meta(config)
        parts = {name: self.match(name, options) for name, options in config.operators.items()}
        rules = []
        for path, _ in model.named_parameters():
            if not path.startswith("blocks."):
                rules.append(build_rule(self.ends, path, "", "", model))
                continue
            _, number, branch, rest = path.split(".", 3)
            layer = config.layers[int(number)]
            place = rest.partition(".")[0]
            operator = layer.mlp if branch == "mlp" else layer.mixer
            operator = (layer.second if place == "second" else operator) or ""
            part, options = self.parts[parts[operator]], config.operators[operator]
            names, ours = part.norms, f"blocks.{number}.{branch}"
            theirs = f"{self.blocks}.{number}"
            modules: tuple[str, ...] = ()
            if place in ("operator", "second"):
                names, rest = part.names, rest.removeprefix(f"{place}.")
                ours = f"{ours}.{place}"
                if part.also:
                    modules = (f"{theirs}.{part.module}", f"{theirs}.{part.also}")
                theirs = f"{theirs}.{part.module}" if part.module else theirs
            module = model.get_submodule(ours)
            rule = build_rule(names, rest, ours, theirs, module, options)
            rules.append(replace(rule, prefixes=modules) if modules else rule)
        return rules
