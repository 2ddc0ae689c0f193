from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from formats.samples import pin_keys

from headrace.console.headrace import main
from headrace.models.config.config import load_model_config
from headrace.models.config.options.precision import PRECISIONS
from headrace.models.conversion.folders import FORMATS, write_model
from headrace.models.model.model import Model

SHORT = ("--seq-len", "64")
"""Rows whose memory is traced in a moment."""


def run(*words: str) -> Result:
    return CliRunner().invoke(main, ["models", *words])


def document(*words: str) -> Any:
    result = run(*words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # importing it fails
from headrace.console.headrace import main
main(["models", *sys.argv[1:]])
"""


def test_list_has_every_shipped_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counts are stored: a second list needs no torch."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    listed = document("list")
    pin_keys("models-list", listed)
    sizes = {row["name"]: row["parameters"] for row in listed}
    assert sizes["evo2-7b-8k"] == 6_481_059_584
    assert len(sizes) >= 32
    again = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, "list"], capture_output=True, text=True
    )
    assert again.returncode == 0, again.stderr
    assert again.stdout == run("list").stdout
    line = next(line for line in again.stdout.splitlines() if line.startswith("evo2-7b-8k"))
    assert line.split(maxsplit=2)[1:] == ["6,481,059,584", "se ×9  mr ×9  li ×9  attention ×5"]


def test_published_families_are_listed() -> None:
    rows = document("list", "--published")
    pin_keys("models-list-published", rows)
    lines = run("list", "--published").stdout.splitlines()
    start = lines.index("Lfm2            350M, 700M, 1.2B, 2.6B")
    assert lines[start + 1] == "  operators    hyena-mlp, attention, glu"
    assert len(lines) == 5 * len(rows)


def test_a_second_show_needs_no_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = ["show", "tiny-transformer", "--seq-len", "64"]
    first = run(*words)

    def repeat(*more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", WITHOUT_TORCH, *words, *more]
        return subprocess.run(command, capture_output=True, text=True)

    done = repeat()
    assert (done.returncode, done.stdout) == (0, first.stdout), done.stderr
    for more in (["width=64"], ["--run", "engine.zero=2"]):  # other questions
        assert "this needs the package torch" in repeat(*more).stderr


def test_show_as_json() -> None:
    shown = document("show", "tiny-hybrid", "vocab_size=1024", "--seq-len", "64")
    pin_keys("models-show", shown)
    assert shown["parameters"] == 1_169_736 + 512 * 128
    assert set(shown["parameters_by_part"]) >= {"embedding", "se", "norms"}
    assert shown["seq_len"] == 64 and shown["memory"]["seq_len"] == 64
    longer = document("show", "tiny-hybrid", "--seq-len", "128")
    assert (
        longer["training_flops_per_token"]
        > document("show", "tiny-hybrid", "--seq-len", "64")["training_flops_per_token"]
    )


def test_show_names_active_parameters() -> None:
    shown = document("show", "blackmamba-1.5b", *SHORT)
    assert shown["active_parameters"] < shown["parameters"] / 3
    assert abs(shown["six_n_error"]) < 0.1
    assert " active): 30 layers" in run("show", "blackmamba-1.5b", *SHORT).stdout


def test_show_draws_the_layers() -> None:
    text = run("show", "zamba2-1.2b", *SHORT, "--zero", "3", "--dp", "8").stdout
    assert text.startswith("1.22B parameters: 38 layers, width 2,048, vocabulary 32,000\n")
    assert "MMMMMSMMMMMS" in text and "head (tied)" in text
    assert "shared>mamba ×6" in text
    assert "1,215,064,704" in text
    assert "DeepSpeed ZeRO-3; dp 8" in text


def test_a_folder_of_transformers_and_our_own_are_shown(tmp_path: Path) -> None:
    file, folder = tmp_path / "model.yaml", tmp_path / "llama"
    text = "vocab_size: 64\nwidth: 32\npattern: '[attention] * 2'\nmlp: glu\noperators:\n"
    file.write_text(
        f"{text}  attention: {{kind: attention, heads: 4}}\n  glu: {{kind: glu, hidden: 64}}\n"
    )
    shown = document("show", str(file))
    assert document("show", str(tmp_path)) == shown
    config = load_model_config(file)
    model = Model(config)
    write_model(config, dict(model.named_parameters()), folder, format="huggingface")
    from_folder = document("show", str(folder), "width=32")
    assert from_folder["parameters"] == shown["parameters"]
    empty = run("show", str(tmp_path / "llama" / ".."), "widht=3")
    assert empty.exit_code == 2 and "width" in empty.stderr
    (tmp_path / "empty").mkdir()
    nothing = run("show", str(tmp_path / "empty"))
    assert nothing.exit_code == 1 and "holds no model" in nothing.stderr


def test_mistakes_have_no_traceback(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("vocab_size: 5\nwidth: 8\npattern: '[a]'\noperators: {b: {kind: hyena-li}}\n")
    for words, code, expected in (
        (("show", "lama3-8b"), 1, "llama3-8b"),
        (("show", str(file)), 1, "layer 0 names the operator `a`"),
        (("show", "tiny-hybrid", "widht=3"), 2, "width"),
    ):
        result = run(*words)
        assert result.exit_code == code
        assert expected in result.stderr and "Traceback" not in result.output


@pytest.mark.parametrize(
    ("words", "known"),
    [
        (("show", "tiny-hybrid", "--precision", "bf61"), PRECISIONS),
        (("convert", "a", "b", "--format", "gguf"), FORMATS),
    ],
)
def test_an_unknown_name_lists_the_table(words: tuple[str, ...], known: Collection[str]) -> None:
    result = run(*words)
    assert result.exit_code == 2
    assert f"is not one of {', '.join(map(repr, known))}." in result.stderr
