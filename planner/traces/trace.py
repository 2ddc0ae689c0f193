"""Traces: the operations of one layer of each kind, and of attention by a ring.

Nothing is computed: a layer of each kind runs forward and backward on fake tensors, one row of the
asked length. On a GPU the fused kernels are recorded by name, elsewhere their plain references. The
trace is stored (models/accounting/stored.py), because it takes seconds.

A rank of a ring does not compute a part of the attention of whole rows: it computes tiles, or calls
of fused attention on parts of rows, and merges them. So the ring alone runs on tensors without
numbers. All hops but the first are alike: a long ring follows from two short ones. Where fused
attention computes the hops, the shapes of all operations grow with a rank's part of the rows, so
that one part stands for all. Where tiles do, their rate is measured (`ring_attention` of the
hardware file), as single operations on tiles are far from the rates of large ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...models.accounting.sorts import find_layer_kinds, reduce_to_kinds
from ...models.accounting.stored import load_or_compute
from ..grid.split import Direction
from .work import Work, counted

if TYPE_CHECKING:
    from ...models.config.config import ModelConfig
    from ...models.config.options.precision import Precision
    from ...models.parallel.ring import Tile
    from .recorder import Recorder

PLANNER = Path(__file__).parents[1]
"""Modules that record operations."""


@dataclass(frozen=True)
class LayerTrace:
    """A layer of one kind."""

    name: str
    layer: dict[str, Any]
    """Operators of the layer."""
    forward: tuple[Work, ...]
    backward: tuple[Work, ...]
    stream: int
    """Bytes of the layer's input."""
    calls: int
    """Operator calls."""


@dataclass(frozen=True)
class ModelTrace:
    """One row of `seq_len` tokens."""

    seq_len: int
    width: int
    layers: tuple[int, ...]
    """Kind of each layer."""
    kinds: tuple[LayerTrace, ...]
    head: LayerTrace
    """Final norm, logits and loss."""


def trace(model: ModelConfig, seq_len: int, precision: Precision, device: str) -> ModelTrace:
    """Return the stored trace, or make it."""
    question = f"operations {model!r} {seq_len} {precision!r} {device}"
    make = partial(_make, model, seq_len, precision, device)
    return load_or_compute(question, make, asdict, _from_json, PLANNER)


def _from_json(data: Any) -> ModelTrace:
    def layer(each: Any) -> LayerTrace:
        work = {
            name: tuple(Work.from_json(w) for w in each[name]) for name in ("forward", "backward")
        }
        return LayerTrace(**{**each, **work})

    kinds = tuple(layer(each) for each in data["kinds"])
    return ModelTrace(
        **{**data, "layers": tuple(data["layers"]), "kinds": kinds, "head": layer(data["head"])}
    )


def _make(model: ModelConfig, seq_len: int, precision: Precision, device: str) -> ModelTrace:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from ...models.config.precision import compute_dtype
    from ...models.kernels.choice import as_on_gpu
    from ...models.model.model import Model
    from ...models.operators import BatchContext

    kinds, layers = find_layer_kinds(model)
    config = reduce_to_kinds(model)
    found = []
    standard = torch.get_default_dtype()
    torch.set_default_dtype(compute_dtype(precision))
    try:
        with FakeTensorMode(), as_on_gpu() if device == "cuda" else nullcontext():
            whole = Model(config)
            u = torch.empty(1, seq_len, config.width, requires_grad=True)
            batch = BatchContext(torch.arange(seq_len).unsqueeze(0), embeddings=u)
            for layer, block in zip(kinds, whole.typed_blocks(), strict=True):
                shared = whole.shared_block(layer)
                forward, backward = _record(lambda b=block, s=shared: b(u, batch, None, s), seq_len)
                found.append(
                    LayerTrace(
                        name=str(layer) + (f"/{layer.mlp}" if layer.mlp else ""),
                        layer=asdict(layer),
                        forward=forward,
                        backward=backward,
                        stream=u.nbytes,
                        calls=len(layer.branches) + (layer.shared is not None),
                    )
                )
            targets = torch.zeros(1, seq_len, dtype=torch.int64)
            weights = torch.ones(1, seq_len, dtype=torch.float32)

            def loss() -> Any:
                return whole.unembed.loss(whole.norm(u), targets, weights, 0.0, whole.axes.tensor)

            forward, backward = _record(loss, seq_len)
    finally:
        torch.set_default_dtype(standard)
    head = LayerTrace("head", {}, forward, backward, u.nbytes, 1)
    return ModelTrace(seq_len, config.width, layers, tuple(found), head)


def _record(run: Any, seq_len: int) -> tuple[tuple[Work, ...], tuple[Work, ...]]:
    """Return the operations of a computation's forward and backward pass."""
    import torch

    from .recorder import Recorder

    with Recorder(seq_len) as forward:
        outputs = run()
    wanted = [each for each in outputs if each.requires_grad]
    with Recorder(seq_len) as backward:
        torch.autograd.backward(wanted, [torch.ones_like(each) for each in wanted])
    return counted(forward.work), counted(backward.work)


RANKS, WINDOW_RANKS = 4, 12
"""Ranks of the longest ring that runs; with a window, which far keys are outside of."""
PART = 512
"""Tokens of a rank where fused attention runs."""


@dataclass(frozen=True)
class Ring:
    """Attention of a row by a ring."""

    heads: int
    kv_heads: int
    width: int
    """Channels of a head."""
    window: int | None
    part: int
    """Tokens of a rank."""
    precision: Precision
    device: str


