"""Work of the ranks of `Ranks`: a part of an operator or of a model, and its gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import cache, partial
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from support.trained import trained_parameters
from torch import Tensor
from torch.nn import functional as F

from headrace.models.config.config import ModelConfig
from headrace.models.config.options.precision import Fp8Config
from headrace.models.config.options.recompute import Recompute
from headrace.models.documents import Documents
from headrace.models.layers.attention import ring_flash as ring_flash_module
from headrace.models.layers.attention.ring_flash import FlashCall, ring_flash_attention
from headrace.models.layers.linear import OutputLinear
from headrace.models.model.model import Model
from headrace.models.parallel import halo, states
from headrace.models.parallel.axes import ALONE, Axes, Axis
from headrace.models.parallel.exchange import gather_rows, scatter_rows
from headrace.models.parallel.halo import receive_halo
from headrace.models.parallel.local_shard import LocalShard
from headrace.models.parallel.ring import zigzag as zigzag_module
from headrace.models.parallel.ring.attention import FirstKeys, ring_attention
from headrace.models.parallel.ring.circulation import KeysAndValues, Latents
from headrace.models.parallel.ring.zigzag import Zigzag
from headrace.models.transforms.fp8 import quantize
from headrace.trainer.layout.config import LayoutConfig
from headrace.trainer.layout.groups import Parallel, create_groups

Arrays = dict[str, np.ndarray]


def context_axis() -> Axis:
    return Axis(dist.group.WORLD, dist.get_rank(), dist.get_world_size())


@cache
def grid(tensor: int) -> tuple[Axis, Axis]:
    """Return the tensor and the context axis; neighbouring ranks share a tensor axis."""
    rank, ranks = dist.get_rank(), torch.arange(dist.get_world_size()).view(-1, tensor)
    axes = []
    for lines in (ranks, ranks.T):
        groups = [dist.new_group(line.tolist()) for line in lines]
        [mine] = [n for n, line in enumerate(lines) if rank in line]
        axes.append(Axis(groups[mine], lines[mine].tolist().index(rank), len(lines[mine])))
    return axes[0], axes[1]


def model_part(
    config: ModelConfig,
    weights: Arrays,
    tokens: np.ndarray,
    probe: np.ndarray,
    cuts: list[int] | None,
    *,
    tensor: int = 1,
    attention: str = "a2a",
    hyena_li: str = "states",
    delta: str = "states",
    recompute: Recompute = "none",
    training: bool = False,
    fp8: Fp8Config | None = None,
    fault: str | None = None,
) -> tuple[np.ndarray, float, dict[str, tuple[LocalShard, np.ndarray]]]:
    """Return this rank's part of the logits, the auxiliary losses, and its gradients with their
    local shards."""
    shared, axis = grid(tensor) if tensor > 1 else (ALONE, context_axis())
    model = quantize(Model(config).double(), fp8).train(training)
    model.load_state_dict({name: torch.from_numpy(w) for name, w in weights.items()})
    forms: dict[str, Any] = {"attention": attention, "hyena_li": hyena_li, "delta": delta}
    model.shard(Axes(tensor=shared, context=axis, **forms))
    model.set_recompute(recompute)
    ours = axis.part(tokens.shape[1])
    with FAULTS[fault]() if fault else nullcontext():
        documents = None
        if cuts is not None:
            whole = Documents.build(torch.tensor(cuts), tokens.shape)  # type: ignore[arg-type]
            documents = whole.shard(axis)
        hidden, losses = model.hidden(torch.from_numpy(tokens[:, ours]), documents)
        logits = model.logits(hidden)
        known = torch.from_numpy(probe[:, ours, shared.part(probe.shape[2])])
        # As in the trainer: auxiliary losses in proportion to the part's fraction of its row.
        total = (logits * known).sum() + losses.sum() / axis.size
        names, parameters = zip(*trained_parameters(model), strict=True)
        gradients = torch.autograd.grad(total, parameters, allow_unused=True)
    result = {
        name: (model.local_shards[name], gradient.numpy())
        for name, gradient in zip(names, gradients, strict=True)
        if gradient is not None
    }
    return logits.detach().numpy(), float(losses.detach().sum()), result


def share_of_loss(
    config: ModelConfig,
    weights: Arrays,
    tokens: np.ndarray,
    counted: np.ndarray,
    cuts: list[int],
    *,
    recompute: Recompute = "none",
    fp8: Fp8Config | None = None,
    fault: str | None = None,
) -> tuple[float, dict[str, tuple[LocalShard, np.ndarray]]]:
    """Return this rank's share of the loss under tensor parallelism, and its gradients with their
    local shards."""
    model = quantize(Model(config).double(), fp8)
    model.load_state_dict({name: torch.from_numpy(w) for name, w in weights.items()})
    model.shard(Axes(tensor=context_axis()))
    model.set_recompute(recompute)
    ids, w = torch.from_numpy(tokens), torch.from_numpy(counted)
    documents = Documents.build(torch.tensor(cuts), tuple(w.shape))  # type: ignore[arg-type]
    with FAULTS[fault]() if fault else nullcontext():
        hidden, losses = model.hidden(ids[:, :-1], documents)
        total = model.loss(hidden, ids[:, 1:], w, z_loss=1e-3)[0] + (losses * w.sum(1)).sum()
        names, parameters = zip(*trained_parameters(model), strict=True)
        gradients = torch.autograd.grad(total, parameters)
    result = {
        name: (model.local_shards[name], g.numpy())
        for name, g in zip(names, gradients, strict=True)
    }
    return float(total.detach()), result


@cache
def joined(tp: int = 1, cp: int = 1, ep: int = 1) -> Parallel:
    """Return this rank's process groups, created once for each layout."""
    return create_groups(LayoutConfig(tp=tp, cp=cp, ep=ep), "cpu", timedelta(minutes=5))


