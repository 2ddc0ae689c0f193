"""Sources of weights: a checkpoint, or a folder with a model.

    runs/x · runs/x/checkpoints/step-00000500 · s3://bucket/x/step-00000500.7c3f9a1b
    a folder with config.json (transformers) · a folder with config.yml (Vortex)

`trainer export`, `trainer sample` and `--init-from` take any of these as one path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ...console.errors import CheckpointError
from ...console.explain import path_hint
from ...dataplane.storage import storage
from ..checkpoints import store
from ..folders.folder import RunFolder

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ...models.config.config import ModelConfig
    from ...models.weights import Weights
    from ..checkpoints.fragments import Fragment


class WeightSource(Protocol):
    """Weights by logical name, and their model's configuration."""

    @property
    def where(self) -> str: ...

    @property
    def model(self) -> ModelConfig: ...

    def weights(self) -> Weights:
        """Return the weights. A tensor is read at its first access."""
        ...

    def fill(self, fragments: Sequence[Fragment], group: ProcessGroup | None) -> None:
        """Read a rank's masters into memory, whatever its dtype. Collective over `group`; None: a
        single process."""
        ...


@dataclass(frozen=True, kw_only=True)
class InitFrom:
    """Initialize the weights from a file instead of at random. The stream begins at its first
    row."""

    path: str
    """Another run's folder, a checkpoint (its folder or s3:// URL), or a folder of transformers or
    of Vortex."""
    step: int | None = None
    """Step of the run's checkpoint; the newest, if left out."""
    moments: bool = False
    """Load the optimizer's state as well. A parameter that was frozen has none there, which is an
    error that names it."""


@dataclass(frozen=True)
class Checkpoint:
    """A headrace checkpoint. It contains the optimizer's state as well."""

    where: str
    run: RunFolder | None = None
    """The folder of its run, if known."""
    average: bool = False
    """Read the weights' moving average."""

    @property
    def step(self) -> int:
        return store.parse_step(self.where)

    @property
    def model(self) -> ModelConfig:
        from ...console import config as reader
        from ...console import yaml_text
        from ...models.config.config import ModelConfig, load_model_config

        file = storage.join(store.locate_files(self.where), store.MODEL)
        if storage.exists(file):
            data, lines = yaml_text.parse(storage.read(file).decode(), source=file)
            return reader.build(ModelConfig, data, source=file, lines=lines)
        if self.run is not None:
            return load_model_config(self.run.model)
        raise CheckpointError(
            f"{self.where} has no {store.MODEL}, so its model is not known",
            hint="name the run's folder, which has a model.yaml",
        )

    def weights(self) -> Weights:
        from ..checkpoints.weights import read_weights

        return read_weights(self.where, self._kind)

    def fill(self, fragments: Sequence[Fragment], group: ProcessGroup | None) -> None:
        from ..checkpoints.weights import fill_weights

        fill_weights(self.where, fragments, self._kind, group)

    @property
    def _kind(self) -> str:
        from ..checkpoints.kinds import AVERAGE, MASTER

        return AVERAGE if self.average else MASTER


@dataclass(frozen=True)
class ModelFolder:
    """A folder in a format that `headrace models convert` reads."""

    where: str

    @cached_property
    def _read(self) -> tuple[ModelConfig, Weights]:
        from ...models.conversion.folders import read_model

        return read_model(self.where)

    @property
    def model(self) -> ModelConfig:
        return self._read[0]

    def weights(self) -> Weights:
        return self._read[1]

    def fill(self, fragments: Sequence[Fragment], group: ProcessGroup | None) -> None:
        weights = self.weights()
        for fragment in fragments:
            fragment.take(weights[fragment.parameter])


def find(path: str, step: int | None = None, *, average: bool = False) -> WeightSource:
    """Find the source at a path; for a run, the checkpoint at `step` (default: the newest).
    `average` chooses the weights' moving average."""
    source = _find(path, step)
    if not average:
        return source
    if not isinstance(source, Checkpoint):
        raise CheckpointError(
            f"{path} holds weights alone: there is no moving average beside them",
            hint="leave out --ema, or name a run that trained with optimizer.ema",
        )
    return replace(source, average=True)


