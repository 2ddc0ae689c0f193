"""Sources of weights: a checkpoint, or a folder that holds a model.

    runs/x · runs/x/checkpoints/step-00000500 · s3://bucket/x/step-00000500.7c3f9a1b
    a folder with config.json (transformers) · a folder with config.yml (Vortex)

`trainer export`, `trainer sample` and `--init-from` take any of these as one path.
"""

from __future__ import annotations

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
    from ...models.config.config import ModelConfig
    from ...models.weights import Weights


class WeightSource(Protocol):
    """Weights by logical name, and the configuration of their model."""

    @property
    def where(self) -> str: ...

    @property
    def model(self) -> ModelConfig: ...

    def weights(self) -> Weights:
        """Return the weights; each tensor is read when it is asked for."""
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
    """A checkpoint of headrace. It holds the optimizer's state as well."""

    where: str
    run: RunFolder | None = None
    """Folder of the run that saved it, if it is known."""
    average: bool = False
    """Read the moving average of the weights."""

    @property
    def step(self) -> int:
        return store.step_of(self.where)

    @property
    def model(self) -> ModelConfig:
        from ...console import config as reader
        from ...console import yaml_text
        from ...models.config.config import ModelConfig, load_model_config

        own = storage.join(store.place(self.where), store.MODEL)
        if storage.exists(own):
            data, lines = yaml_text.parse(storage.read(own).decode(), source=own)
            return reader.build(ModelConfig, data, source=own, lines=lines)
        if self.run is not None:
            return load_model_config(self.run.model)
        raise CheckpointError(
            f"{self.where} has no {store.MODEL}, so its model is not known",
            hint="name the run's folder, which has a model.yaml",
        )

    def weights(self) -> Weights:
        from ..checkpoints.kinds import AVERAGE, MASTER
        from ..checkpoints.weights import weights

        return weights(self.where, AVERAGE if self.average else MASTER)


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


def find(path: str, step: int | None = None, *, average: bool = False) -> WeightSource:
    """Return the source at a path; for a run, its newest checkpoint or that of a step. `average`
    chooses the moving average of the weights."""
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
    above, _, name = path.rstrip("/").rpartition("/")
    if step is None and store.NAME.match(name):
        if storage.exists(storage.join(path, store.MANIFEST)):
            parent = RunFolder(folder.absolute().parent.parent)
            local = storage.is_local(path) and parent.begun
            return Checkpoint(path.rstrip("/"), parent if local else None)
        if others := [other for other in storage.names(above) if store.NAME.match(other)]:
            _choose(others, above, store.step_of(path))  # raises, with the steps that exist
    elif not storage.is_local(path):
        return Checkpoint(_choose(store.whole(path), path, step))
    else:
        from ...models.conversion.folders import FORMATS

        if any((folder / format.mark_file).is_file() for format in FORMATS.values()):
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
    theirs, ours = _shapes(source.model), _shapes(model)
    wrong = [
        f"{name}: {theirs.get(name, 'none')} there, {ours.get(name, 'none')} here"
        for name in (*ours, *(name for name in theirs if name not in ours))
        if theirs.get(name) != ours.get(name)
    ]
    if wrong:
        shown = [f"    {line}" for line in wrong[:8]] + ["    …"] * (len(wrong) > 8)
        raise CheckpointError(
            f"the weights of {source.where} belong to another model",
            where="\n" + "\n".join(shown),
            hint="leave out --model: the run then takes the model of these weights",
        )


def _shapes(model: ModelConfig) -> dict[str, list[int]]:
    """Return the shape of each parameter by its logical name."""
    from ...models.accounting.count import build_meta

    named = build_meta(model).named_parameters()
    return {name: list(parameter.shape) for name, parameter in named}


def _choose(checkpoints: list[str], path: str, step: int | None) -> str:
    """Return the newest checkpoint, or the newest of a step."""
    steps = [store.step_of(checkpoint) for checkpoint in checkpoints]
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
