"""Device time by operation in a trace, and the lines of ncu."""

from __future__ import annotations

import pytest

from benchmarks.long import _gpu_profile
from benchmarks.long._gpu_tools import launches


def event(cat: str, name: str, ts: float, dur: float, correlation: int = 0) -> dict[str, object]:
    args = {"correlation": correlation} if correlation else {}
    tid = 7 if cat == "kernel" else 1
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 0, "tid": tid,
            "args": args}  # fmt: skip


def test_device_time_belongs_to_the_operation_that_launched_it() -> None:
    launched = [  # category, names of the operations around it, time on the device
        ("GEMM", ["headrace::linear_cross_entropy", "aten::addmm"], 40.0),
        ("kernel", ["headrace::glu"], 10.0),
        ("attention", ["torch_attn::_varlen_attn", "aten::_flash_attention_forward"], 8.0),
        ("attention", ["torch_attn::_varlen_attn_backward", "aten::empty", "aten::zero_"], 2.0),
        ("glue", ["AddBackward0", "aten::add", "aten::copy_"], 4.0),
        ("glue", ["Torch-Compiled Region: 0/0"], 3.0),
        ("engine", [_gpu_profile.ENGINE, "aten::linalg_vector_norm"], 2.0),
        ("engine", ["FSDP::all_gather (0)", "c10d::_allgather_base_"], 1.0),
        ("engine", ["Optimizer.step#AdamW.step", "aten::_fused_adamw_"], 5.0),
    ]
    events: list[dict[str, object]] = [{"ph": "M", "name": "process_name"}]
    for number, (_, names, duration) in enumerate(launched):
        at = 100.0 * number
        for depth, name in enumerate(names):
            cat = "cpu_op" if "::" in name and " " not in name else "user_annotation"
            events.append(event(cat, name, at + depth, 50.0 - 2 * depth))
        events.append(event("cuda_runtime", "cudaLaunchKernel", at + 10, 1.0, number + 1))
        events.append(event("kernel", "k", at + 20, duration, number + 1))
    events.append(event("kernel", "k", 25.0, 5.0, 1))  # a second launch of the call, at once
    events.append(event("kernel", "k", 5.0, 5.0, 999))  # of an earlier step
    events.append(event("gpu_user_annotation", "FSDP::all_gather", 0.0, 900.0))
    result = _gpu_profile.shares(events, steps=1, cuda=True)
    expected = {
        kind: sum(d for launch_kind, _, d in launched if launch_kind == kind)
        for kind in result.seconds
    }
    expected["GEMM"] += 5.0
    assert result.seconds == pytest.approx({kind: 1e-6 * time for kind, time in expected.items()})
    assert result.launches == len(launched) + 1
    assert result.busy == pytest.approx(75e-6)
    assert sum(map(result.share, result.seconds)) == pytest.approx(1)


def test_launches_of_ncu_are_lines() -> None:
    output = """==PROF== Connected to process 1
"ID","Process ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"
"0","1","backward(int *, float)","GPU Speed Of Light Throughput","DRAM Throughput","%","61.2"
"0","1","backward(int *, float)","GPU Speed Of Light Throughput","Duration","us","412.5"
"0","1","backward(int *, float)","Launch Statistics","Registers Per Thread","register/thread","255"
"1","1","sums","Launch Statistics","Grid Size","","132"
"1","1","sums","GPU Speed Of Light Throughput","Duration","us","3.0"
"""
    assert list(launches(output.splitlines())) == [
        "0 backward: 61.2 % of memory bandwidth, 412.5 us duration, 255 register/thread registers",
        "1 sums: 3.0 us duration",
    ]
