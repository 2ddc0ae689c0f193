"""Tutorials: every command block runs, in order, in an empty folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TUTORIALS = sorted((Path(__file__).parents[1] / "docs" / "tutorials").glob("*.md"))


def commands(page: Path) -> str:
    """Return the shell blocks of a page as a script that ends at the first error."""
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    assert blocks and page.read_text().count("```") == 2 * len(blocks), "a block is not run"
    return "set -eu -o pipefail\n" + "\n".join(blocks)


def run(page: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    own = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{own}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(
        ["bash", "-c", commands(page)],
        cwd=folder,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_every_command_block_runs(page: Path, tmp_path: Path) -> None:
    done = run(page, tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def test_a_failing_block_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A\n```sh\nfalse\n```\nand\n```sh\ntouch made\n```\n")
    assert run(page, tmp_path).returncode == 1
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_the_scripts_parse(page: Path) -> None:
    script = commands(page)
    parsed = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    assert parsed.returncode == 0 and not parsed.stderr, parsed.stderr
