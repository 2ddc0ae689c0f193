"""Traces, shards and shared modules for the memory accounting, from a model's configuration."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ...models.accounting import step
from ...models.accounting.layer_kinds import find_layer_kinds, reduce_to_kinds
from ...models.accounting.passes import Tracer
from ...models.accounting.shape import Shape
from ...models.accounting.shards import load_shards
from ...models.accounting.state import Degrees, Shards
from ...models.accounting.stored import load_or_compute
from ...models.config.config import chunk_users
from ...models.config.options.names import LinearForm
from ...models.config.options.precision import Precision
from ...models.parallel.local_shard import LocalShard
from ...trainer.accounting.memory import TRAINER
from ...trainer.accounting.state import ParameterState
from ...trainer.run.config import RunConfig
from ..grid.split import Split
from .footprints import Traces
from .parts import PartTable

if TYPE_CHECKING:
    from ...models.config.config import ModelConfig


class ConfigParts:
    """`ModelParts` from a configuration, for one sequence length."""

    def __init__(
        self, model: ModelConfig, run: RunConfig, seq_len: int, precision: Precision, device: str
    ) -> None:
        self.model, self.seq_len = model, seq_len
        self.precision, self.device = precision, device
        self.threads = count_threads(run, device)
        _, self.layers = find_layer_kinds(model)
        """Kind by layer."""

    def _shape(self, split: Split, ep: int = 1, linear: LinearForm = "torch") -> Shape:
        return Shape(
            rows=split.rows,
            seq_len=self.seq_len,
            precision=self.precision,
            device=self.device,
            degrees=Degrees(tp=split.tp, cp=split.cp, ep=ep),
            **split.row_forms,
            linear=linear,
            threads=self.threads,
        )

    def traces(self, split: Split, ep: int, linear: LinearForm) -> Traces:
        return Tracer(self.model, self._shape(split, ep, linear))

    def input_bytes(self, split: Split) -> int:
        return step.input_bytes(self._shape(split))

    def stream_bytes(self, split: Split) -> int:
        return step.stream_bytes(self._shape(split), self.model.width)

    def parameters(self, run: RunConfig, *, by_kind: bool) -> ParameterState:
        model = reduce_to_kinds(self.model) if by_kind else self.model
        key = f"parameters {model!r} {run.optimizer!r} {self.precision!r}"
        compute = partial(_compute_parameters, run, model, self.precision)
        return load_or_compute(key, compute, ParameterState.pack, ParameterState.unpack, TRAINER)

    def shards(self, tp: int, ep: int) -> Shards:
        return load_shards(self.model, tp, ep)

    def shards_by_part(self, pp: int, tp: int, ep: int) -> PartTable[Shards]:
        layers: list[dict[str, LocalShard]] = [{} for _ in {*self.layers}]
        first: dict[str, LocalShard] = {}
        last: dict[str, LocalShard] = {}
        modules: dict[str, dict[str, LocalShard]] = defaultdict(dict)
        for name, shard in load_shards(reduce_to_kinds(self.model), tp, ep).items():
            root, _, local_name = name.partition(".")
            parent = local_name.partition(".")[0]
            if root == "blocks":
                layers[int(parent)][name] = shard
            elif root == "shared":
                modules[parent][name] = shard
            else:
                (first if root in ("embedding", "positions") else last)[name] = shard
        if self.model.tie_embeddings and pp > 1:
            last |= first
        return PartTable(layers, first, last, modules)

    def users(self, chunks: Sequence[range]) -> Mapping[str, set[int]]:
        return chunk_users(self.model, chunks)


def count_threads(run: RunConfig, device: str) -> int:
    """Return the threads per rank.

    A plan's machine may not be this one: without `threads` in the run, count a single thread.
    """
    return run.threads or 1 if device == "cpu" else 1


def _compute_parameters(run: RunConfig, model: ModelConfig, precision: Precision) -> ParameterState:
    from ...models.accounting.count import build_meta
    from ...trainer.accounting.parameters import parameter_state

    return parameter_state(run, build_meta(model), precision)
