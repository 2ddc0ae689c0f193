"""Where weights and rows lie: the ranks that share them, and the number formats.

ranks = replicas × cp × tp     cp ranks share a row, tp ranks every matrix
shard                          consecutive ranks of replicas × cp with one copy of the weights
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from ...console import config as reader
from ...console.errors import LayoutError
from ...models.accounting.count import build_meta
from ...models.config.config import ModelConfig
from ...models.config.options.precision import PRECISIONS, Fp8Config, Precision, default_precision
from ...models.transforms.fp8 import iterate_matrices
from ..cluster import ranks
from ..layout.checks import problems
from ..layout.config import LayoutConfig
from ..layout.devices import DeviceKind, choose_device, fp8_problem
from ..weights.source import Checkpoint, WeightSource


@dataclass(frozen=True)
class Placement:
    """The ranks that share rows and weights, their device, and the precision."""

    layout: LayoutConfig
    shard: int
    """Ranks that share a copy of the weights, gathered block by block; 1: nothing is gathered."""
    precision: Precision
    device: Literal["cpu", "cuda"]

    @classmethod
    def choose(
        cls,
        model: ModelConfig,
        precision: Precision,
        device: DeviceKind,
        *,
        tp: int = 1,
        cp: int = 1,
        shard: int = 1,
    ) -> Placement:
        """Place a model; raise if `tp` ranks cannot share its matrices."""
        layout = choose_layout(model, tp, cp)
        if reasons := list(problems(layout, layout.shards, model, ())):
            raise LayoutError(
                f"--tp {tp} does not shard this model",
                where="\n" + "\n".join(f"    {reason}" for reason in reasons),
                hint="choose a divisor of these sizes, or share the weights by --shard",
            )
        return cls(layout, shard, precision, choose_device(device))

    @property
    def row_ranks(self) -> int:
        """Ranks that compute a row together."""
        return self.layout.tp * self.layout.cp

    @property
    def options(self) -> str:
        """The options of a command that choose these ranks."""
        degrees = {"tp": self.layout.tp, "cp": self.layout.cp, "shard": self.shard}
        words = [f"--{name} {degree}" for name, degree in degrees.items() if degree > 1]
        return " ".join(words) or "--cp 1"

    @property
    def number_format(self) -> dict[str, Any]:
        """What decides how results are rounded; folders of results store it."""
        fp8 = self.precision.fp8
        return {"dtype": self.precision.compute} | (
            {} if fp8 is None else {"fp8": reader.plain(fp8)}
        )

    def check_ranks(self) -> None:
        """Raise unless the ranks that were started make up whole rows and copies of the weights."""
        world = int(os.environ["WORLD_SIZE"]) if ranks.is_rank() else 1
        for options, number in self._divisors():
            if world % number:
                raise LayoutError(
                    f"{options} does not divide {world} process{'es' * (world > 1)}",
                    hint="start them with torchrun: "
                    f"torchrun --nproc-per-node {number} $(which trainer) …",
                )

    def _divisors(self) -> Iterator[tuple[str, int]]:
        """Yield options, and the number of ranks that they need."""
        tp = f"--tp {self.layout.tp} × " * (self.layout.tp > 1)
        yield f"{tp}--cp {self.layout.cp}", self.row_ranks
        yield f"{tp}--shard {self.shard}", self.layout.tp * self.shard


def choose_layout(model: ModelConfig, tp: int, cp: int) -> LayoutConfig:
    """Return the layout in which `tp` × `cp` ranks share a row: attention by heads, if they
    divide."""
    heads = [options.attention_heads for options in model.operators.values()]
    divisible = all(not count or count % (tp * cp) == 0 for count in heads)
    return LayoutConfig(tp=tp, cp=cp, attention="a2a" if divisible else "ring")


def choose_precision(
    weights: WeightSource, name: str | None, device: DeviceKind, *, as_trained: bool = True
) -> Precision:
    """Return the named precision. By default `as_trained` the run's, or the device's for weights
    without a run; else always the device's."""
    kind, stored = choose_device(device), _run_precision(weights)
    if name is None:
        precision = (stored if as_trained else None) or default_precision(kind)
    else:
        precision = stored if stored is not None and stored.name == name else PRECISIONS[name]
    if precision.fp8 is None:
        return precision
    if problem := fp8_problem() if kind == "cuda" else None:
        raise LayoutError(
            f"precision fp8 cannot run on this machine: {problem}", hint="--precision bf16"
        )
    matrices = iterate_matrices(build_meta(weights.model), precision.fp8)
    if all(matrix.reason is not None for matrix in matrices):
        raise LayoutError(
            "precision fp8 computes no matrix of this model in FP8",
            hint="--precision bf16; `headrace models show MODEL --precision fp8` has the reasons",
        )
    return precision


def _run_precision(weights: WeightSource) -> Precision | None:
    """Return the precision of the weights' run; None for weights without a run."""
    run = weights.run if isinstance(weights, Checkpoint) else None
    if run is None or not run.run.exists():
        return None
    data, _ = reader.read_yaml(run.run)
    precision = PRECISIONS.get(data.get("precision", ""))
    if precision is None or "fp8" not in data:
        return precision
    fp8 = data["fp8"] and reader.build(Fp8Config, data["fp8"], source=str(run.run))
    return replace(precision, fp8=fp8)