def _find(path: str, step: int | None) -> WeightSource:
    folder = Path(path)
    run = RunFolder(path)
    if storage.is_local(path) and run.begun:
        return Checkpoint(
            _choose([str(p) for p in store.committed(run.checkpoints)], path, step), run
        )
    if storage.is_local(path) and run.request:
        raise CheckpointError(f"{path} holds no weights{run.request}", hint=run.hint)
    siblings_folder, _, folder_name = path.rstrip("/").rpartition("/")
    if step is None and store.NAME.match(folder_name):
        if storage.exists(storage.join(path, store.MANIFEST)):
            parent = RunFolder(folder.absolute().parent.parent)
            local = storage.is_local(path) and parent.begun
            return Checkpoint(path.rstrip("/"), parent if local else None)
        siblings = [name for name in storage.names(siblings_folder) if store.NAME.match(name)]
        if siblings:
            # Raises, with the steps that exist.
            _choose(siblings, siblings_folder, store.parse_step(path))
    elif not storage.is_local(path):
        return Checkpoint(_choose(store.list_complete(path), path, step))
    else:
        from ...models.conversion.folders import MARK_FILES

        if any((folder / mark).is_file() for mark in MARK_FILES.values()):
            return ModelFolder(path)
    hint = (
        "name a run's folder, a checkpoint (…/checkpoints/step-00000500, or its s3:// URL), or a "
        "folder of transformers (config.json) or of Vortex (config.yml)"
    )
    if storage.is_local(path) and not folder.exists():
        raise CheckpointError(f"{path} does not exist", hint=path_hint(path, hint))
    raise CheckpointError(f"{path} holds no weights", hint=hint)


def check(source: WeightSource, model: ModelConfig, *, moments: bool) -> None:
    """Refuse initial weights whose parameters differ from the model's in name or shape."""
    if moments and not isinstance(source, Checkpoint):
        raise CheckpointError(
            f"init_from.moments is set, and {source.where} holds weights alone",
            hint="leave out init_from.moments, or name a run of headrace",
        )
    source_shapes, model_shapes = _parameter_shapes(source.model), _parameter_shapes(model)
    differences = [
        f"{parameter}: {source_shapes.get(parameter, 'none')} there, "
        f"{model_shapes.get(parameter, 'none')} here"
        for parameter in model_shapes | source_shapes
        if source_shapes.get(parameter) != model_shapes.get(parameter)
    ]
    if differences:
        shown = [f"    {line}" for line in differences[:8]] + ["    …"] * (len(differences) > 8)
        raise CheckpointError(
            f"the weights of {source.where} belong to another model",
            where="\n" + "\n".join(shown),
            hint="leave out --model: the run then takes the model of these weights",
        )


def _parameter_shapes(model: ModelConfig) -> dict[str, list[int]]:
    """Return shapes by logical name."""
    from ...models.accounting.count import build_meta

    parameters = build_meta(model).named_parameters()
    return {name: list(parameter.shape) for name, parameter in parameters}


def _choose(checkpoints: list[str], path: str, step: int | None) -> str:
    """Return the newest checkpoint, or the newest at `step`."""
    steps = [store.parse_step(checkpoint) for checkpoint in checkpoints]
    if step is None and checkpoints:
        return checkpoints[-1]
    if step in steps:
        return checkpoints[len(steps) - 1 - steps[::-1].index(step)]
    if not checkpoints:
        raise CheckpointError(
            f"{path} has no checkpoint yet",
            hint="wait until the run has saved one (`checkpoints.every`), or name another run",
        )
    raise CheckpointError(
        f"{path} has no checkpoint of step {step}",
        hint=f"name a step that has one: {', '.join(map(str, steps))}",
    )
