"""Digest of the package's files: two checkouts with different code have different digests."""

from __future__ import annotations

import os
import shutil
import tomllib
from pathlib import Path

import pytest

import headrace
from headrace.console import sources

ROOT = Path(headrace.__file__).parent


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copy(ROOT / "__init__.py", folder)
    for name in sources.FOLDERS:
        shutil.copytree(ROOT / name, folder / name)
    return folder


def test_every_folder_of_the_package_is_read() -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "packages"
    ]
    assert {name.split(".")[1] for name in packages if "." in name} == set(sources.FOLDERS)


def test_a_copy_has_the_same_digest(copy: Path) -> None:
    (copy / "models" / "__pycache__").mkdir(exist_ok=True)
    (copy / "models" / "__pycache__" / "more.pyc").write_bytes(b"1")
    assert sources.digest(copy) == sources.digest()


@pytest.mark.parametrize("name", ["models/layers/rope.py", "configs/models/tiny-hybrid.yaml"])
def test_a_change_of_the_same_length_is_seen(copy: Path, name: str) -> None:
    """Size and time of the file stay the same."""
    file = copy / name
    before, status = sources.digest(copy), file.stat()
    content = file.read_bytes()
    file.write_bytes(content[:-2] + b"#" + content[-1:])
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert sources.digest(copy) != before
    file.write_bytes(content)
    assert sources.digest(copy) == before


def test_a_renamed_file_is_seen(copy: Path) -> None:
    before = sources.digest(copy)
    file = copy / "models" / "documents.py"
    file.rename(file.with_name("rows.py"))
    assert sources.digest(copy) != before
    file.with_name("rows.py").rename(file)
