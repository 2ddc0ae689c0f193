"""Kernels are attested before the first step: by one rank of each kind of device, for all."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from formats.samples import pin_keys
from support.ranks.ranks import Ranks

from headrace.dataplane.runlog.writer import LineWriter
from headrace.trainer.folders.folder import ATTESTED
from headrace.trainer.launch.attestation import AttestationOutcome

TASK = "attesting.attest"
H100, H200 = "NVIDIA H100, compute 9.0", "NVIDIA H200, compute 9.0"
WRONG = "output 0 is wrong by 3.5e-01, and the bound for bfloat16 is 0.02, with 2 rows of 64 tokens"


def test_one_rank_attests_for_all_and_a_second_start_reads_it(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    first, second = two_ranks.run(TASK, tmp_path, [], [H100, H100])
    assert (first["started"], second["started"]) == (1, 0)
    assert first["what"] == second["what"] == "kernels attested on NVIDIA H100, Triton 3.9.0"
    assert first["digest"] == second["digest"] and "rms_norm" in first["kernels"]
    again, _ = two_ranks.run(TASK, tmp_path, [], [H100, H100])
    assert (again["started"], again["seconds"]) == (0, 0.0)
    assert again["digest"] == first["digest"]


def test_other_devices_and_other_widths_are_attested_anew(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(TASK, tmp_path, [], [H100, H100])
    first, second = two_ranks.run(TASK, tmp_path, [], [H100, H200])
    assert (first["started"], second["started"]) == (0, 1)
    assert first["what"].endswith("on NVIDIA H100, Triton 3.9.0 and NVIDIA H200, Triton 3.9.0")
    wider, _ = two_ranks.run(TASK, tmp_path, ["model.operators.glu.hidden=64"], [H100, H100])
    assert wider["started"] == 1
    following, _ = two_ranks.run(TASK, tmp_path, ["kernels.rms_norm=next"], [H100, H100])
    assert following["started"] == 1 and following["digest"] != first["digest"]


@pytest.mark.parametrize("damage", ["flip", "version"])
def test_a_damaged_or_older_file_is_attested_again(
    two_ranks: Ranks, tmp_path: Path, damage: str
) -> None:
    two_ranks.run(TASK, tmp_path, [], [H100, H100])
    [file] = (tmp_path / "headrace-kernels").glob("*.json")
    pin_keys("attestation", json.loads(file.read_text()))
    text = file.read_text()
    changed = {"flip": ("rms_norm", "rms_morn"), "version": ('"version": 1', '"version": 0')}
    assert changed[damage][0] in text
    file.write_text(text.replace(*changed[damage]))
    assert two_ranks.run(TASK, tmp_path, [], [H100, H100])[0]["started"] == 1
    assert file.read_text() == text, "mended"


def test_a_start_whose_kernels_have_changed_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Negative control: a start with the digest of the last one."""
    events, notes = tmp_path / "events.jsonl", []
    job: Any = SimpleNamespace(folder=SimpleNamespace(events=events), save_note=notes.append)
    outcome = AttestationOutcome([f"{H100}, Triton 3.9.0"], "5dab", ["glu"], {}, 2.0)
    newer = replace(outcome, where=[f"{H100}, Triton 4.0.0"], digest="77fe")
    writer = LineWriter(events)
    for started, earlier in ((outcome, None), (outcome, outcome), (newer, outcome)):
        caplog.clear()
        started.record(job)
        warnings = [entry.getMessage() for entry in caplog.records if entry.levelname == "WARNING"]
        if earlier is None or earlier.digest == started.digest:
            assert warnings == []
        else:
            [warning] = warnings
            assert warning.startswith("the last start had other kernels, or another device or")
            assert "Triton 3.9.0 (5dab)" in warning
        writer.write({"event": ATTESTED, **started.details()})
    assert notes == [str(outcome), str(outcome), str(newer)]


def test_a_failure_on_one_rank_stops_all(two_ranks: Ranks, tmp_path: Path) -> None:
    """Negative control of the file: what failed is attested again at the next start."""
    problems = [{}, {"glu": WRONG}]
    errors = two_ranks.run(TASK, tmp_path, [], [H100, H200], problems)
    assert errors[0] == errors[1]
    for text in ("the kernel glu failed on NVIDIA H100, Triton 3.9.0 and NVIDIA H200", "torch 2.15",
                 "glu: [silu; ", "wide, bf16]", WRONG, "kernels.fallback=true"):  # fmt: skip
        assert text in errors[0], errors[0]
    mended = two_ranks.run(TASK, tmp_path, [], [H100, H200])
    assert [outcome["started"] for outcome in mended] == [0, 1]


def test_fallback_replaces_it_on_all_ranks(two_ranks: Ranks, tmp_path: Path) -> None:
    words = ["kernels.fallback=true"]
    outcomes = two_ranks.run(TASK, tmp_path, words, [H100, H200], [{}, {"glu": WRONG}])
    for outcome in outcomes:
        assert outcome["failed"] == ["glu"] and "glu" not in outcome["kernels"]
        assert WRONG in outcome["replaced"]["glu"]


def test_a_kernel_that_the_model_names_is_not_replaced(two_ranks: Ranks, tmp_path: Path) -> None:
    words = ["kernels.fallback=true", "model.operators.glu.kernel=triton"]
    for error in two_ranks.run(TASK, tmp_path, words, [H100, H100], [{"glu": WRONG}, {}]):
        assert "the kernel glu cannot do this" in error


CUDNN = {"cudnn attention": WRONG}


def test_attention_that_fails_is_left_out(two_ranks: Ranks, tmp_path: Path) -> None:
    words = ["model.operators.attention.head_dim=8"]
    [error, _] = two_ranks.run(TASK, tmp_path, words, [H100, H100], [CUDNN, {}])
    assert "the kernel cudnn attention failed" in error
    assert "leave cudnn out of kernels.attention, or set kernels.fallback=true" in error
    words += ["kernels.fallback=true"]
    for outcome in two_ranks.run(TASK, tmp_path, words, [H100, H100], [CUDNN, {}]):
        assert outcome["failed"] == ["cudnn attention"]
        assert outcome["order"] == ["flash", "efficient", "math"]
    words += ["kernels.attention=[cudnn]"]
    for error in two_ranks.run(TASK, tmp_path, words, [H100, H100], [CUDNN, {}]):
        assert "kernels.attention without cudnn: none of them can compute" in error
