"""The order of torch's implementations of attention reaches its calls."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, current_flash_attention_impl, varlen
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.models.documents import Documents
from headrace.models.layers.attention import packed
from headrace.models.layers.attention.limits import AttentionCall, find_unsupported
from headrace.models.layers.attention.order import (
    DEFAULT_ORDER,
    Implementation,
    KernelsConfig,
    attention_order,
)
from headrace.models.layers.attention.packed import packed_attention, supports_packed_attention


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
        (DEFAULT_ORDER, SDPBackend.CUDNN_ATTENTION),
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


@pytest.mark.parametrize(("order", "plain"), [(DEFAULT_ORDER, False), (("cudnn", "math"), True)])
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


def test_packed_rows_need_one_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents are computed one by one where neither cuDNN nor flash attention may run."""
    with FakeTensorMode():
        q = torch.empty(1, 256, 4, 64, device="cuda", dtype=torch.bfloat16)
    assert supports_packed_attention("auto", q)
    for order, takes in ((("cudnn", "math"), True), (("efficient", "math"), False)):
        with attention_order(order):
            assert supports_packed_attention("auto", q) == takes
    monkeypatch.setattr(packed, "KEEPS_PLANS", False)
    with attention_order(("cudnn", "math")):
        assert not supports_packed_attention("auto", q)


def test_cudnn_is_left_out_where_it_plans_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "KEEPS_PLANS", False)
    test_packed_rows_take_the_first(DEFAULT_ORDER, SDPBackend.FLASH_ATTENTION, monkeypatch)


def test_flash4_takes_the_place_of_flash(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a stand-in for the package."""
    package, cute, interface = (
        ModuleType(name) for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface")
    )
    interface._flash_attn_fwd = interface._flash_attn_bwd = None  # type: ignore[attr-defined]
    for module in (package, cute, interface):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("ENABLED", "DIR"):
        monkeypatch.delenv(f"FLASH_ATTENTION_CUTE_DSL_CACHE_{name}", raising=False)
    with attention_order(("flash4", "math")):
        assert current_flash_attention_impl() == "FA4"
        assert os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"].startswith(str(tmp_path))
    assert current_flash_attention_impl() is None
    with attention_order(("flash", "math")):
        assert current_flash_attention_impl() is None


def call(head_dim: int = 128, **changes: Any) -> AttentionCall:
    values = {"heads": 8, "kv_heads": 2, "value_dim": head_dim, "window": None, "scale": 0.1}
    return AttentionCall(**{**values, "head_dim": head_dim, "dtype": "bfloat16", "packed": True,
                            **changes})  # fmt: skip


H100, B200, A100 = (9, 0), (10, 0), (8, 0)


@pytest.mark.parametrize(
    ("order", "asked", "gpu", "problem"),
    [
        (DEFAULT_ORDER, call(192), B200, None),
        (("cudnn",), call(), None, None),
        (("cudnn",), call(window=512), None, "2 of keys, a window of 512 (cudnn: it"),
        (("cudnn",), call(192), None, "cudnn: its heads have at most 128 channels"),
        (("cudnn", "flash"), call(window=512), None, None),
        (("cudnn", "flash"), call(dtype="float32"), None, "flash: it computes in bf16"),
        (("flash",), call(192, value_dim=128), None, "its keys and values are equally wide"),
        (("flash4", "math"), call(window=512), H100, None),
        (("flash4", "math"), call(dtype="float32"), H100, None),
        (("flash4", "math"), call(192), H100, None),
        (("flash4", "math"), call(192), B200, "heads of 8 to 128 channels, 256"),
        (("flash4", "math"), call(192, value_dim=128), B200, None),
        (("cudnn", "flash4", "math"), call(36), None, "a multiple of 8 channels"),
        (("flash4", "math"), call(), A100, "it needs compute capability 9.0 (H100, H200) or 10.x"),
    ],
)  # fmt: skip
def test_what_an_implementation_cannot_do_is_known(
    order: tuple[Implementation, ...], asked: AttentionCall, gpu: Any, problem: str | None
) -> None:
    """flash4's limits are those with which it compiles for sm_90 and sm_100."""
    reason = find_unsupported(order, [asked], gpu)
    assert reason is None if problem is None else problem in str(reason)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ((), "name each implementation once"),
        (("flash", "flash"), "name each implementation once"),
        (("flash", "math", "cudnn"), "put cudnn before flash"),
        (("flash4", "cudnn"), "put cudnn before flash4"),
        (("flash4", "flash"), "takes the place of flash"),
    ],
)
def test_orders_without_meaning_are_refused(
    order: tuple[Implementation, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        KernelsConfig(attention=order)


def test_deterministic_runs_leave_out_cudnn() -> None:
    assert KernelsConfig().order(deterministic=True) == ("flash", "efficient", "math")
    assert KernelsConfig().order(deterministic=False) == DEFAULT_ORDER
