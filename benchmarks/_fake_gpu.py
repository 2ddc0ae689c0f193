"""A GPU that does not exist: its tensors are fake, and each launch is recorded.

    with fake_gpu() as gpu:     device="cuda" works, and the code takes its CUDA path
        ...                     host tensors are real: document boundaries, row numbers, messages
    gpu.launches, gpu.waits     operations on the device, and copies that made the host wait

A custom op of headrace runs its own code: its Triton programs are recorded, not launched, beside
the operations of torch that surround them. A read returns ones: a fake tensor has no values.
"""

from __future__ import annotations

import inspect
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

import headrace
from headrace.models.kernels import choice

CUDA, HOST, META = torch.device("cuda", 0), torch.device("cpu"), torch.device("meta")
OBJECTIVE = "objective.py"
"""The one file of the engines that runs the model."""
WRAPPERS = tuple(f"{Path(torch.__file__).parent}/{name}" for name in ("_dynamo/", "_compile.py"))
CAPABILITY = (9, 0)
"""Compute capability of an H200."""
PACKAGE = str(Path(headrace.__file__).parent)
LIBRARIES = sysconfig.get_path("purelib")
"""Folder of other packages, which may lie inside headrace's checkout."""
ENGINE = f"{Path(torch.__file__).parent}/distributed/"
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
WRITTEN_ONLY = ("copy_", "fill_", "zero_", "_out")
"""Ends of the names of operations that write their first argument and do not read it."""
GATHERS = {"aten::embedding", "aten::index.Tensor", "aten::index_select", "aten::gather"}
"""Operations that read as many elements of their first argument as they return."""
NOT_WRITTEN = {"aten::_fused_adamw_": ("grads",)}
"""Arguments that a schema marks as written, and that the operation leaves alone here."""


def _grouped_flops(x: Tensor, weights: Tensor, *_: Any, **__: Any) -> int:
    return 2 * x.numel() * weights.shape[-1]


FORMULAS = {torch.ops.aten._grouped_mm: _grouped_flops, **flop_registry}
"""FLOPs of an operation, from its arguments."""


@dataclass(frozen=True)
class Launch:
    """An operation on the device."""

    name: str
    """`aten::mm`, or `triton::rms_norm_forward`."""
    bytes: int
    """Each distinct argument and result once, and once more if it is updated in place."""
    flops: int
    place: str
    """Line of headrace, or node of the backward pass, that launched it."""
    engine: bool
    """True if the engine launched it: to gather weights, or to reduce, clip and apply gradients."""


@dataclass(frozen=True)
class Wait:
    """A read that makes the host wait for the device."""

    name: str
    place: str


