"""Operations on fake tensors, in a part of the time that FakeTensorMode takes for them.

Layers repeat few operations on tensors of few sizes. FakeTensorMode takes about 175 µs of CPU for
each, even if it has seen the operation before; a new tensor like the first result takes 65. For the
first view of a size it takes 1,400; a view of the meta tensor is the same view.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)

NAMESPACES = ("aten", "headrace", "_c10d_functional")
"""Namespaces of operations whose results follow from the sizes and types of what they are given."""


class _Like(NamedTuple):
    """A result of an operation."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class _Unlike(Exception):
    """An operation whose results are not known from its first ones."""


_known: dict[tuple[Any, ...], tuple[type, list[_Like]] | None] = {}


def result_of(operation: Any, inputs: Sequence[Any], options: dict[str, Any] | None) -> Any:
    """Return the result of an operation inside a FakeTensorMode."""
    if operation.is_view or operation is torch.ops.aten._unsafe_view.default:
        base = inputs[0]
        if isinstance(base, FakeTensor) and base.constant is None:
            return _view(base, operation, inputs[1:], options)
    given: list[FakeTensor] = []
    try:
        key = _key(operation, inputs, options, given)
        known = _known.get(key, ())
    except (_Unlike, TypeError):  # a value without a hash
        return operation(*inputs, **(options or {}))
    if known:
        kind, likes = known
        made = [_made(like, given[0].fake_mode) for like in likes]
        return made[0] if kind is FakeTensor else kind(made)
    result = operation(*inputs, **(options or {}))
    if known == ():
        try:
            _known[key] = type(result), _likes(result, given)
        except _Unlike:
            _known[key] = None
    return result


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Yield the tensors of an operation's arguments or results. They have no other containers, and
    torch's `tree_leaves`, which looks for all, takes twice as long."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict):
        yield from tensors_in(tuple(values.values()))
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from tensors_in(value)


def _key(
    operation: Any, inputs: Sequence[Any], options: dict[str, Any] | None, given: list[FakeTensor]
) -> tuple[Any, ...]:
    """Return everything that decides the results, and add the tensors to `given`."""
    if operation.namespace not in NAMESPACES or operation._schema.is_mutable:
        raise _Unlike
    named = tuple(options.items()) if options else ()
    # Of integers, a quotient has the standard type.
    key = (operation, torch.get_default_dtype(), *_values(inputs, given), *_values(named, given))
    if not given:  # it depends on the standard device
        raise _Unlike
    return key


def _values(values: Sequence[Any], given: list[FakeTensor]) -> list[Any]:
    found: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            if not isinstance(value, FakeTensor) or value.constant is not None:
                raise _Unlike
            given.append(value)
            found += (value.shape, value.stride(), value.storage_offset(), value.dtype)
            found.append(value.fake_device)
        elif isinstance(value, (list, tuple)):
            found.append((type(value), *_values(value, given)))
        else:  # 1 and True and 1.0 are equal
            found += (type(value), value)
    return found


def _likes(result: Any, given: Sequence[FakeTensor]) -> list[_Like]:
    results = list(result) if isinstance(result, (list, tuple)) else [result]
    storages = {storage_of(tensor) for tensor in given}
    found = []
    for tensor in results:
        if not isinstance(tensor, FakeTensor) or tensor.constant is not None:
            raise _Unlike
        if tensor.is_conj() or tensor.is_neg() or tensor.storage_offset():
            raise _Unlike
        storage = storage_of(tensor)
        if storage in storages:
            raise _Unlike
        storages.add(storage)
        shape, stride = tuple(tensor.shape), tensor.stride()
        if not all(type(size) is int for size in (*shape, *stride)):
            raise _Unlike
        found.append(_Like(shape, stride, tensor.dtype, tensor.fake_device))
    return found


def storage_of(tensor: Tensor) -> int:
    """Return a number that tensors share if they share their storage."""
    key: int = tensor.untyped_storage()._cdata
    return key


def _made(like: _Like, mode: FakeTensorMode) -> FakeTensor:
    with in_kernel_invocation_manager(mode):
        tensor = torch.empty_strided(like.shape, like.stride, dtype=like.dtype, device="meta")
    return FakeTensor(mode, tensor, like.device)


def _view(
    base: FakeTensor, operation: Any, inputs: Sequence[Any], options: dict[str, Any] | None
) -> Any:
    """Return a view, or the views, of a tensor."""
    with in_kernel_invocation_manager(base.fake_mode):
        result = operation(base, *inputs, **(options or {}))
    if isinstance(result, Tensor):
        return FakeTensor(base.fake_mode, result, base.fake_device)
    return [FakeTensor(base.fake_mode, each, base.fake_device) for each in result]
