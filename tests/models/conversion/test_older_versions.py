"""Folders of every family, with older versions of transformers that people have."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FILES = (
    "tests/models/conversion/test_huggingface.py",
    "tests/models/conversion/test_originals.py",
    "tests/trainer/weights/test_transformers_folder.py",
)
BOUND = ("transformers", "tokenizers", "huggingface_hub")
"""Packages whose pinned versions an older transformers refuses."""


@pytest.mark.long  # downloads a version of transformers
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("version", ["4.57.6", "5.6.2", "5.12.1"])
def test_older_versions_read_and_write_the_same_folders(version: str, tmp_path: Path) -> None:
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("\n".join(pin for pin in pins if pin.partition("==")[0] not in BOUND))
    packages = tmp_path / "packages"
    install = ["-m", "pip", "install", "-q", "--constraint", constraints, "--target", packages]
    subprocess.run([sys.executable, *install, f"transformers=={version}"], check=True)
    environment = {**os.environ, "PYTHONPATH": str(packages)}
    script = "import transformers; print(transformers.__version__)"
    imported = subprocess.check_output([sys.executable, "-c", script], env=environment, text=True)
    assert imported.strip() == version
    tests = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *FILES]
    result = subprocess.run(tests, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-5000:]