class FakeGpu(TorchDispatchMode):
    """Records the launches and waits of the code that runs in it."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []
        self.waits: list[Wait] = []
        self.trains = False
        """True once the engine is built: from then on tensors may need gradients."""
        self.fakes = FakeTensorMode(allow_non_fake_inputs=True)

    def clear(self) -> None:
        self.launches.clear()
        self.waits.clear()

    def wait(self, name: str) -> None:
        self.waits.append(Wait(name, _place()[0]))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # a DTensor calls the operation on its local tensor
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **kwargs)  # a derivation of shapes
        if func is torch.ops.prim.device.default:
            return self._device_for_cpp()
        if "device" in kwargs and torch.device(kwargs["device"] or HOST).type == "meta":
            kwargs["device"] = CUDA  # C++ repeats this answer
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        target = torch.device(kwargs.get("device") or HOST)
        if target.type != "cuda" and not any(isinstance(item, FakeTensor) for item in inputs):
            return func(*args, **kwargs)
        if (answer := self._read(func, args, kwargs, target)) is not None:
            return answer
        if func.namespace == "headrace":
            with self:
                return inspect.unwrap(OPDEFS[func._schema.name]._init_fn)(*args, **kwargs)
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), COMPOSITE):
            with self:
                return func.decompose(*args, **kwargs)
        result = self._run(func, args, kwargs)
        self._record(func, args, kwargs, inputs, result)
        return result

    def _device_for_cpp(self) -> torch.device:
        """Return the device of a fake tensor that C++ sees; Python reads the tensor's own property.

        Autograd must see no GPU, because it would ask the driver for streams.
        """
        frame = sys._getframe(2)
        while frame.f_code.co_filename.startswith(WRAPPERS):
            frame = frame.f_back
        inside = frame.f_code.co_filename.startswith(ENGINE)
        node = None if inside else torch._C._current_autograd_node()
        in_graph = self.trains and (torch.is_grad_enabled() or node is not None)
        return META if in_graph else CUDA

    def _read(self, func: Any, args: Any, kwargs: dict[str, Any], target: torch.device) -> Any:
        """Return what the host reads, or None if this is no read."""
        name = func.name()
        if name == "aten::_local_scalar_dense":
            self.wait(name)
            return torch.ones((), dtype=args[0].dtype).item()
        if name == "aten::equal":
            self.wait(name)
            return True
        to_host = name == "aten::_to_copy" and kwargs.get("device") == HOST
        onto_host = name == "aten::copy_" and not isinstance(args[0], FakeTensor)
        if not (to_host or onto_host):
            self._written(name, args, kwargs, target)
            return None
        if not (kwargs.get("non_blocking") or (onto_host and len(args) > 2 and args[2])):
            self.wait(name)
        if onto_host:
            return args[0].fill_(1)
        return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)

    def _written(self, name: str, args: Any, kwargs: dict[str, Any], target: torch.device) -> None:
        """Record a wait if the host copies to the device, and not asynchronously: torch then
        returns behind all that was launched before."""
        to_device = name == "aten::_to_copy" and target.type == "cuda"
        source = args[0] if to_device else args[1] if name == "aten::copy_" else None
        if source is None or isinstance(source, FakeTensor):
            return
        if not (kwargs.get("non_blocking") or (len(args) > 2 and args[2])):
            self.wait(name)

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func.namespace == "c10d":  # messages of one rank: nothing changes
            return _collective(func, args)
        if func.name() == "aten::addmm.dtype_out":  # torch 2.11 cannot derive its shape
            return kwargs["out"]
        with self.fakes:
            return func(*args, **kwargs)

    def _record(
        self, func: Any, args: Any, kwargs: dict[str, Any], inputs: list[Tensor], result: Any
    ) -> None:
        name = func.name()
        if func.is_view or name in NO_LAUNCH:
            return
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        written = _written(func, args, kwargs)
        read = [] if name.startswith("aten::new_") or "_like" in name else inputs
        moved = _bytes([*read, *results])
        if name in GATHERS:
            moved += _bytes(results) - _bytes(inputs[:1])
        if not name.endswith(WRITTEN_ONLY) and "out" not in kwargs:
            moved += _bytes(written)
        count = None if "att" in name else FORMULAS.get(func.overloadpacket)
        shaped = [argument for argument in args if not isinstance(argument, torch.dtype)]
        flops = count(*shaped, **kwargs, out_val=result) if count is not None else 0
        self.launches.append(Launch(name, moved, int(flops), *_place()))

    def program(self, program: Any, *args: Any, **options: Any) -> None:
        """Record a launch of a Triton program."""
        tensors = [item for item in (*args, *options.values()) if isinstance(item, Tensor)]
        name = f"triton::{program.fn.__name__}"
        self.launches.append(Launch(name, _bytes(tensors), 0, *_place()))


NO_LAUNCH = {
    *("aten::empty.memory_format", "aten::empty_like", "aten::new_empty", "aten::empty_strided"),
    *("aten::new_empty_strided", "aten::_unsafe_view", "aten::set_.source_Tensor", "aten::lift"),
    *("aten::lift_fresh", "aten::resize_", "aten::record_stream", "aten::_reshape_alias"),
}
"""Operations on the host alone: memory and shapes."""


def _bytes(tensors: list[Tensor]) -> int:
    """Return the bytes of these tensors; a view inside another of them counts once."""
    spans: dict[int, list[tuple[int, int, int]]] = {}
    total = 0
    for tensor in tensors:
        size, stride = tensor.shape, tensor.stride()
        numel, last = 1, 0
        for n, step in zip(size, stride, strict=True):
            numel *= n if step else min(n, 1)
            last += (n - 1) * step
        if not numel:
            continue
        begin = tensor.storage_offset() * tensor.itemsize
        span = (begin, begin + (last + 1) * tensor.itemsize, numel * tensor.itemsize)
        spans.setdefault(tensor.untyped_storage()._cdata, []).append(span)
    for views in spans.values():
        kept: list[tuple[int, int, int]] = []
        for view in sorted(views, key=lambda span: -span[2]):
            if not any(a <= view[0] and view[1] <= b for a, b, _ in kept):
                kept.append(view)
                total += view[2]
    return total


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that an operation updates in place."""
    schema, result = func._schema, []
    spared = NOT_WRITTEN.get(func.name(), ())
    for number, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        if argument.name not in spared:
            result += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return result


