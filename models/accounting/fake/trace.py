"""Memory of a computation over time: its forward and its backward pass on fake tensors.

Nothing is allocated. `trace` runs any function of one tensor (a layer, a head, a torch module that
is not ours) under FakeTensorMode, follows each storage from the operation that creates it to its
end, and returns both passes as `Passes`:

    forward    u is alive ─► the result is alive, and everything that autograd keeps
    backward   the gradient of the result is alive ─► the gradient of u is alive

Each pass is a list of pieces (accounting/pieces.py).

What an operation allocates for itself and frees before it returns has no tensor; scratch.py lists
what is known of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..pieces import Passes, Piece
from .repeated import result_of, storage_of, tensors_in
from .scratch import SCRATCH


class Meter(TorchDispatchMode):
    """Follows the storages that operations create: `level` is the sum of those that live."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.level = 0
        self.most = 0
        self.message: Callable[[], None] | None = None
        """Called before each message of all ranks to all."""
        self._living: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, operation: Any, types: Any, inputs: Any = (), options: Any = None
    ) -> Any:
        if operation is torch.ops.prim.device.default:  # two of three calls: autograd asks often
            return inputs[0].fake_device
        if operation is torch.ops._c10d_functional.wait_tensor.default:
            return inputs[0]  # the same tensor, and on fake tensors a new one
        if self.message and operation is torch.ops._c10d_functional.all_to_all_single.default:
            self.message()
        result = result_of(operation, inputs, options)
        scratch = SCRATCH.get(operation._schema.name)
        given: set[int] = set()
        for tensor in tensors_in(result):
            if storage_of(tensor) not in self._living:
                given = given or {storage_of(each) for each in tensors_in((inputs, options))}
                if storage_of(tensor) not in given:
                    self._watch(tensor.untyped_storage())
        if scratch is not None:
            self.most = max(self.most, self.level + scratch(*inputs))
        return result

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()

        def ended(_: Any) -> None:
            del self._living[key]
            self.level -= size

        self._living[key] = weakref.ref(storage, ended)
        self.level += size
        self.most = max(self.most, self.level)


class _Recording:
    """Cuts what a meter sees into pieces."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self.pieces: list[Piece] = []
        self.begun = 0

    def begin(self, more: int = 0) -> None:
        """Begin at this level, and `more` bytes that are still to come."""
        self.begun = self.meter.level + more
        self.meter.most = self.begun

    def cut(self, gradient: str = "", *, less: int = 0, more: int = 0) -> None:
        """End a piece. `less` bytes of the level are those of the gradient; `more` bytes have just
        gone, and count still."""
        level = self.meter.level + more - less
        most = self.meter.most - self.begun
        self.pieces.append(Piece(most, level - self.begun, gradient, less))
        self.begun = level
        self.meter.most = self.meter.level


@contextmanager
def _completed(parameters: Mapping[str, Tensor], recording: _Recording) -> Iterator[None]:
    """End a piece at each complete gradient, and drop the gradient."""

    def cut(name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        recording.cut(name, less=parameter.grad.untyped_storage().nbytes())
        parameter.grad = None

    handles = [
        leaf.register_post_accumulate_grad_hook(partial(cut, name))
        for name, leaf in parameters.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def new_mode() -> FakeTensorMode:
    """Return a mode for `fake_tensors`. Tensors of one mode cannot be used in another."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def fake_tensors(dtype: torch.dtype, mode: FakeTensorMode | None = None) -> Iterator[None]:
    """Make tensors fake inside, and of this number format where none is named."""
    standard = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with mode or new_mode():
            yield
    finally:
        torch.set_default_dtype(standard)


class _Begin(torch.autograd.Function):
    """The input of a computation. Its caller holds it no longer than autograd does."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, made: list[Tensor], gradients: list[Tensor]) -> Tensor:
        ctx.gradients = gradients
        return made.pop()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.gradients.append(gradient)
        return gradient.new_empty(()), None, None


class _End(torch.autograd.Function):
    """The result of a computation, whose gradient comes from elsewhere."""

    @staticmethod
    def forward(ctx: Any, result: Tensor) -> Tensor:
        ctx.like = result.shape, result.dtype, result.device
        return result.new_empty(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Tensor:
        shape, dtype, device = ctx.like
        return torch.empty(shape, dtype=dtype, device=device)


def trace(
    run: Callable[[Tensor], Tensor],
    make: Callable[[], Tensor],
    parameters: Mapping[str, Tensor],
    *,
    hops: bool = False,
) -> Passes:
    """Run `run` on the tensor of `make`, forward and backward, inside `fake_tensors`.

    `parameters` are the leaves that `run` uses, by name. A tensor of numbers without gradients
    (token ids) counts nothing: the caller of all layers holds it. With `hops`, a piece also ends at
    each message of all ranks to all.
    """
    gradients: list[Tensor] = []
    with Meter() as meter:
        anchor = torch.empty((), requires_grad=True)
        held = [make()]
        if held[0].is_floating_point():
            held = [_Begin.apply(anchor, held, gradients)]
        forward = _Recording(meter)
        forward.begin()
        meter.message = forward.cut if hops else None
        result = run(held[0])
        left = result.nbytes
        held.clear()
        end = _End.apply(result)
        del result
        forward.cut(more=left)
        backward = _Recording(meter)
        backward.begin(more=left)
        meter.message = backward.cut if hops else None
        with _completed(parameters, backward):
            end.backward()
        backward.cut()
    return Passes(tuple(forward.pieces), tuple(backward.pieces))
