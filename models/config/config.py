"""Model configuration in YAML: widths, named operators, and the pattern of layers.

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
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from ...console import config as reader
from ...console.errors import ConfigError, ConfigProblem, ConfigProblems
from ...console.explain import nearest
from .options import OPTIONS
from .options.base import OperatorOptions
from .options.init import InitConfig
from .options.names import Kernel, NormKind
from .pattern import Layer, parse_pattern

SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Everything that determines a model's function, apart from its weights."""

    vocab_size: int
    """Embedding rows."""
    width: int
    """Residual stream width; D in the papers."""
    pattern: str
    """Layers, first to last: lists of operator names, repeated with `*` and joined with `+`.
    `name/mlp` has another MLP than the model's, `name/none` has none, `name&mlp` has it beside the
    mixer, not after it; in `one|two` both mixers read one norm; the shared block `shared` feeds
    `shared>name`."""
    mlp: str | None = None
    """Operator that follows every mixer, with its own norm and residual."""
    operators: dict[str, Annotated[OperatorOptions, reader.OneOf(OPTIONS, tag="kind")]]
    """Operators that the pattern names, with their options."""
    norm: NormKind = "rms"
    """`rms-eps-outside` adds eps outside the root, as StripedHyena does; `rms-zero-centered` stores
    the weight less 1, as Qwen3-Next does."""
    final_norm: NormKind | None = None
    """Norm before the logits; `norm` if unset."""
    norm_eps: float = 1e-5
    """Epsilon in all norms."""
    tie_embeddings: bool = True
    """Use the embedding as the output matrix too."""
    learned_positions: int | None = None
    """Rows in a learned position table, added to the embeddings as in GPT-2."""
    embedding_multiplier: float = reader.added_field(1.0)
    """Multiplies the tokens' embeddings."""
    logits_multiplier: float = reader.added_field(1.0)
    """Multiplies the logits. (Granite's `logits_scaling` divides them.)"""
    isolate_documents: bool = True
    """Documents packed into one row do not see each other, in any operator. false reproduces
    published runs in which they do."""
    kernel: Kernel = "auto"
    """Kernels for the residual stream's norms and the loss; each operator has its own option."""
    init: InitConfig = field(default_factory=InitConfig)
    """Initial distribution of matrices."""

    def __post_init__(self) -> None:
        problems = [
            ConfigProblem(name, f"must be at least 1, not {getattr(self, name)}")
            for name in ("vocab_size", "width", "learned_positions")
            if getattr(self, name) is not None and getattr(self, name) < 1
        ]
        if not self.norm_eps > 0:
            problems.append(ConfigProblem("norm_eps", f"must be above 0, not {self.norm_eps}"))
        if not problems:
            problems = [*self._pattern_problems(), *self._operator_problems()]
        if problems:
            raise ConfigProblems(problems)

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """Layers that the pattern describes."""
        return parse_pattern(self.pattern, mlp=self.mlp)

    @property
    def residual_branches(self) -> int:
        """Count the additions to the residual stream."""
        return sum(1 + (layer.mlp is not None) for layer in self.layers)

    @property
    def couples_rows(self) -> list[str]:
        """Operators that couple rows: other micro-batches then mean another model."""
        return [name for name, options in self.operators.items() if options.couples_rows]

    def find_layers(self, name: str) -> list[int]:
        """Return the numbers of layers that use an operator."""
        return [number for number, layer in enumerate(self.layers) if name in layer.names]

    def tp_problems(self, tp: int) -> Iterator[str]:
        """Yield the sizes that `tp` tensor-parallel ranks do not divide."""
        for name, options in self.operators.items():
            for unit, size in options.tp_sizes(self.width).items():
                if size % tp:
                    yield f"operators.{name}: tp={tp} does not divide its {size} {unit}"

    def ep_problems(self, ep: int, tp: int, ranks: int) -> Iterator[str]:
        """Yield the reasons why `ep` of `ranks` ranks (dp × cp × tp) cannot split the experts."""
        if ep == 1:
            return
        if ep % tp:
            yield f"ep={ep} is neither 1 nor a multiple of tp={tp}"
        if ranks % ep:
            yield f"ep={ep} does not divide the {ranks} ranks (dp × cp × tp)"
        counts = {name: options.expert_count for name, options in self.operators.items()}
        if not any(counts.values()):
            yield f"ep={ep} splits experts, and the model has none (no operator of kind moe)"
        for name, count in counts.items():
            if count is not None and count % ep:
                yield f"operators.{name}: ep={ep} does not divide its {count} experts"

    def _pattern_problems(self) -> list[ConfigProblem]:
        first_layers: dict[str, int] = {}
        for number, layer in enumerate(self.layers):
            for name in layer.names:
                first_layers.setdefault(name, number)
        messages = []
        for name, number in first_layers.items():
            if name not in self.operators:
                suggestion = nearest(name, self.operators)
                hint = f"; did you mean `{suggestion}`?" if suggestion else ""
                known = ", ".join(self.operators)
                messages.append(
                    f"layer {number} names the operator `{name}`, which is not defined under"
                    f" `operators`{hint} (defined: {known})"
                )
        for number, layer in enumerate(self.layers):
            if layer.shared is not None and "." in layer.shared:
                messages.append(
                    f"layer {number}: a shared block's name has no dot: `{layer.shared}`"
                )
            messages += self._pair_problems(number, layer)
            for name in layer.names:
                options = self.operators.get(name)
                shared = name == layer.shared
                if options is not None and options.shared != shared:
                    rule = "cannot be shared" if shared else "must stand before `>`"
                    messages.append(
                        f"layer {number}: `{name}` is of kind {options.kind}, which {rule}"
                    )
        return [ConfigProblem("pattern", message) for message in messages]

    def _pair_problems(self, number: int, layer: Layer) -> Iterator[str]:
        """Yield why the mixers of a layer cannot stand side by side."""
        for name in layer.mixers if layer.second is not None else ():
            options = self.operators.get(name)
            if options is not None and options.norm_placement != "pre":
                yield f"layer {number}: `{name}` shares a norm, so norm_placement must be pre"
            if options is not None and options.expert_count is not None:
                yield f"layer {number}: `{name}` has experts, and cannot stand beside a mixer"

    def _operator_problems(self) -> list[ConfigProblem]:
        undefined = {name for layer in self.layers for name in layer.names} - self.operators.keys()
        all_problems = []
        for name, options in self.operators.items():
            layers = self.find_layers(name)
            shown = ", ".join(map(str, layers[:8])) + (", …" if len(layers) > 8 else "")
            users = f" (layers {shown})" if layers else ""
            problems = [f"{problem}{users}" for problem in options.problems(self.width)]
            if options.shared and (options.norm_placement, *options.multipliers) != ("pre", 1, 1):
                problems.append("a shared block has norms of its own, and no multipliers")
            if not layers:
                suggestion = nearest(name, undefined)
                hint = f"; is it the `{suggestion}` of the pattern?" if suggestion else ""
                problems.insert(0, f"no layer uses it{hint}")
            all_problems += [ConfigProblem(f"operators.{name}", problem) for problem in problems]
        return all_problems