def _place() -> tuple[str, bool]:
    """Return the line or node that launches, and True if it belongs to the engine."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(ENGINE) and "fake" not in file:
            return f"torch{file[len(ENGINE) - len('/distributed/') :]}:{frame.f_lineno}", True
        ours = file.startswith(PACKAGE) and not file.startswith(LIBRARIES)
        inside = file[len(PACKAGE) + 1 :] if ours else ""
        if inside and not inside.startswith(("benchmarks/", "tests/")):
            node = torch._C._current_autograd_node()
            if node is not None and not inside.startswith("models/"):
                return f"backward: {node.name()}", False
            line = f"{inside}:{frame.f_lineno} {frame.f_code.co_name}"
            return line, inside.startswith("trainer/engines/") and OBJECTIVE not in inside
        frame = frame.f_back
    return "?", False


def _collective(func: Any, args: Any) -> Any:
    """Return what a collective operation of one rank returns."""
    work = torch._C._distributed_c10d.FakeWork().boxed()
    tensors = func._schema.returns
    if len(tensors) == 1:
        return work
    return args[0], work


class _Stream:
    """A stream or an event; waiting for it on the host is recorded."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.device, self.device_index, self.stream_id, self.device_type = CUDA, 0, 0, 1

    def synchronize(self) -> None:
        self.gpu.wait("synchronize")

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> _Stream:
        return self

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...


@contextmanager
def fake_gpu() -> Iterator[FakeGpu]:
    """Run the code inside on a fake GPU."""
    gpu = FakeGpu()
    torch._C._ensureCUDADeviceGuardSet()
    with _pretended(gpu), torch.autograd.set_multithreading_enabled(False), gpu:
        yield gpu


@contextmanager
def _pretended(gpu: FakeGpu) -> Iterator[None]:
    """Answer questions about the device as an H200 would, and record programs."""
    from triton.runtime.jit import JITFunction

    def attention(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        assert attn_mask is None, "a dense mask has no flash attention"
        if enable_gqa:
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        out: Tensor = flash(q, k, v, dropout_p, is_causal, False, scale=scale)[0]
        return out

    def stream(*_: Any, **__: Any) -> _Stream:
        return _Stream(gpu)

    answers: list[tuple[Any, str, Callable[..., Any]]] = [
        (torch.cuda, "_lazy_init", lambda: None),
        (torch.cuda, "get_device_capability", lambda *_: CAPABILITY),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "set_device", lambda *_: None),
        (torch.cuda, "device_of", lambda *_: nullcontext()),
        (torch.cuda, "synchronize", lambda *_: gpu.wait("synchronize")),
        (torch.cuda, "stream", lambda *_: nullcontext()),
        *((torch.cuda, name, stream) for name in ("Stream", "Event", "current_stream")),
        (torch.Tensor, "record_stream", lambda *_: None),
        (torch.Tensor, "pin_memory", lambda tensor, *_: tensor),
        (torch.nn.functional, "scaled_dot_product_attention", attention),
        (JITFunction, "run", lambda program, *args, grid, warmup, **options: gpu.program(
            program, *args, **options
        )),
    ]  # fmt: skip
    is_cuda = property(lambda tensor: tensor.device.type == "cuda")
    with ExitStack() as patched:
        patched.enter_context(mock.patch.object(FakeTensor, "is_cuda", is_cuda, create=True))
        for owner, name, answer in answers:
            patched.enter_context(mock.patch.object(owner, name, answer))
        choice._find_gpu_problem.cache_clear()
        try:
            yield
        finally:
            choice._find_gpu_problem.cache_clear()