def share_of_objective(
    config: ModelConfig,
    weights: Arrays,
    tokens: np.ndarray,
    counted: np.ndarray,
    cuts: list[int],
    layout: dict[str, int],
    *,
    training: bool = True,
    recompute: Recompute = "none",
    fault: str | None = None,
) -> tuple[float, dict[str, tuple[LocalShard, np.ndarray]]]:
    """Return this rank's share of the objective, summed over its rows one by one, and its gradients
    with their local shards. `cuts` are the documents of a row."""
    parallel = joined(**layout)
    model = Model(config).double().train(training)
    model.load_state_dict({name: torch.from_numpy(w) for name, w in weights.items()})
    model.shard(parallel.axes)
    model.set_recompute(recompute)
    length = counted.shape[1]
    ours = parallel.axes.context.part(length)
    total = torch.zeros((), dtype=torch.float64)
    with FAULTS[fault]() if fault else nullcontext():
        for row in range(parallel.dp_rank, len(tokens), parallel.dp):
            ids, w = (torch.from_numpy(item[row : row + 1]) for item in (tokens, counted))
            documents = Documents.build(torch.tensor(cuts), (1, length))
            hidden, losses = model.hidden(
                ids[:, :-1][:, ours], documents.shard(parallel.axes.context)
            )
            loss, _ = model.loss(hidden, ids[:, 1:][:, ours], w[:, ours], 1e-3)
            total = total + loss + losses.sum() * w[:, ours].sum()
        names, parameters = zip(*trained_parameters(model), strict=True)
        gradients = torch.autograd.grad(total, parameters)
    result = {
        name: (model.local_shards[name], g.numpy())
        for name, g in zip(names, gradients, strict=True)
    }
    return float(total.detach()), result


