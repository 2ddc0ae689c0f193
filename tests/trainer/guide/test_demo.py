"""The demo: its corpora, its commands, and one complete run of it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from headrace.trainer.guide import demo


def test_the_code_is_the_standard_library_s(tmp_path: Path) -> None:
    demo.write_code(tmp_path / "code")
    files = list((tmp_path / "code").iterdir())
    assert "import" in (tmp_path / "code" / "ast.py").read_text()
    assert sum(file.stat().st_size for file in files) <= demo.CODE_BYTES


def test_the_prose_is_the_descriptions_of_packages(tmp_path: Path) -> None:
    demo.write_prose(tmp_path / "prose")
    assert "NumPy" in (tmp_path / "prose" / "numpy.txt").read_text()
    assert not any(
        file.read_text().startswith("Metadata-Version") for file in (tmp_path / "prose").iterdir()
    )


def test_the_dna_is_deterministic_and_has_lower_case_repeats(tmp_path: Path) -> None:
    for name in ("a.fa", "b.fa"):
        demo.write_dna(tmp_path / name)
    assert (tmp_path / "a.fa").read_bytes() == (tmp_path / "b.fa").read_bytes()
    lines = (tmp_path / "a.fa").read_text().splitlines()
    records = [line for line in lines if line.startswith(">")]
    letters = "".join(line for line in lines if not line.startswith(">"))
    assert len(records) == demo.RECORDS
    assert len(letters) == demo.RECORDS * demo.BASES
    assert set(letters) == set("ACGTacgt")
    lower = sum(map(str.islower, letters)) / len(letters)
    assert 0.15 < lower < 0.35
    # A base carries information about the next, so that a model can learn the sequence.
    pairs = np.zeros((4, 4))
    codes = np.array(["ACGT".index(letter) for letter in letters if letter.isupper()])
    np.add.at(pairs, (codes[:-1], codes[1:]), 1)
    joint = pairs / pairs.sum()
    independent = joint.sum(1, keepdims=True) * joint.sum(0, keepdims=True)
    assert (joint * np.log(joint / independent)).sum() > 0.01


def test_corpora_are_collected_once(tmp_path: Path) -> None:
    result = demo.Demo(tmp_path)
    result.collect()
    mark = tmp_path / "corpora" / "code" / "mine.py"
    mark.touch()
    result.collect()
    assert mark.exists()
    assert not (tmp_path / "corpora.unfinished").exists()


def run(out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headrace.console.headrace", "demo", "--out", str(out)]
    return subprocess.run(command, capture_output=True, text=True)


def test_an_out_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = run(tmp_path / "file" / "demo")
    assert result.returncode == 1
    assert "error: cannot make" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_complete_demo_and_a_second_that_reuses_it(tmp_path: Path) -> None:
    first = run(tmp_path)
    assert first.returncode == 0, first.stderr
    folder = tmp_path / "run"
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    names = [event["event"] for event in events if event["event"] not in ("checkpoint", "memory")]
    assert names == ["start", "first step", "stop", "resume", "first step", "finish"]
    assert events[0]["layout"]["engine"] == "DeepSpeed ZeRO-1"
    assert events[0]["layout"]["processes"] == 2

    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(len(steps)))
    assert steps[0]["loss"] > np.log(257)  # untrained: above the uniform distribution
    assert steps[-1]["loss"] < 3.0

    # The report loads no other file.
    report = (folder / "report.html").read_text()
    assert "<svg" in report
    assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//""", report)

    second = run(tmp_path)
    assert second.returncode == 0, second.stderr
    assert "trainer" not in "".join(re.findall(r"^\$ .*", second.stderr, re.MULTILINE))
    assert str(folder / "report.html") in second.stderr
