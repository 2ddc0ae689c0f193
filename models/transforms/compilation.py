"""torch.compile, block by block: blocks of a kind share their graphs.

A kind is a layer of the pattern, such as `se/glu`. Each kind has a copy of the code of
`Block.forward`: torch stores graphs by code object, and gives up on one that it compiled too often.
Only the forward function is compiled, so hooks that engines attach to a block (gathering of
weights, recompute) stay outside the graphs.

A block with an operator that torch.compile cannot trace is compiled branch by branch, and that
operator's branch runs eagerly. So no graph has a break.

Shapes are static: each row length, packed or not, in training or evaluation, has separate graphs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from ...console.errors import LayoutError
from ..config.options.names import Backend
from ..model.block import Block
from ..model.model import Model
from ..operators import Operator
from ..parallel.axes import Axes

MAX_GRAPHS = 64
"""Graphs per block kind: row lengths, packed or not, in training and in evaluation."""


def compile_blocks(
    model: Model,
    device: torch.device,
    backend: Backend = "inductor",
    *,
    fallback: bool = False,
    limit: int = MAX_GRAPHS,
) -> None:
    """Compile a model's blocks for a device.

    Compilation happens when a block runs. A call raises LayoutError if torch cannot compile the
    block, or its kind has more than `limit` graphs; with `fallback`, it runs eagerly. Both settings
    hold for all code that this process compiles.
    """
    from torch._dynamo import config

    config.recompile_limit = limit
    config.fail_on_recompile_limit_hit = not fallback
    config.suppress_errors = fallback
    model.compiled = True
    forwards: dict[str, Callable[..., Any]] = {}
    for kind, module in _select_modules(model, device):
        if kind not in forwards:
            forward = _copy_forward(type(module), kind)
            compiled = torch.compile(
                forward, backend=backend, fullgraph=not fallback, dynamic=False
            )
            forwards[kind] = compiled if fallback else _name_kind_in_errors(compiled, kind, limit)
        module.forward = MethodType(forwards[kind], module)


def _select_modules(model: Model, device: torch.device) -> Iterator[tuple[str, nn.Module]]:
    """Yield kind and module of what is compiled: whole blocks, or the traceable branches of blocks
    with an operator that is not."""
    for block in model.typed_blocks():
        operators = _called_operators(model, block)
        if not any(operator.untraced(model.axes, device) for operator in operators.values()):
            yield _kind(block), block
            continue
        names = ["|".join(block.layer.mixers), *filter(None, [block.layer.mlp])]
        for name, branch in zip(names, block.branches(), strict=True):
            if not any(operator.untraced(model.axes, device) for operator in branch.operators):
                yield name, branch


def _called_operators(model: Model, block: Block) -> Mapping[str, Operator]:
    """Return the operators of a block and of the shared block that it calls, by name."""
    shared = model.shared_block(block.layer)
    operators = dict(zip(block.layer.branches, block.operators(), strict=True))
    return operators if shared is None else {**operators, str(block.layer.shared): shared}


def find_eager_operators(model: Model, axes: Axes, device: torch.device) -> dict[str, str]:
    """Return why operators run eagerly in a compiled model with these axes, by operator."""
    reasons = {
        name: operator.untraced(axes, device)
        for block in model.typed_blocks()
        for name, operator in _called_operators(model, block).items()
    }
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _copy_forward(module: type[nn.Module], kind: str) -> FunctionType:
    """Return a copy of a class's forward function whose code object is new, named after `kind`."""
    forward: Any = module.forward
    while not isinstance(forward, FunctionType):
        forward = forward.__wrapped__
    name = f"{forward.__name__}_of_" + re.sub(r"\W", "_", kind)
    code = forward.__code__.replace(co_name=name)
    return FunctionType(code, forward.__globals__, name, forward.__defaults__)


def _name_kind_in_errors(compiled: Callable[..., Any], kind: str, limit: int) -> Callable[..., Any]:
    """Wrap a compiled function: torch's errors become LayoutErrors that name the kind of block."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    def call(*inputs: Any) -> Any:
        try:
            return compiled(*inputs)
        except (FailOnRecompileLimitHit, TorchDynamoException) as error:
            message = f"torch.compile cannot compile the blocks `{kind}`"
            if isinstance(error, FailOnRecompileLimitHit):
                message = f"torch.compile has compiled the blocks `{kind}` {limit} times"
            cause = str(error)
        raise LayoutError(
            message,
            where="\n" + cause.strip(),
            hint="set engine.compile=false, or engine.compile_fallback=true, which runs eagerly "
            "what cannot be compiled",
        )

    return call


def _kind(block: Block) -> str:
    """Return the block's layer as the pattern writes it."""
    layer = block.layer
    return str(layer) if layer.parallel or layer.mlp is None else f"{layer}/{layer.mlp}"