def part_of(
    function: str,
    inputs: list[np.ndarray],
    divided: list[bool],
    probe: np.ndarray,
    *arguments: Any,
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Call a function below on this rank's part of the `divided` inputs. Return this rank's part
    of the output, and the gradients of all inputs."""
    axis = context_axis()
    leaves = []
    for whole, cut in zip(inputs, divided, strict=True):
        mine = whole[:, axis.part(whole.shape[1])] if cut else whole
        leaves.append(torch.from_numpy(mine.copy()).requires_grad_())
    y = FUNCTIONS[function](axis, *leaves, *arguments)
    weight = torch.from_numpy(probe[:, axis.part(probe.shape[1])])
    gradients = torch.autograd.grad((y * weight).sum(), leaves)
    return y.detach().numpy(), [gradient.numpy() for gradient in gradients]


def ring(axis: Axis, q: Tensor, k: Tensor, v: Tensor, past: np.ndarray | None, tile: int) -> Tensor:
    zigzag = Zigzag(q.shape[1], axis)
    with mock.patch.object(zigzag_module, "TILE", tile):
        first = FirstKeys.build(torch.from_numpy(past), zigzag) if past is not None else None
        return ring_attention(q, KeysAndValues(k, v), first, zigzag, scale=0.5)


def ring_flash(axis: Axis, q: Tensor, k: Tensor, v: Tensor, cuts: list[int] | None) -> Tensor:
    return flash_ring(axis, q, KeysAndValues(k, v), cuts)


def ring_flash_of_latents(
    axis: Axis, q: Tensor, tokens: Tensor, weight: Tensor, cuts: list[int] | None
) -> Tensor:
    """The same, with latents that travel, and the weight of their expansion."""
    expand = partial(expand_latents, q.shape[2])
    return flash_ring(axis, q, Latents(tokens, weight, expand, q.shape[3]), cuts)


def flash_ring(
    axis: Axis, q: Tensor, keys: KeysAndValues | Latents, cuts: list[int] | None
) -> Tensor:
    """Ring attention by flash attention; this process takes torch's flash attention of the CPU."""
    whole = len(q), q.shape[1] * axis.size
    documents = None if cuts is None else Documents.build(torch.tensor(cuts), whole)
    ring_flash_module.flash = flash_on_cpu
    ring_flash_module.flash_backward = flash_backward_on_cpu
    return ring_flash_attention(q, keys, documents, axis, scale=0.5)


def expand_latents(heads: int, tokens: Tensor, weight: Tensor) -> Tensor:
    """Return keys and values [2, ..., heads, dim] of latents [..., channels]."""
    return F.linear(tokens, weight).unflatten(-1, (2, heads, -1)).movedim(-3, 0)


def flash_on_cpu(
    q: Tensor, k: Tensor, v: Tensor, call: FlashCall, scale: float
) -> tuple[Tensor, Tensor]:
    outputs = [
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *heads_first(*segment, like=q), 0.0, call.causal, scale=scale
        )
        for segment in segments(call, [q], [k, v])
    ]
    merged = torch.cat([y[0] for y, _ in outputs], dim=1).transpose(0, 1)
    return merged, torch.cat([total[0] for _, total in outputs], dim=1)


def flash_backward_on_cpu(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    total: Tensor,
    call: FlashCall,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    result = []
    for dy_, q_, y_, total_, *kv in segments(call, [dy, q, y, total.T], [k, v]):
        arguments = heads_first(dy_, q_, *kv, y_, like=q)
        result.append(
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *arguments, total_.T[None], 0.0, call.causal, scale=scale
            )
        )
    dq, dk, dv = (
        torch.cat([x[0].transpose(0, 1) for x in item]) for item in zip(*result, strict=True)
    )
    dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(dim=2) for x in (dk, dv))
    return dq, dk, dv