@dataclass(frozen=True)
class Operations:
    """Operations of a rank in both passes."""

    forward: tuple[Work, ...]
    backward: tuple[Work, ...]

    def of(self, direction: Direction) -> tuple[Work, ...]:
        return self.forward if direction == "forward" else self.backward

    @property
    def tiled(self) -> bool:
        """True if no fused attention computes the hops."""
        return any(work.kind == "pairs" for work in self.forward)


@cache
def operations(ring: Ring, ranks: int) -> Operations:
    """Return the operations of a rank for one row."""
    if ring.device == "cuda" and ring.window is None:
        found = _of_ranks(replace(ring, part=PART), ranks)
        if not found.tiled:
            return mapped(partial(_scaled, factor=ring.part / PART), found)
    return _of_ranks(ring, ranks)


def _scaled(work: Work, factor: float) -> Work:
    """Return an operation of fused attention on longer parts."""
    if work.kind == "attention":
        width, heads, length, keys = work.shape
        return replace(work, shape=(width, heads, round(length * factor), keys))
    return replace(work, bytes=round(work.bytes * factor))


def mapped(change: Callable[[Work], Work], found: Operations) -> Operations:
    """Return the operations, each changed."""
    return Operations(tuple(map(change, found.forward)), tuple(map(change, found.backward)))


def _of_ranks(ring: Ring, ranks: int) -> Operations:
    """Return the operations of a rank; those of long rings follow from two that differ by one."""
    longest = WINDOW_RANKS if ring.window else RANKS
    if ranks <= longest:
        return _stored(ring, ranks)
    shorter, longer = (_stored(ring, number) for number in (longest - 1, longest))
    more = ranks - longest
    return Operations(
        _extended(shorter.forward, longer.forward, more),
        _extended(shorter.backward, longer.backward, more),
    )


def _extended(shorter: Sequence[Work], longer: Sequence[Work], more: int) -> tuple[Work, ...]:
    """Return the operations with so many hops more; a hop is what the longer ring has more."""
    before = {_name(work): work for work in shorter}
    found = []
    for work in longer:
        less = before.get(_name(work), replace(work, count=0))
        if work.kind == "memory":
            found.append(replace(work, bytes=work.bytes + more * (work.bytes - less.bytes)))
        else:
            found.append(replace(work, count=work.count + more * (work.count - less.count)))
    return tuple(work for work in found if work.count)


def _name(work: Work) -> tuple[Any, ...]:
    return work.kind, work.name, work.shape, work.saved


def _stored(ring: Ring, ranks: int) -> Operations:
    make = partial(_record_ring, ring, ranks)
    return load_or_compute(
        f"ring attention {ring!r} {ranks}", make, asdict, _operations_from_json, PLANNER
    )


def _operations_from_json(data: Any) -> Operations:
    return Operations(
        *(tuple(Work.from_json(each) for each in data[name]) for name in ("forward", "backward"))
    )


def _record_ring(ring: Ring, ranks: int) -> Operations:
    """Record the operations of the last rank, which has all keys before its part."""
    import torch

    from ...models.config.options.attention import AttentionOptions
    from ...models.config.precision import compute_dtype
    from ...models.kernels.choice import as_on_gpu
    from ...models.operators import BatchContext
    from ...models.operators.attention import Attention
    from ...models.parallel.axes import Axes, Axis
    from .recorder import Recorder

    options = AttentionOptions(
        heads=ring.heads, kv_heads=ring.kv_heads, head_dim=ring.width, window=ring.window
    )
    axes = Axes(context=Axis(None, ranks - 1, ranks), attention="ring")
    dtype = compute_dtype(ring.precision)
    on_gpu = as_on_gpu() if ring.device == "cuda" else nullcontext()
    with on_gpu, torch.device("meta"):
        operator = Attention(options, ring.width)
        batch = BatchContext(torch.arange(ring.part).unsqueeze(0), axes=axes)
        q, k, v = (
            torch.empty(1, ring.part, heads, ring.width, dtype=dtype, requires_grad=True)
            for heads in (ring.heads, ring.kv_heads, ring.kv_heads)
        )
        with Recorder(ring.part) as forward, _one_tile_of_each_size(forward, ring):
            y = operator.attend_across_ranks(q, k, v, batch)
        with Recorder(ring.part) as backward, _one_tile_of_each_size(backward, ring):
            torch.autograd.grad(y, (q, k, v), torch.empty_like(q))
    return Operations(counted(forward.work), counted(backward.work))


@contextmanager
def _one_tile_of_each_size(recorder: Recorder, ring: Ring) -> Iterator[None]:
    """Let a ring compute one tile of each size, whose operations count for all of the size. Their
    pairs of queries and keys are recorded too."""
    shape = ring.width, ring.heads, ring.part
    from ...models.parallel import ring as module

    def one_of_each(tiles: Iterator[Tile]) -> Iterator[Tile]:
        alike: dict[tuple[int, int, bool], list[Tile]] = {}
        for tile in tiles:
            queries, keys = (each.stop - each.start for each in (tile.queries, tile.keys))
            alike.setdefault((queries, keys, tile.mask is None), []).append(tile)
        for (queries, keys, _), each in alike.items():
            pairs = queries * keys * len(each)
            recorder.work.append(Work("pairs", "", shape, pairs, 0, recorder.part_of))
            recorder.times = len(each)
            yield each[0]
            recorder.times = 1

    before, module.around_tiles = module.around_tiles, one_of_each
    try:
        yield
    finally:
        module.around_tiles = before
