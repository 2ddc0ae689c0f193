"""Attribution of small traces that are written by hand, so that every number is known."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.trainer.loop.hooks.attribution import ENGINE, attribute

Event = dict[str, Any]


def event(cat: str, name: str, ts: float, dur: float, thread: int = 1, number: int = 0) -> Event:
    args = {"correlation": number} if number else {}
    return {
        "ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 9, "tid": thread,
        "args": args,
    }  # fmt: skip


def gpu_trace() -> list[Event]:
    """Two steps on a device: a kernel of headrace, a product, FSDP's copy, the engine."""
    events = [
        {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "ts": 0, "pid": 9, "tid": 1},
        event("kernel", "of the step before", 0, 90, 7, number=99),
    ]
    for step in (0, 1):
        at, first = 1000.0 * step, 10 * step
        events += [
            event("cpu_op", "aten::linear", at, 40),
            event("cpu_op", "aten::mm", at + 5, 30),
            event("cuda_runtime", "cudaLaunchKernel", at + 10, 5, number=first + 1),
            event("cpu_op", "headrace::modal", at + 50, 40),
            event("cuda_driver", "cuLaunchKernelEx", at + 60, 5, number=first + 2),
            event("cuda_driver", "cuLaunchKernelEx", at + 70, 5, number=first + 3),
            # Another thread at the same time, within a range of FSDP.
            event("user_annotation", "FSDP::all_gather (layers.3)", at, 100, 2),
            event("cpu_op", "aten::copy_", at + 20, 20, 2),
            event("cuda_runtime", "cudaMemcpyAsync", at + 30, 5, 2, number=first + 4),
            event("user_annotation", ENGINE, at + 200, 100),
            event("cpu_op", "aten::_foreach_norm", at + 210, 50),
            event("cuda_runtime", "cudaLaunchKernel", at + 220, 5, number=first + 5),
            event("kernel", "gemm", at + 100, 400, 7, number=first + 1),
            event("kernel", "modal_chunk_states", at + 500, 100, 7, number=first + 2),
            event("kernel", "modal_forward", at + 600, 200, 7, number=first + 3),
            event("gpu_memcpy", "Memcpy DtoD", at + 450, 100, 8, number=first + 4),
            event("kernel", "norm" * 99, at + 900, 100, 7, number=first + 5),
        ]
    return events


def test_launches_belong_to_operations() -> None:
    result = attribute(gpu_trace(), 2)
    rows = {row.name: (row.milliseconds, row.launches) for row in result.operations}
    assert rows == {
        "aten::linear: gemm": (0.4, 1),
        "headrace::modal: modal_forward": (0.2, 1),
        "headrace::modal: modal_chunk_states": (0.1, 1),
        "FSDP::all_gather, aten::copy_": (0.1, 1),
        f"engine, aten::_foreach_norm: {'norm' * 12}": (0.1, 1),
    }
    assert result.milliseconds == pytest.approx(0.95), "1.9 ms from 0.1 to 2.0"
    # Nothing runs from 800 to 900 and from 1000 to 1100; the same again in the second step.
    assert result.idle == pytest.approx(0.3 / 1.9)


def test_a_table_sums_up_what_it_leaves_out() -> None:
    lines = attribute(gpu_trace(), 2).render(rows=2).splitlines()
    assert lines == [
        "ms a step  share launches  operation",
        "     0.40  42.1%        1  aten::linear: gemm",
        "     0.20  21.1%        1  headrace::modal: modal_forward",
        "     0.30  31.6%        3  3 more",
        "     0.15  15.8%           idle",
        "     0.95                  a step",
    ]


def test_on_a_cpu_operations_have_a_self_time() -> None:
    events = [
        event("user_annotation", ENGINE, 0, 100),
        event("cpu_op", "aten::linear", 100, 100),
        event("cpu_op", "aten::mm", 110, 60),
        event("cpu_op", "aten::add_", 20, 30),
    ]
    result = attribute(events, 1)
    rows = {row.name: row.milliseconds for row in result.operations}
    assert rows == {
        "aten::linear: aten::linear": 0.04,
        "aten::linear: aten::mm": 0.06,
        "engine, aten::add_: aten::add_": 0.03,
    }
    assert result.idle == pytest.approx(50 / 180)


def test_a_trace_without_operations_has_an_empty_table() -> None:
    assert attribute([], 3).operations == ()
    assert attribute([], 3).render().splitlines()[1].split() == ["0.00", "0.0%", "idle"]