def segments(call: FlashCall, queries: list[Tensor], keys: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the pieces of the tensors of each segment of a call."""
    for (a, b), (c, d) in zip(*(pairwise(ends) for ends in call.ends.tolist()), strict=True):
        assert b - a <= call.longest[0] and d - c <= call.longest[1]
        yield [*(x[a:b] for x in queries), *(x[c:d] for x in keys)]


def heads_first(*tensors: Tensor, like: Tensor) -> list[Tensor]:
    """[tokens, heads, dim] → [1, heads of `like`, tokens, dim]."""
    repeated = (x.repeat_interleave(like.shape[1] // x.shape[1], dim=1) for x in tensors)
    return [x.transpose(0, 1)[None] for x in repeated]


def halo_of(axis: Axis, x: Tensor, count: int) -> Tensor:
    """Add to each position a sum in which each position of the halo has its own weight."""
    before = receive_halo(x[:, -count:], count, axis, local_length=x.shape[1])
    assert before.shape[1] == count
    return x + (before.sin() * torch.arange(1, count + 1)[:, None]).sum(dim=1, keepdim=True)


def exchanged(axis: Axis, x: Tensor) -> Tensor:
    """To whole rows and back, with channels that do not divide evenly."""
    counts = [len(rank.part_range(x.shape[2])) for rank in axis.ranks()]
    return scatter_rows(gather_rows(x, counts, axis).cumsum(dim=1), counts, axis)


def dealt(axis: Axis, x: Tensor) -> Tensor:
    zigzag = Zigzag(x.shape[1], axis)
    chunks = zigzag.deal(x)
    return zigzag.collect(chunks * (1 + zigzag.index(x.device)[:, None]))


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "ring": ring,
    "ring_flash": ring_flash,
    "ring_flash_of_latents": ring_flash_of_latents,
    "halo": halo_of,
    "exchange": exchanged,
    "deal": dealt,
}


@contextmanager
def shifted_halo() -> Iterator[None]:
    """Each part gets its halo shifted by one position."""
    right = halo.receive_halo

    def faulty(x: Tensor, count: int, axis: Axis, *, local_length: int) -> Tensor:
        return right(x, count, axis, local_length=local_length).roll(1, dims=1)

    with mock.patch("headrace.models.operators.short_conv.receive_halo", faulty):
        yield


@contextmanager
def forgotten_states() -> Iterator[None]:
    """The states are exchanged and discarded."""
    right = states.receive_state

    def faulty(added: Tensor, kept: Tensor, axis: Axis, **options: Any) -> Tensor:
        return right(added, kept, axis, **options) * 0

    with (
        mock.patch("headrace.models.layers.scan.receive_state", faulty),
        mock.patch("headrace.models.layers.delta.rule.receive_state", faulty),
    ):
        yield


@contextmanager
def routers_alone() -> Iterator[None]:
    """The routers of each part count its own tokens only."""
    modules = ("headrace.models.operators.moe", "headrace.models.layers.routing")
    with ExitStack() as patches:
        for module in modules:
            patches.enter_context(mock.patch(f"{module}.reduce", lambda x, axis: x))
        yield


@contextmanager
def positions_anew() -> Iterator[None]:
    """Positions restart in each part."""
    with mock.patch.object(Documents, "shard", documents_anew):
        yield


def documents_anew(documents: Documents, axis: Axis) -> Documents:
    positions = documents.positions[:, axis.part(documents.positions.shape[1])]
    first = positions[:, :1] * (positions.diff(dim=1, prepend=positions[:, :1] - 1) == 1).cumprod(1)
    return Documents(positions - first, documents)


@contextmanager
def whole_biases() -> Iterator[None]:
    """Each rank adds the whole bias to its partial sum."""

    def faulty(self: OutputLinear, x: Tensor, stored: None = None) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    with mock.patch.object(OutputLinear, "forward", faulty):
        yield


@contextmanager
def scales_alone() -> Iterator[None]:
    """Each rank scales its part of a row alone."""
    with mock.patch("headrace.models.layers.fp8.reduce_max", lambda tops, _: tops):
        yield


@contextmanager
def norms_alone() -> Iterator[None]:
    """Each rank normalises its part of a group alone."""
    with mock.patch("headrace.models.layers.norms.sum_groups", lambda sums, *_: sums):
        yield


FAULTS: dict[str, Callable[[], Any]] = {
    "bias": whole_biases,
    "norm": norms_alone,
    "scale": scales_alone,
    "halo": shifted_halo,
    "states": forgotten_states,
    "routers": routers_alone,
    "positions": positions_anew,
}
