"""The order of torch's implementations of attention reaches its calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, varlen
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.models.documents import Documents
from headrace.models.layers.attention.order import (
    IMPLEMENTATIONS,
    Implementation,
    KernelsConfig,
    attention_order,
)
from headrace.models.layers.attention.packed import packed_attention


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.backends: list[int] = []

    def __torch_dispatch__(self, op: Any, types: Any, inputs: Any = (), options: Any = None) -> Any:
        self.names.append(op.name())
        if op.name() == "torch_attn::_varlen_attn":
            names = [argument.name for argument in op._schema.arguments]
            default = op._schema.arguments[names.index("backend")].default_value
            self.backends.append(dict(zip(names, inputs, strict=False)).get("backend", default))
        return op(*inputs, **(options or {}))


@pytest.mark.parametrize(
    ("order", "chosen"),
    [
        (IMPLEMENTATIONS, SDPBackend.CUDNN_ATTENTION),
        (("flash", "efficient", "math"), SDPBackend.FLASH_ATTENTION),
        (("cudnn",), SDPBackend.CUDNN_ATTENTION),
    ],
)
def test_packed_rows_take_the_first(
    order: tuple[Implementation, ...], chosen: SDPBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a fake H200 with cuDNN 9.24."""
    monkeypatch.setattr(varlen, "_should_use_cudnn", lambda _: True)
    monkeypatch.setattr(varlen, "_cudnn_version_and_major_capability", lambda _: (92400, 9))
    ends = torch.tensor([0, 100, 256], dtype=torch.int32)
    spans = Documents.build(ends, (1, 256)).spans()
    with FakeTensorMode(allow_non_fake_inputs=True), attention_order(order), Calls() as calls:
        q = torch.empty(1, 256, 4, 64, device="cuda", dtype=torch.bfloat16)
        packed_attention(q, q, q, spans, scale=0.1, window=None)
    assert [SDPBackend(backend) for backend in calls.backends] == [chosen]


@pytest.mark.parametrize(("order", "plain"), [(IMPLEMENTATIONS, False), (("cudnn", "math"), True)])
def test_rows_of_one_document_take_the_first(
    order: tuple[Implementation, ...], plain: bool
) -> None:
    """On the CPU, which has flash and math; torch's own order of the device for the others."""
    q = torch.randn(1, 4, 32, 16)
    priority = torch._C._get_sdp_priority_order()  # type: ignore[attr-defined]
    with attention_order(order), Calls() as calls:
        F.scaled_dot_product_attention(q, q, q, is_causal=True)
        now = torch._C._get_sdp_priority_order()  # type: ignore[attr-defined]
    assert ("aten::_scaled_dot_product_flash_attention_for_cpu" in calls.names) != plain
    names = [SDPBackend(number).name.removesuffix("_ATTENTION").lower() for number in now]
    assert names[: len(order)] == list(order)
    assert torch._C._get_sdp_priority_order() == priority  # type: ignore[attr-defined]


def test_nothing_runs_that_was_left_out() -> None:
    q: Tensor = torch.randn(1, 4, 32, 16)
    with attention_order(("cudnn",)), pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(q, q, q, is_causal=True)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ((), "name each implementation once"),
        (("flash", "flash"), "name each implementation once"),
        (("flash", "math", "cudnn"), "put cudnn before flash"),
    ],
)
def test_orders_without_meaning_are_refused(
    order: tuple[Implementation, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        KernelsConfig(attention=order)


def test_deterministic_runs_leave_out_cudnn() -> None:
    assert KernelsConfig().order(deterministic=True) == ("flash", "efficient", "math")
    assert KernelsConfig().order(deterministic=False) == IMPLEMENTATIONS
