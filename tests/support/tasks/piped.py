"""Layouts of the ranks of a pool, and the gradients of a pipeline in fp64 (see layouts.py)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from support.configs import CONFIGS

from headrace.models.config.config import ModelConfig, chunk_users, load_model_config
from headrace.models.config.options.recompute import Recompute
from headrace.models.documents import Documents
from headrace.models.model.model import Model
from headrace.models.parallel import handed as handed_module
from headrace.trainer.engines.engine import Engine
from headrace.trainer.engines.objective import Objective
from headrace.trainer.layout.config import LayoutConfig
from headrace.trainer.layout.groups import Parallel, create_groups
from headrace.trainer.layout.schedules import forward_only
from headrace.trainer.layout.stages import choose_cuts, list_chunks, shared_modules
from headrace.trainer.loop import execute as executor
from headrace.trainer.loop.execute import execute

PATIENCE = timedelta(minutes=5)
LENGTH = 24
UNEVEN = (3, 5, 11)
"""Cuts of a model with 12 layers into 4 stages."""


@cache
def groups(words: str, model: str) -> Parallel:
    """Return this rank's process groups, created once for each layout (and model, if piped)."""
    degrees: Any = {axis: int(n) for axis, n in re.findall(r"(pp|tp|cp|ep)(\d)", words)}
    degrees["attention"] = "ring" if "ring" in words else "a2a"
    degrees["hyena_li"] = "a2a" if words.endswith("a2a") else "states"
    if "x2" in words:
        degrees |= {"chunks": 2, "schedule": "interleaved"}
    if "gpipe" in words:
        degrees["schedule"] = "gpipe"
    if "uneven" in words:
        degrees["cuts"] = UNEVEN
    layout = LayoutConfig(**degrees)
    if layout.pp == 1:
        return create_groups(layout, "cpu", PATIENCE)
    config = config_of(model)
    layout = replace(layout, cuts=choose_cuts(layout, config, LENGTH))
    return create_groups(layout, "cpu", PATIENCE, shared_modules(layout, config, layout.cuts or ()))


def place(layout: str, model: str = "tiny") -> Parallel:
    """Return the process groups of `…-tp2`, `…-cp2`, `…-tp2ep4`, `…-cp2ring` (attention),
    `…-cp2a2a` (Hyena-LI), `…-pp2`, `…-pp2gpipe`, `…-pp2x2` (interleaved), `…-pp4uneven`."""
    words = "".join(layout.split("-")[3:])
    return groups(words, model if "pp" in words else "")


def config_of(model: str, changes: Sequence[str] = ()) -> ModelConfig:
    """Return a model of the tests, or a shipped one."""
    file = CONFIGS / f"{model}.yaml"
    return load_model_config(file if file.exists() else model, changes)


class Batch(NamedTuple):
    """A micro-batch as the executor takes it."""

    tokens: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor
    cu_seqlens: torch.Tensor


def run_passes(
    engine: Engine, parallel: Parallel, batches: Any, divisor: float
) -> list[torch.Tensor]:
    """Run forward and backward passes. Return the losses by row."""
    return execute(parallel.pipe.orders(len(batches)), batches, engine, parallel, divisor)


def keep(model: Model, parallel: Parallel) -> None:
    """Keep the chunks of this rank's stage, and its local shards."""
    layout = parallel.pipe.layout
    model.keep(layout.cuts or (), list_chunks(layout, parallel.pipe.stage))
    model.shard(parallel.axes)


class Plain:
    """No engine: autograd alone, in fp64. Gradients are summed over nothing but micro-batches."""

    dtype = torch.float64

    def __init__(self, objective: Objective) -> None:
        self.objective = objective

    def __call__(self, *inputs: Any) -> Any:
        return self.objective(*inputs)

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        loss.backward()


def batches(number: int, *, packed: bool, rows: int = 2) -> list[Batch]:
    """Return micro-batches with uneven weights, one row without weight, and packed documents."""
    numbers = torch.Generator().manual_seed(5)
    result = []
    for index in range(number):
        tokens = torch.randint(0, 37, (rows, LENGTH + 1), generator=numbers)
        weights = torch.rand(rows, LENGTH, generator=numbers, dtype=torch.float64)
        weights[0] *= index != 1
        cuts = [0, 7, LENGTH, LENGTH + 5] if packed else [0, LENGTH]
        starts = torch.tensor([*cuts, rows * LENGTH])
        result.append(Batch(tokens[:, :-1], tokens[:, 1:], weights, starts))
    return result


def objective_of(config: ModelConfig, recompute: Recompute = "none") -> Objective:
    model = Model(config)
    model.init_weights(3)
    model.set_recompute(recompute)
    return Objective(model.double(), 1e-3)


