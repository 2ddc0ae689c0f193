"""A computation's memory over time: forward and backward pass on fake tensors.

Nothing is allocated. `trace` runs any tensor function (a layer, a head, a foreign torch module)
under FakeTensorMode, follows every storage from creation to release, and returns both passes as
`Passes`:

    forward    u is live ─► the result and everything that autograd saves are live
    backward   the result's gradient is live ─► u's gradient is live

A pass is a list of segments (accounting/pieces.py).

Workspace that an operation frees before it returns has no tensor; scratch.py estimates it.
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

from ..pieces import Passes, PassSegment
from .repeated import iterate_tensors, run_operation, storage_key
from .scratch import SCRATCH


class StorageMeter(TorchDispatchMode):
    """Follows the storages that operations create: `level` is the live bytes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.level = 0
        self.peak = 0
        self.on_message: Callable[[], None] | None = None
        """Called before each all-to-all."""
        self._live: dict[int, weakref.ref[Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing compiles a trace, and torch would wrap each of its calls."""
        return False

    def __torch_dispatch__(
        self, operation: Any, types: Any, inputs: Any = (), options: Any = None
    ) -> Any:
        if operation is torch.ops.prim.device.default:  # two of three calls: autograd asks often
            return inputs[0].fake_device
        if operation is torch.ops._c10d_functional.wait_tensor.default:
            return inputs[0]  # the same tensor, and on fake tensors a new one
        if self.on_message and operation is torch.ops._c10d_functional.all_to_all_single.default:
            self.on_message()
        result = run_operation(operation, inputs, options)
        scratch = SCRATCH.get(operation._schema.name)
        argument_storages: set[int] = set()
        for tensor in iterate_tensors(result):
            if storage_key(tensor) not in self._live:
                argument_storages = argument_storages or {
                    storage_key(argument) for argument in iterate_tensors((inputs, options))
                }
                if storage_key(tensor) not in argument_storages:
                    self._watch(tensor.untyped_storage())
        if scratch is not None:
            self.peak = max(self.peak, self.level + scratch(*inputs))
        return result

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()

        def free(_: Any) -> None:
            del self._live[key]
            self.level -= size

        self._live[key] = weakref.ref(storage, free)
        self.level += size
        self.peak = max(self.peak, self.level)


class _SegmentRecorder:
    """Cuts a meter's level over time into segments."""

    def __init__(self, meter: StorageMeter) -> None:
        self.meter = meter
        self.segments: list[PassSegment] = []
        self.start = 0

    def begin(self, pending_bytes: int = 0) -> None:
        """Begin at the current level, plus `pending_bytes` that will be allocated next."""
        self.start = self.meter.level + pending_bytes
        self.meter.peak = self.start

    def cut(self, gradient: str = "", *, gradient_bytes: int = 0, pending_bytes: int = 0) -> None:
        """End a segment. The level includes the gradient's `gradient_bytes`, which the segment
        leaves out, and lacks `pending_bytes` that were just freed but still count."""
        level = self.meter.level + pending_bytes - gradient_bytes
        peak = self.meter.peak - self.start
        self.segments.append(PassSegment(peak, level - self.start, gradient, gradient_bytes))
        self.start = level
        self.meter.peak = self.meter.level


@contextmanager
def _cut_at_gradients(
    parameters: Mapping[str, Tensor], recorder: _SegmentRecorder
) -> Iterator[None]:
    """End a segment at each complete gradient, and free the gradient."""

    def cut(name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        recorder.cut(name, gradient_bytes=parameter.grad.untyped_storage().nbytes())
        parameter.grad = None

    handles = [
        leaf.register_post_accumulate_grad_hook(partial(cut, name))
        for name, leaf in parameters.items()
        if leaf.requires_grad
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def new_mode() -> FakeTensorMode:
    """Create a mode for `fake_tensors`. Tensors from different modes cannot be mixed."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def fake_tensors(dtype: torch.dtype, mode: FakeTensorMode | None = None) -> Iterator[None]:
    """Create fake tensors inside, with this default dtype."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with mode or new_mode():
            yield
    finally:
        torch.set_default_dtype(default)


class _Input(torch.autograd.Function):
    """A computation's input: the caller keeps no reference, so autograd decides its lifetime."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensors: list[Tensor], gradients: list[Tensor]) -> Tensor:
        ctx.gradients = gradients
        return tensors.pop()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.gradients.append(gradient)
        return gradient.new_empty(()), None, None


class _Output(torch.autograd.Function):
    """A computation's result; its upstream gradient comes from outside."""

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
    create: Callable[[], Tensor],
    parameters: Mapping[str, Tensor],
    *,
    hops: bool = False,
) -> Passes:
    """Run `run` on the tensor that `create` returns, forward and backward, inside `fake_tensors`.

    `parameters` are the leaves that `run` uses, by name. An integer tensor (token ids) is not
    counted: it outlives the layers. With `hops`, a segment also ends at each all-to-all.
    """
    gradients: list[Tensor] = []
    with StorageMeter() as meter:
        anchor = torch.empty((), requires_grad=True)
        tensors = [create()]
        if tensors[0].is_floating_point():
            tensors = [_Input.apply(anchor, tensors, gradients)]
        forward = _SegmentRecorder(meter)
        forward.begin()
        meter.on_message = forward.cut if hops else None
        result = run(tensors[0])
        result_bytes = result.nbytes
        tensors.clear()
        output = _Output.apply(result)
        del result
        forward.cut(pending_bytes=result_bytes)
        backward = _SegmentRecorder(meter)
        backward.begin(pending_bytes=result_bytes)
        meter.on_message = backward.cut if hops else None
        with _cut_at_gradients(parameters, backward):
            output.backward()
        backward.cut()
    return Passes(tuple(forward.segments), tuple(backward.segments))
