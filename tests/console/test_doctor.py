"""`headrace doctor`: detected components, defaults, missing packages and hints."""

import importlib.metadata
import json
import shutil
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from formats.samples import pin_keys

from headrace.console.headrace import main
from headrace.models.attestation import by_hand
from headrace.models.attestation.cases import all_cases
from headrace.models.attestation.cases.fp8 import attested_fp8_cases
from headrace.models.attestation.trials import Verdict
from headrace.models.kernels import choice


def doctor(*words: str) -> Result:
    return CliRunner().invoke(main, ["doctor", *words])


@pytest.fixture(autouse=True)
def empty_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_ROLE_ARN", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)


def test_this_machine_has_all_requirements() -> None:
    result = doctor()
    assert result.exit_code == 0, result.output
    assert "all requirements of headrace are installed" in result.output
    for title in ("detected", "used by default"):
        assert title in result.output.splitlines()


def test_json_has_the_same_report() -> None:
    report = json.loads(doctor("--json").stdout)
    assert report["ok"] is True
    pin_keys("doctor", {**report, "found": {}, "missing": []})
    assert report["found"]["torch"].startswith(torch.__version__)
    assert report["found"]["deepspeed"] == importlib.metadata.version("deepspeed")
    assert report["used"]["engine"].startswith("deepspeed")
    assert not any(item["needed"] for item in report["missing"])


def test_every_requirement_is_checked() -> None:
    result = json.loads(doctor("--json").stdout)["found"]
    for name in ("pyarrow", "numpy", "tokenizers", "fsspec", "s3fs", "triton"):
        assert name in result


def test_a_missing_package_fails_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "s3fs":
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.4.2" if name == "fsspec" else real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    result = doctor("--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    needed = {item["what"]: item["hint"] for item in report["missing"] if item["needed"]}
    assert needed == {
        "s3fs>=2026": "pip install 's3fs>=2026'",
        "fsspec>=2026; 0.4.2 is installed": "pip install 'fsspec>=2026'",
    }
    assert "all requirements of headrace are installed" not in doctor().output


def test_a_gpu_without_a_c_compiler_for_kernels_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CC", "/nowhere/cc")
    assert doctor().exit_code == 0, "without a GPU, no kernel is compiled"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(
        name="NVIDIA H100", total_memory=1 << 36, major=9, minor=0))  # fmt: skip
    monkeypatch.setattr(choice, "find_device_problem", lambda _: None)
    result = doctor()
    assert result.exit_code == 1
    lines = [line.strip() for line in result.output.splitlines()]
    [number] = [number for number, line in enumerate(lines) if "finds no /nowhere/cc" in line]
    assert lines[number + 1].startswith("hint: apt-get install gcc")


def test_a_missing_extra_does_not_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "ray":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    result = doctor()
    assert result.exit_code == 0
    assert "pip install 'headrace[ray]'" in result.output


def test_a_gpu_that_torch_cannot_use_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    result = doctor()
    assert result.exit_code == 0  # a CPU is enough
    assert "torch cannot use the NVIDIA GPU of this machine" in result.output


def test_gpus_are_used_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    card = namedtuple("card", "name total_memory major minor")("Wheel 9", 80e9, 9, 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: card)
    report = json.loads(doctor("--json").stdout)
    assert report["found"]["gpu 1"] == "Wheel 9, 80 GB, compute 9.0"
    assert report["used"]["device"] == "cuda, 2 ranks"
    assert report["used"]["precision"] == "bf16 with fp32 masters"


def test_credentials_are_detected_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIASECRET")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "topsecret")
    result = doctor()
    assert "s3:// from AWS_ACCESS_KEY_ID" in result.output
    assert "SECRET" not in result.output.replace("AWS_SECRET_ACCESS_KEY", "")
    assert "topsecret" not in result.output


def test_a_small_disk_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")(20e9, 19e9, 1e9)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert "disk space: only 1 GB are free in this folder" in doctor().output


def test_kernels_without_a_gpu_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = doctor("--kernels")
    assert result.exit_code == 1
    assert "no GPU that torch can use: no kernel was compared" in result.output
    assert "--interpret" in result.output
    assert doctor("--interpret").exit_code == 2


@pytest.mark.slow
def test_kernels_are_interpreted() -> None:
    result = doctor("--kernels", "--interpret", "--only", "routed_rows")
    assert result.exit_code == 0, result.output
    assert "2 cases passed, each twice with equal bits on Triton's interpreter" in result.output


def test_a_kernel_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stand-in for a GPU: its workers fail one case, and a fault is known."""

    class Workers:
        def __init__(self, plan: Any, device: str, **_: Any) -> None:
            assert device == "cuda:0"
            self.plan = plan

        def verdicts(self) -> list[Verdict]:
            wrong = "gradient of x differs between two runs on the same inputs, with 2 rows"
            return [
                Verdict(case.kernel, case.name, dtype, 1e-3, wrong if case.name == "gelu" else None)
                for case, dtype, _ in self.plan.subjects()
            ]

        def close(self) -> None: ...

    machine = {"device": "NVIDIA H100, compute 9.0", "driver": "580", "triton": "3.9.0"}
    machine |= {"torch": "2.15.0", "sources": "5d", "assembler": ""}
    monkeypatch.setattr(by_hand, "Attestation", Workers)
    monkeypatch.setattr(by_hand, "_find_devices", lambda: ["cuda:0"])
    monkeypatch.setattr(by_hand, "describe_machine", lambda _: machine)
    monkeypatch.setattr(choice, "FAULTY", {("glu", torch.float16): "Triton 3.6 is wrong"})
    result = doctor("--kernels", "--only", "glu", "--only", "rope")
    assert result.exit_code == 1
    lines = [line.split() for line in result.output.splitlines()]
    number = sum(case.kernel == "glu" for case in (*all_cases(), *attested_fp8_cases()))
    assert ["glu", str(number), "FAILED", "FAILED", "known", "fault"] in lines
    assert ["rope", "2", "1.0e-03", "1.0e-03", "1.0e-03"] in lines
    assert "glu in float16 runs as plain torch: Triton 3.6 is wrong" in result.output
    assert "FAILED glu [gelu] bfloat16: gradient of x differs between two runs" in result.output
    assert "1 kernel failed on NVIDIA H100, Triton 3.9.0, torch 2.15.0, 580" in result.output
    [record] = json.loads(doctor("--kernels", "--only", "rope", "--json").stdout)
    assert record["ok"] is True
    pin_keys("doctor-kernels", {**record, "known_faults": {}})
