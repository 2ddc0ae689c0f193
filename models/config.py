"""A model as people write it: widths, named operators, and a pattern of them.

vocab_size: 512
width: 256
pattern: "[se, mr, li] * 3 + [attention]"
mlp: glu
operators:
  attention: {kind: attention, heads: 4}
  se: {kind: hyena-se, groups: 16}
  …
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from ..console import config as reader
from ..console.errors import ConfigError, Problem, Problems
from ..console.explain import nearest
from .initializers import InitConfig
from .kernels.choice import Kernel
from .layers.norms import NormKind
from .operators import OPERATORS, OPTIONS, OperatorOptions, SharedOperator
from .pattern import Layer, parse_pattern

SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Everything that decides what a model computes."""

    vocab_size: int
    """Rows of the embedding."""
    width: int
    """Of the residual stream; D in the papers."""
    pattern: str
    """The layers, first to last: names of operators in lists, with `*` to repeat and `+` to join.
    `name/mlp` has another MLP than the model's, `name/none` has none; `shared>name` is fed by a
    shared block."""
    mlp: str | None = None
    """The operator that follows every mixer, behind a norm and a residual of its own."""
    operators: dict[str, Annotated[OperatorOptions, reader.OneOf(OPTIONS, tag="kind")]]
    """The operators that the pattern names, with their options."""
    norm: NormKind = "rms"
    """`rms-eps-outside` adds eps to the root instead of below it, as StripedHyena does."""
    final_norm: NormKind | None = None
    """The norm before the logits, where it is of another kind than those of the layers."""
    norm_eps: float = 1e-5
    """Keeps a norm from dividing by nothing."""
    tie_embeddings: bool = True
    """The embedding is the output matrix as well."""
    learned_positions: int | None = None
    """Rows of a table of positions that is added to the embeddings, as in GPT-2."""
    isolate_documents: bool = True
    """Documents packed into one row do not see each other, in any operator. false gives the
    behaviour of published runs that let them."""
    kernel: Kernel = "auto"
    """As each operator's, for what is none: the norms of the residual stream, and the loss."""
    init: InitConfig = field(default_factory=InitConfig)

    def __post_init__(self) -> None:
        wrong = [
            Problem(name, f"must be at least 1, not {getattr(self, name)}")
            for name in ("vocab_size", "width", "learned_positions")
            if getattr(self, name) is not None and getattr(self, name) < 1
        ]
        if not self.norm_eps > 0:
            wrong.append(Problem("norm_eps", f"must be above 0, not {self.norm_eps}"))
        if not wrong:
            wrong = [*self._pattern_problems(), *self._operator_problems()]
        if wrong:
            raise Problems(wrong)

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """The pattern, layer by layer."""
        return parse_pattern(self.pattern, mlp=self.mlp)

    @property
    def residual_branches(self) -> int:
        """How often something is added to the residual stream."""
        return sum(1 + (layer.mlp is not None) for layer in self.layers)

    def uses(self, name: str) -> list[int]:
        """The numbers of the layers in which the operator takes part."""
        return [number for number, layer in enumerate(self.layers) if name in layer.names]

    def tp_problems(self, tp: int) -> Iterator[str]:
        """What so many tensor-parallel processes cannot share out."""
        for name, options in self.operators.items():
            for what, number in options.tp_sizes(self.width).items():
                if number % tp:
                    yield f"operators.{name}: tp={tp} does not divide its {number} {what}"

    def _pattern_problems(self) -> list[Problem]:
        named: dict[str, int] = {}
        for number, layer in enumerate(self.layers):
            for name in layer.names:
                named.setdefault(name, number)
        wrong = []
        for name, number in named.items():
            if name not in self.operators:
                near = nearest(name, self.operators)
                hint = f"; did you mean `{near}`?" if near else ""
                known = ", ".join(self.operators)
                wrong.append(
                    f"layer {number} names the operator `{name}`, which is not defined under"
                    f" `operators`{hint} (defined: {known})"
                )
        for number, layer in enumerate(self.layers):
            if layer.shared is not None and "." in layer.shared:
                wrong.append(f"layer {number}: a shared block's name has no dot: `{layer.shared}`")
            for name in layer.names:
                kind = self.operators[name].kind if name in self.operators else None
                shared = name == layer.shared
                if kind is not None and issubclass(OPERATORS[kind], SharedOperator) != shared:
                    should = "cannot be shared" if shared else "stands before `>` only"
                    wrong.append(f"layer {number}: `{name}` is of kind {kind}, which {should}")
        return [Problem("pattern", what) for what in wrong]

    def _operator_problems(self) -> list[Problem]:
        undefined = {name for layer in self.layers for name in layer.names} - self.operators.keys()
        wrong = []
        for name, options in self.operators.items():
            numbers = self.uses(name)
            shown = ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")
            place = f" (layers {shown})" if numbers else ""
            problems = [f"{what}{place}" for what in options.problems(self.width)]
            if not numbers:
                near = nearest(name, undefined)
                hint = f"; is it the `{near}` of the pattern?" if near else ""
                problems.insert(0, f"no layer uses it{hint}")
            wrong += [Problem(f"operators.{name}", what) for what in problems]
        return wrong


def load_model_config(name_or_file: str | Path, overrides: Sequence[str] = ()) -> ModelConfig:
    """A shipped model by its name (`llama2-7b`), or a YAML file by its path."""
    file = Path(name_or_file)
    if file.suffix not in SUFFIXES and not file.is_file():
        shipped = shipped_models()
        if str(name_or_file) not in shipped:
            inside = file / "model.yaml"  # of an exported folder, a checkpoint or a run
            near = (
                [str(inside)]
                if inside.is_file()
                else difflib.get_close_matches(str(name_or_file), shipped, n=3, cutoff=0.4)
            )
            raise ConfigError(
                "the model",
                [Problem("", f"there is no shipped model `{name_or_file}`")],
                hint=(f"did you mean {', '.join(near)}? " if near else "")
                + "`headrace models list` shows them all; a file's name ends in .yaml",
            )
        file = shipped[str(name_or_file)]
    data, lines = reader.read_yaml(file)
    before = _named(data)
    data = reader.apply_overrides(data, overrides, lines)
    after = _named(data)
    if isinstance(data.get("operators"), dict) and after <= data["operators"].keys():
        # Another pattern on the command line leaves out what it no longer names.
        chosen = {word.split(".")[1] for word in overrides if word.startswith("operators.")}
        for name in before - after - chosen:
            data["operators"].pop(name, None)
    return reader.build(ModelConfig, data, source=str(file), lines=lines)


def _named(data: dict[str, Any]) -> set[str]:
    """The operators that layers name in data as it stands in a file, where it can be read."""
    pattern, mlp = data.get("pattern"), data.get("mlp")
    if not isinstance(pattern, str) or not isinstance(mlp, str | None):
        return set()
    try:
        layers = parse_pattern(pattern, mlp=mlp)
    except ValueError:
        return set()
    return {name for layer in layers for name in layer.names}


def shipped_models() -> dict[str, Path]:
    """The files of `configs/models/`, by name."""
    folder = Path(str(resources.files("headrace.configs"))) / "models"
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}
