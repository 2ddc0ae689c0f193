"""Programs that a model launches: its kernels run on fake tensors, and each launch is recorded.

A launch is what Triton compiles a program for: dtypes, constants, options, and which integers and
addresses are multiples of 16.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ..accounting.fake.model import FakeDocuments, FakeModel
from ..accounting.fake.trace import fake_tensors
from ..accounting.layer_kinds import reduce_to_kinds
from ..accounting.shape import Shape
from ..attestation.calls import NAMESPACE
from ..attestation.cases.attention import ATTENTION
from ..attestation.cases.case import Draw, InputShape
from ..attestation.cases.compare import evaluate
from ..attestation.plan import AttestationPlan, Subject
from ..attestation.trials import limit_programs
from ..config.config import ModelConfig
from ..documents import Documents
from ..kernels.op import Op
from ..layers.grouped import DYNAMIC_TAGS
from ..parallel.groups import finding

ALIGNED = 4096
"""An address of torch's allocator: a multiple of what Triton looks for."""


@dataclass(frozen=True)
class Pointer:
    """What Triton asks of a tensor: its type, and whether its address is a multiple of 16."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address

    def ptr_range(self) -> int:
        return 0


@dataclass(frozen=True)
class Launch:
    program: Any
    """The function that Triton compiles."""
    arguments: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...]


class LaunchRecorder(TorchDispatchMode):
    """Runs headrace's ops on fake tensors up to their launches, and records these, each once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches: dict[Launch, None] = {}

    def __torch_dispatch__(
        self, operation: Any, types: Any, inputs: Any = (), options: Any = None
    ) -> Any:
        if operation.namespace != NAMESPACE or set(DYNAMIC_TAGS) & set(operation.tags):
            return operation(*inputs, **(options or {}))  # grouped products launch torch's programs
        code = OPDEFS[operation._schema.name]._init_fn
        op = getattr(code, "__self__", None)
        function = op.function if isinstance(op, Op) else code
        with self:
            return function(*inputs, **(options or {}))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the launches inside."""
        from triton.runtime.jit import JITFunction

        def record(program: Any, *arguments: Any, **options: Any) -> None:
            del options["grid"], options["warmup"]
            named = tuple((name, _describe(value)) for name, value in options.items())
            self.launches[Launch(program, tuple(map(_describe, arguments)), named)] = None

        with mock.patch.object(JITFunction, "run", record), self:
            yield


def _describe(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    offset = int(value.storage_offset()) * value.element_size()
    return Pointer(value.dtype, ALIGNED + offset % 16)


def list_launches(
    config: ModelConfig,
    shapes: Sequence[Shape],
    z_loss: float = 0.0,
    plan: AttestationPlan | None = None,
) -> tuple[list[Launch], list[str]]:
    """Return the launches of a step with micro-batches of these shapes, packed and not, and of the
    attestation of `plan`; then why some of them are unknown."""
    recorder, problems = LaunchRecorder(), []
    for shape in shapes:
        traced = reduce_to_kinds(config) if shape.precision.fp8 is None else config
        for packed in (True, False):
            model = FakeModel(traced, shape, packed=packed, named=True)
            with finding(model.axes.tensor, model.axes.context):
                problems += model.train(recorder.recording, z_loss)
    for subject in plan.subjects() if plan is not None else ():
        if subject.case.kernel.endswith(ATTENTION):  # a library's programs
            continue
        try:
            _attest(subject, recorder)
        except Exception as error:  # a run compiles what it needs
            problems.append(f"{subject.case.kernel}, {subject.case.name}: {error!r}")
    return list(recorder.launches), list(dict.fromkeys(problems))


class FakeDraw(Draw):
    """Draws tensors without numbers; documents are real: shapes depend on them."""

    def normal(self, name: str, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.empty(shape, dtype=self.dtype)

    def documents(self, shape: InputShape, *, continued: bool = False) -> Documents:
        with _disable_current_modes():
            return FakeDocuments(super().documents(shape, continued=continued).positions)


def _attest(subject: Subject, recorder: LaunchRecorder) -> None:
    """Record the launches of a case, as `attestation/trials.py` runs it."""
    case = subject.case
    dtype = torch.float32 if case.dtype_name else getattr(torch, subject.dtype)
    for trial in subject.trials:
        draw = FakeDraw(dtype, "cpu", trial.seed)
        with fake_tensors(torch.float32), limit_programs(trial.programs), recorder.recording():
            evaluate(case.run, case.make(draw, trial.shape), draw, Tensor.clone)
