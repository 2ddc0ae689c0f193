"""Where weights come from: a checkpoint, or a folder that holds a model.

    runs/x · runs/x/checkpoints/step-00000500 · s3://bucket/x/step-00000500.7c3f9a1b
    a folder with config.json (transformers) · one with config.yml (Vortex)

A person names any of them by one path; `trainer export`, `trainer sample` and `--init-from` take
it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ...console.errors import CheckpointError
from ...dataplane.storage import storage
from ..checkpoints import store
from ..folder import RunFolder

if TYPE_CHECKING:
    from ...models.config import ModelConfig
    from ...models.weights import Weights


class WeightSource(Protocol):
    """Weights by their logical names, and the model that they are of."""

    @property
    def where(self) -> str: ...

    @property
    def model(self) -> ModelConfig: ...

    def weights(self) -> Weights:
        """Each is read when it is asked for."""
        ...


@dataclass(frozen=True, kw_only=True)
class InitFrom:
    """Begin with other weights than random ones. The stream begins at its start."""

    path: str
    """Another run's folder, a checkpoint (its folder or s3:// URL), or a folder of transformers or
    of Vortex."""
    step: int | None = None
    """Which checkpoint of a run; the newest, if left out."""
    moments: bool = False
    """Take Adam's moments as well."""


@dataclass(frozen=True)
class Checkpoint:
    """One of ours. It has Adam's moments as well."""

    where: str
    run: RunFolder | None = None
    """Of the run that saved it, if that is known."""

    @property
    def step(self) -> int:
        return store.step_of(self.where)

    @property
    def model(self) -> ModelConfig:
        from ...console import config as reader
        from ...console import yaml_text
        from ...models.config import ModelConfig, load_model_config

        own = storage.join(store.place(self.where), store.MODEL)
        if storage.exists(own):
            data, lines = yaml_text.parse(storage.read(own).decode(), source=own)
            return reader.build(ModelConfig, data, source=own, lines=lines)
        if self.run is not None:
            return load_model_config(self.run.model)
        raise CheckpointError(
            f"{self.where} does not say what model it is of",
            hint="name the run's folder, whose model.yaml does",
        )

    def weights(self) -> Weights:
        from ..checkpoints.weights import weights

        return weights(self.where)


@dataclass(frozen=True)
class Folder:
    """A model in a folder, in a format that `headrace models convert` knows."""

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


def find(path: str, step: int | None = None) -> WeightSource:
    """What a path names; of a run, its newest checkpoint or that of a step."""
    folder = Path(path)
    run = RunFolder(path)
    if storage.is_local(path) and run.begun:
        return Checkpoint(
            _choose([str(p) for p in store.committed(run.checkpoints)], path, step), run
        )
    above, _, name = path.rstrip("/").rpartition("/")
    if step is None and store.NAME.match(name):
        if storage.exists(storage.join(path, store.MANIFEST)):
            beside = RunFolder(folder.absolute().parent.parent)
            local = storage.is_local(path) and beside.begun
            return Checkpoint(path.rstrip("/"), beside if local else None)
        if others := [other for other in storage.names(above) if store.NAME.match(other)]:
            _choose(others, above, store.step_of(path))  # says which steps there are
    elif not storage.is_local(path):
        return Checkpoint(_choose(store.whole(path), path, step))
    else:
        from ...models.conversion.folders import FORMATS

        if any((folder / format.mark).is_file() for format in FORMATS.values()):
            return Folder(path)
    raise CheckpointError(
        f"{path} holds no weights",
        hint="name a run's folder, a checkpoint (…/checkpoints/step-00000500, or its s3:// URL), "
        "or a folder of transformers (config.json) or of Vortex (config.yml)",
    )


def check(origin: WeightSource, model: ModelConfig, *, moments: bool) -> None:
    """Weights to begin with must be those of the model, parameter by parameter."""
    if moments and not isinstance(origin, Checkpoint):
        raise CheckpointError(
            f"init_from.moments is set, and {origin.where} holds weights alone",
            hint="leave out init_from.moments, or name a run of headrace",
        )
    theirs, ours = shapes(origin.model), shapes(model)
    wrong = [
        f"{name}: {theirs.get(name, 'none')} there, {ours.get(name, 'none')} here"
        for name in (*ours, *(name for name in theirs if name not in ours))
        if theirs.get(name) != ours.get(name)
    ]
    if wrong:
        shown = [f"    {line}" for line in wrong[:8]] + ["    …"] * (len(wrong) > 8)
        raise CheckpointError(
            f"the weights of {origin.where} are of another model",
            where="\n" + "\n".join(shown),
            hint="leave out --model, so that the run takes the model that they are of",
        )


def shapes(model: ModelConfig) -> dict[str, list[int]]:
    """Of a model's parameters, by their logical names."""
    from ...models.accounting.count import build_meta

    return {name: list(each.shape) for name, each in build_meta(model).named_parameters()}


def _choose(found: list[str], path: str, step: int | None) -> str:
    steps = [store.step_of(each) for each in found]
    if step is None and found:
        return found[-1]
    if step in steps:
        return found[len(steps) - 1 - steps[::-1].index(step)]
    if not found:
        raise CheckpointError(f"{path} has no checkpoint yet")
    raise CheckpointError(
        f"{path} has no checkpoint of step {step}",
        hint=f"name a step that has one: {', '.join(map(str, steps))}",
    )
