"""torch.compile of a model, block by block: all blocks of one kind share their graphs.

A kind is a layer of the pattern, such as `se/glu`. Each kind has its own copy of the code of
`Block.forward`: torch keeps graphs by code, counts recompilations by code, and gives up on code
that it compiled too often. The forward function alone is compiled, so what engines attach to the
call of a block (gathering of weights, recompute) stays outside the graphs.

A block with an operator that torch.compile cannot trace is compiled branch by branch, and that
operator's branch runs eagerly. So no graph has a break.

Shapes are static: each length of rows, packed or not, in training or evaluation, has its graphs.
"""

from __future__ import annotations

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

LIMIT = 64
"""Graphs of one kind of block: lengths of rows, packed or not, in training and in evaluation."""


def compile_blocks(
    model: Model,
    device: torch.device,
    backend: Backend = "inductor",
    *,
    fallback: bool = False,
    limit: int = LIMIT,
) -> None:
    """Compile the blocks of a model for a device. A kind that cannot be compiled, or has more than
    `limit` graphs, is an error; with `fallback`, it runs eagerly. Both hold for all code that this
    process compiles."""
    from torch._dynamo import config

    config.recompile_limit = limit
    config.fail_on_recompile_limit_hit = not fallback
    config.suppress_errors = fallback
    model.compiled = True
    forwards: dict[str, Callable[..., Any]] = {}
    for kind, module in parts(model, device):
        if kind not in forwards:
            own = own_code(type(module), kind)
            whole = torch.compile(own, backend=backend, fullgraph=not fallback, dynamic=False)
            forwards[kind] = whole if fallback else checked(whole, kind, limit)
        module.forward = MethodType(forwards[kind], module)


def parts(model: Model, device: torch.device) -> Iterator[tuple[str, nn.Module]]:
    """Yield what is compiled, with its kind: blocks, or the branches of a block that can be."""
    for block in model.typed_blocks():
        own = operators_of(model, block)
        if not any(each.untraced(model.axes, device) for each in own.values()):
            yield _kind(block), block
            continue
        for name, branch in zip(block.layer.branches, block.branches(), strict=True):
            if not own[name].untraced(model.axes, device):
                yield name, branch


def operators_of(model: Model, block: Block) -> Mapping[str, Operator]:
    """Return the operators that a block calls, by name."""
    shared = model.shared_block(block.layer)
    branches = zip(block.layer.branches, block.branches(), strict=True)
    found: dict[str, Operator] = {name: branch.operator for name, branch in branches}
    return found if shared is None else {**found, str(block.layer.shared): shared}


def left_out(model: Model, axes: Axes, device: torch.device) -> dict[str, str]:
    """Return the operators that run eagerly in a compiled model with these axes, and why."""
    reasons = {
        name: operator.untraced(axes, device)
        for block in model.typed_blocks()
        for name, operator in operators_of(model, block).items()
    }
    return {name: reason for name, reason in reasons.items() if reason is not None}


def own_code(module: type[nn.Module], kind: str) -> FunctionType:
    """Return the forward function of a block or branch with a copy of its code."""
    forward: Any = module.forward
    while not isinstance(forward, FunctionType):
        forward = forward.__wrapped__
    name = f"{forward.__name__}_of_" + "".join(c if c.isalnum() else "_" for c in kind)
    code = forward.__code__.replace(co_name=name)
    return FunctionType(code, forward.__globals__, name, forward.__defaults__)


def checked(compiled: Callable[..., Any], kind: str, limit: int) -> Callable[..., Any]:
    """Return the compiled function with errors that name the kind of block."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    def call(*inputs: Any) -> Any:
        try:
            return compiled(*inputs)
        except FailOnRecompileLimitHit as error:
            what, why = f"torch.compile has compiled the blocks `{kind}` {limit} times", str(error)
        except TorchDynamoException as error:
            what, why = f"torch.compile cannot compile the blocks `{kind}`", str(error)
        raise LayoutError(
            what,
            where="\n" + why.strip(),
            hint="set engine.compile=false, or engine.compile_fallback=true, which runs eagerly "
            "what cannot be compiled",
        )

    return call


def _kind(block: Block) -> str:
    layer = block.layer
    return str(layer) if layer.parallel or layer.mlp is None else f"{layer}/{layer.mlp}"
