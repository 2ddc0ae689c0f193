"""Tutorials: every command block runs, in an empty folder, and prints what its page shows."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tutorial_pages import TUTORIALS, Page, missing_lines, problems


def run(page: Page, folder: Path) -> tuple[int, list[str]]:
    """Run the blocks of a page; return the exit code and the output of each that was begun."""
    own = Path(sys.executable).parent
    done = subprocess.run(
        ["bash", "-c", page.script()],
        cwd=folder,
        env={
            **os.environ,
            "PATH": f"{own}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout.split(Page.BORDER)[1:]


@pytest.mark.long
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("file", TUTORIALS, ids=lambda file: file.stem)
def test_every_block_runs_and_prints_what_the_page_shows(file: Path, tmp_path: Path) -> None:
    page = Page(file.read_text())
    code, printed = run(page, tmp_path)
    assert code == 0, printed[-1][-6000:]
    missing = [
        line
        for block, text in zip(page.blocks, printed, strict=True)
        for line in missing_lines(block.shown, text)
    ]
    assert not missing


def test_a_failing_block_is_found(tmp_path: Path) -> None:
    page = Page("# A\n```sh\nfalse\n```\nand\n```sh\ntouch made\n```\n")
    code, printed = run(page, tmp_path)
    assert code == 1 and len(printed) == 1
    assert not (tmp_path / "made").exists()


def test_shown_lines_are_compared_without_their_numbers(tmp_path: Path) -> None:
    page = Page(
        "```sh\necho 'loss 2.5, 30 steps'; echo end >&2\n```\n\n```text\n…3.1, 4 steps\nend\n```\n"
    )
    code, printed = run(page, tmp_path)
    assert code == 0
    assert not missing_lines(page.blocks[0].shown, printed[0])
    assert missing_lines("loss 2.5, 30 epochs\n  …\nend", printed[0]) == ["loss 2.5, 30 epochs"]
    assert missing_lines("30 steps … loss", printed[0]), "the order of the parts counts"


@pytest.mark.parametrize("file", TUTORIALS, ids=lambda file: file.stem)
def test_commands_and_files_are_understood(file: Path, tmp_path: Path) -> None:
    """Small sister of the runs: bash parses the script, click the commands, and our configuration
    the YAML and the overrides."""
    page = Page(file.read_text())
    parsed = subprocess.run(["bash", "-n"], input=page.script(), capture_output=True, text=True)
    assert parsed.returncode == 0 and not parsed.stderr, parsed.stderr
    assert not problems(page, tmp_path)


@pytest.mark.parametrize(
    "wrong",
    [
        "trainer run --mixtur m.yaml",
        "trainer runs x",
        "for a in 1 2; do\n  mixtures audit runs/x --stepp $a | head -3\ndone",
        "trainer run --mixture m.yaml \\\n  optimizer.rl=1",
        "trainer resume runs/x mixture.phases.p.token=1",
        "cat > m.yaml <<'YAML'\nphases:\n  p: {token: 1}\nYAML",
        "cat > m.yaml <<'YAML'\nwidth: 64\nlayers: 3\npattern: a\nYAML",
        "X=$(mixtures audit runs/x --jsn)",
    ],
)
def test_a_wrong_command_or_file_is_found(wrong: str, tmp_path: Path) -> None:
    assert problems(Page(f"```sh\n{wrong}\n```\n"), tmp_path)


def test_every_tutorial_is_in_the_navigation() -> None:
    listed = Path(__file__).parents[1].joinpath("mkdocs.yml").read_text()
    assert TUTORIALS
    assert all(re.search(rf"tutorials/{file.name}$", listed, re.MULTILINE) for file in TUTORIALS)