def exact(
    folder: Path,
    cases: list[tuple[str, str, int]],
    recompute: Recompute = "none",
    packed: bool = True,
    fault: str | None = None,
) -> dict[str, tuple[list[str], float, bool]]:
    """Compare a pipeline's gradients with those of one process, for (model, layout, micro-batches).

    Return the parameters of all ranks that one chunk uses and that differ in a bit; the greatest
    relative difference of the others; and whether the losses of all rows are equal to the bit, in
    training and in an evaluation.
    """
    result = {}
    for name, words, number in cases:
        config, parallel = config_of(name), groups(words, name)
        whole = objective_of(config, recompute)
        expected = []
        for batch in batches(number, packed=packed):
            documents = Documents.build(
                batch.cu_seqlens, (len(batch.tokens), batch.tokens.shape[1])
            )
            sums = whole(*batch[:3], documents)
            (sums.total / 7.0).backward()
            expected.append(sums.rows)
        ours = objective_of(config, recompute)
        keep(ours.model, parallel)
        engine: Any = Plain(ours)
        with FAULTS[fault]() if fault else nullcontext():
            losses = run_passes(engine, parallel, batches(number, packed=packed), 7.0)
        with torch.no_grad():  # as an evaluation does
            orders = forward_only(parallel.pipe.orders(number))
            again = execute(orders, batches(number, packed=packed), engine, parallel)
        here = compared(ours.model, dict(whole.model.named_parameters()), summed=fault != "copies")
        equal = not parallel.pipe.computes_loss or (
            all(map(torch.equal, losses, expected)) and all(map(torch.equal, again, expected))
        )
        everyone: list[Any] = [None] * parallel.world
        dist.all_gather_object(everyone, (*here, equal), group=parallel.control)
        result[f"{name} {words} {number}"] = (
            sorted({item for differing, _, _ in everyone for item in differing}),
            max(worst for _, worst, _ in everyone),
            all(is_equal for _, _, is_equal in everyone),
        )
    return result


def compared(model: Model, expected: dict[str, Any], *, summed: bool) -> tuple[list[str], float]:
    """Return the parameters of one chunk whose gradient differs, and the worst of the others."""
    users = chunk_users(model.config, model.chunks)
    differing, worst = [], 0.0
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        copies = model.local_shards[name].copies
        if copies.size > 1 and summed:
            dist.all_reduce(gradient, group=copies.group)
        want = expected[name].grad
        want = torch.zeros_like(gradient) if want is None else want
        apart = float((gradient - want).abs().max() / want.abs().max().clamp(min=1e-300))
        chunks = next((used for path, used in users.items() if name.startswith(f"{path}.")), [0])
        if len(chunks) == 1 and not torch.equal(gradient, want):
            differing.append(name)
        worst = max(worst, apart)
    return differing, worst


@contextmanager
def scaled_twice() -> Iterator[None]:
    """The term that hands gradients over multiplies them by the gradient of the loss."""

    def faulty(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return None, *(item * gradient * 2 for item in ctx.gradients)

    with mock.patch.object(handed_module._AttachGradients, "backward", staticmethod(faulty)):
        yield


@contextmanager
def routers_forgotten() -> Iterator[None]:
    """Chunks without the loss drop the losses of their routers."""
    right = Objective.forward

    def faulty(self: Objective, *inputs: Any) -> Any:
        sums = right(self, *inputs)
        return sums if not sums.stream else sums._replace(total=sums.total * 0)

    with mock.patch.object(Objective, "forward", faulty):
        yield


@contextmanager
def other_rows() -> Iterator[None]:
    """The first stage reads the rows of the micro-batches in another order."""
    right = executor.forward_pass

    def faulty(engine: Any, batch: Any, parallel: Parallel, *more: Any) -> Any:
        if parallel.pipe.stage == 0:
            batch = batch._replace(tokens=batch.tokens.flip(0))
        return right(engine, batch, parallel, *more)

    with mock.patch.object(executor, "forward_pass", faulty):
        yield


FAULTS: dict[str, Any] = {
    "copies": nullcontext,
    "handed": scaled_twice,
    "routers": routers_forgotten,
    "rows": other_rows,
}


class TorchStage(torch.nn.Module):
    """One chunk as torch.distributed.pipelining takes it; it runs the micro-batches in order."""

    def __init__(self, model: Model, chunk: int, batches: list[Batch]) -> None:
        super().__init__()
        self.model = model
        self.chunk = chunk
        self.batches = iter(batches)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch = next(self.batches)
        documents = Documents.build(batch.cu_seqlens, (len(batch.tokens), batch.tokens.shape[1]))
        stream = (x,) if self.chunk else ()
        out, _ = self.model.run_chunk(self.chunk, batch.tokens, documents, stream)
        return out[0]


def second_oracle(folder: Path, name: str, number: int) -> list[str]:
    """Return the parameters whose gradients on two stages differ in a bit from those of
    torch.distributed.pipelining on the same stages."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    config, parallel = config_of(name), groups("pp2", name)
    stage, rows = parallel.pipe.stage, batches(number, packed=True)
    ours, theirs = objective_of(config), objective_of(config)
    for objective in (ours, theirs):
        keep(objective.model, parallel)
    engine: Any = Plain(ours)
    run_passes(engine, parallel, rows, 7.0)

    def loss(hidden: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        batch = rows[int(index)]
        total: torch.Tensor = theirs.model.loss(hidden, batch.targets, batch.weights, 1e-3)[0]
        return total / 7.0

    index = torch.arange(number, dtype=torch.float64)
    shape = (*rows[0].tokens.shape, config.width)
    u = torch.empty(shape, dtype=torch.float64, requires_grad=True)
    piece = PipelineStage(
        TorchStage(theirs.model, stage, rows),
        stage,
        2,
        torch.device("cpu"),
        input_args=u if stage else index[:1],
        output_args=u,
    )
    schedule = Schedule1F1B(piece, number, loss_fn=loss, scale_grads=False)
    schedule.step(target=index) if stage else schedule.step(index)
    expected = dict(theirs.model.named_parameters())
    differing = [
        parameter
        for parameter, tensor in ours.model.named_parameters()
        if not _equal(tensor.grad, expected[parameter].grad)
    ]
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, differing, group=parallel.control)
    return [parameter for held in everyone for parameter in held]


def _equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return b is None or bool(torch.equal(b, torch.zeros_like(b) if a is None else a))