def load_model_config(name_or_file: str | Path, overrides: Sequence[str] = ()) -> ModelConfig:
    """Load a shipped model by name (`llama2-7b`), or a YAML file by path."""
    file = Path(name_or_file)
    if file.suffix not in SUFFIXES and not file.is_file():
        shipped = list_shipped_models()
        if str(name_or_file) not in shipped:
            model_file = file / "model.yaml"  # in an exported folder, a checkpoint or a run
            suggestions = (
                [str(model_file)]
                if model_file.is_file()
                else difflib.get_close_matches(str(name_or_file), shipped, n=3, cutoff=0.4)
            )
            raise ConfigError(
                "the model",
                [ConfigProblem("", f"there is no shipped model `{name_or_file}`")],
                hint=(f"did you mean {', '.join(suggestions)}? " if suggestions else "")
                + "`headrace models list` shows all shipped models; a file's name ends in .yaml",
            )
        file = shipped[str(name_or_file)]
    data, lines = reader.read_yaml(file)
    names_before = _pattern_names(data)
    data = reader.apply_overrides(data, overrides, lines)
    names_after = _pattern_names(data)
    if isinstance(data.get("operators"), dict) and names_after <= data["operators"].keys():
        # A pattern on the command line removes operators that it no longer names.
        overridden = {word.split(".")[1] for word in overrides if word.startswith("operators.")}
        for name in names_before - names_after - overridden:
            data["operators"].pop(name, None)
    return reader.build(ModelConfig, data, source=str(file), lines=lines)


def _pattern_names(data: dict[str, Any]) -> set[str]:
    """Return the operator names in the pattern of raw YAML data; empty if it cannot be parsed."""
    pattern, mlp = data.get("pattern"), data.get("mlp")
    if not isinstance(pattern, str) or not isinstance(mlp, str | None):
        return set()
    try:
        layers = parse_pattern(pattern, mlp=mlp)
    except ValueError:
        return set()
    return {name for layer in layers for name in layer.names}


def list_shipped_models() -> dict[str, Path]:
    """List the files in `configs/models/`, by name."""
    folder = Path(str(resources.files("headrace.configs"))) / "models"
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}


def chunk_layers(layers: int, cuts: Sequence[int] = ()) -> tuple[range, ...]:
    """Split layers into chunks; `cuts` are the layers at which later chunks begin."""
    return tuple(range(start, end) for start, end in pairwise((0, *cuts, layers)))


def chunk_users(config: ModelConfig, chunks: Sequence[range]) -> dict[str, set[int]]:
    """Return the chunks that use a module outside the blocks, by module path."""
    last = len(chunks) - 1
    users = {"embedding": {0, last} if config.tie_embeddings else {0}, "norm": {last}}
    if config.learned_positions:
        users["positions"] = {0}
    if not config.tie_embeddings:
        users["head"] = {last}
    for number, layers in enumerate(chunks):
        for layer in config.layers[layers.start : layers.stop]:
            if layer.shared is not None:
                users.setdefault(f"shared.{layer.shared}", set()).add(number)
    return users
