"""A model as the memory of its ranks needs it (rank_memory.py): traces, shards, modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ...models.accounting.passes import Tracer
from ...models.accounting.shape import Shape
from ...models.accounting.shards import load_shards
from ...models.accounting.sorts import find_layer_kinds, reduce_to_kinds
from ...models.accounting.state import Degrees, Shards
from ...models.accounting.step import input_bytes, stream_bytes
from ...models.accounting.stored import load_or_compute
from ...models.config.config import chunk_users
from ...models.config.options.names import LinearForm
from ...models.config.options.precision import Precision
from ...trainer.accounting.memory import TRAINER
from ...trainer.accounting.state import ParameterState
from ...trainer.run.config import RunConfig
from ..grid.split import Split
from .footprints import Traces
from .rank_memory import KindShards

if TYPE_CHECKING:
    from ...models.config.config import ModelConfig


class OwnParts:
    """A model of ours, with rows of one length."""

    def __init__(
        self, model: ModelConfig, run: RunConfig, seq_len: int, precision: Precision, device: str
    ) -> None:
        self.model, self.seq_len = model, seq_len
        self.precision, self.device = precision, device
        self.threads = threads_of(run, device)
        _, self.layers = find_layer_kinds(model)
        """Kind of each layer."""

    def _shape(self, split: Split, ep: int = 1, linear: LinearForm = "torch") -> Shape:
        return Shape(
            rows=split.rows,
            seq_len=self.seq_len,
            precision=self.precision,
            device=self.device,
            degrees=Degrees(tp=split.tp, cp=split.cp, ep=ep),
            attention=split.attention,
            hyena_li=split.hyena_li,
            linear=linear,
            threads=self.threads,
        )

    def traces(self, split: Split, ep: int, linear: LinearForm) -> Traces:
        return Tracer(self.model, self._shape(split, ep, linear))

    def inputs(self, split: Split) -> int:
        return input_bytes(self._shape(split))

    def stream(self, split: Split) -> int:
        return stream_bytes(self._shape(split), self.model.width)

    def parameters(self, run: RunConfig, *, whole: bool) -> ParameterState:
        model = self.model if whole else reduce_to_kinds(self.model)
        question = f"parameters {model!r} {run.optimizer!r} {self.precision!r}"
        make = partial(_parameters, run, model, self.precision)
        return load_or_compute(
            question, make, ParameterState.packed, ParameterState.unpacked, TRAINER
        )

    def shards(self, tp: int, ep: int) -> Shards:
        return load_shards(self.model, tp, ep)

    def shards_by_kind(self, tp: int, ep: int) -> KindShards:
        layers: list[dict[str, Any]] = [{} for _ in {*self.layers}]
        first: dict[str, Any] = {}
        last: dict[str, Any] = {}
        modules: dict[str, dict[str, Any]] = {}
        for name, shard in load_shards(reduce_to_kinds(self.model), tp, ep).items():
            root, _, rest = name.partition(".")
            if root == "blocks":
                layers[int(rest.partition(".")[0])][name] = shard
            elif root == "shared":
                modules.setdefault(rest.partition(".")[0], {})[name] = shard
            else:
                (first if root in ("embedding", "positions") else last)[name] = shard
        return list(layers), first, last, dict(modules)

    def users(self, chunks: Sequence[range]) -> Mapping[str, set[int]]:
        return chunk_users(self.model, chunks)

    def tied(self, pp: int) -> bool:
        return self.model.tie_embeddings and pp > 1


def threads_of(run: RunConfig, device: str) -> int:
    """Return the threads of a rank that are counted. A plan's machine may not be this one: without
    `threads` in the run, one is counted."""
    return run.threads or 1 if device == "cpu" else 1


def _parameters(run: RunConfig, model: ModelConfig, precision: Precision) -> ParameterState:
    from ...models.accounting.count import build_meta
    from ...trainer.accounting.parameters import parameter_state

    return parameter_state(run, build_meta(model), precision)
