"""Tutorials: every command block runs, in an empty folder, and prints what its page shows."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.pages.tutorial_pages import TUTORIALS, Page, missing_lines, problems
from support.ranks.forked_shell import ForkedShell

PAGES = {file.stem: file for file in TUTORIALS}


def run(page: Page, folder: Path) -> tuple[int, list[str]]:
    """Run the blocks of a page; return the exit code and the output of each that was begun."""
    bin_folder = Path(sys.executable).parent
    done = subprocess.run(
        ["bash", "-c", page.script()],
        cwd=folder,
        env={
            **os.environ,
            "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout.split(Page.BORDER)[1:]


def not_printed(page: Page, printed: list[str]) -> list[str]:
    """Return the lines that the page shows and its blocks did not print."""
    pairs = zip(page.blocks, printed, strict=True)
    return [line for block, text in pairs for line in missing_lines(block.shown, text)]


@pytest.mark.long
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("file", TUTORIALS, ids=lambda file: file.stem)
def test_every_block_runs_and_prints_what_the_page_shows(file: Path, tmp_path: Path) -> None:
    page = Page(file.read_text())
    code, printed = run(page, tmp_path)
    assert code == 0, printed[-1][-6000:]
    assert not not_printed(page, printed)


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_the_blocks_of_the_front_page_run(tmp_path: Path) -> None:
    """A copy of the repository by links, whose environment is that of the tests."""
    root = Path(__file__).parents[1]
    for path in root.iterdir():
        if path.name not in ("runs", ".venv"):
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/bin").symlink_to(Path(sys.executable).parent)
    (tmp_path / ".venv/.headrace-runs").touch()  # newer than what `make run` depends on: installed
    blocks = re.findall(
        r"^```(sh|python)\n(.*?)^```$", (root / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert [kind for kind, _ in blocks] == ["sh", "python"]
    (tmp_path / "loop.py").write_text(f"{blocks[1][1]}print(next(iter(loader))['rows'])\n")
    done = subprocess.run(
        ["bash", "-ec", f"{blocks[0][1]}python loop.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    assert "step 24" in done.stdout and "record-3" in done.stdout
    assert done.stdout.endswith("tensor([3])\n"), (
        "rank 3 of 8 reads the fourth row of the first step"
    )


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[ForkedShell]:
    with ForkedShell(tmp_path) as shell:
        yield shell


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cluster", "spike"])
def test_every_block_of_two_tutorials_runs(name: str, shell: ForkedShell) -> None:
    """Small sister: real commands, as forks of one process, for the pages that train little."""
    page = Page(PAGES[name].read_text())
    code, output = shell.run(page.script())
    assert code == 0, output[-6000:]
    assert not not_printed(page, output.split(Page.BORDER)[1:])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["anneal", "dna", "from-another-stack", "llama", "opt-out"])
def test_the_others_run_up_to_a_dry_run_of_the_training(name: str, shell: ForkedShell) -> None:
    page = Page(PAGES[name].read_text())
    code, output = shell.run(page.rehearsal())
    assert code == 0, output[-6000:]
    *before, last = output.split(Page.BORDER)[1:]
    assert re.search(r"^memory +", last, re.MULTILINE), last
    for block, text in zip(page.blocks, before, strict=False):  # the dry run prints other lines
        assert not missing_lines(block.shown, text)


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("--tokenizer byte", "--tokenizr byte", "No such option"),
        ("optimizer.lr=5e-3", "optimizer.lr=high", "optimizer.lr"),
        ("--out data/genomes", "--out data/genome", "data/genomes/train"),
    ],
)
def test_a_wrong_word_of_a_tutorial_fails(
    right: str, wrong: str, message: str, shell: ForkedShell
) -> None:
    text = PAGES["dna"].read_text().replace(right, wrong)
    code, output = shell.run(Page(text).rehearsal())
    assert code and message in output, output


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


@pytest.mark.parametrize("name", ["README.md", "docs/first-hour.md"])
def test_commands_of_the_first_pages_are_understood(name: str, tmp_path: Path) -> None:
    text = Path(__file__).parents[1].joinpath(name).read_text()
    page = Page("\n".join(re.findall(r"^```sh\n.*?^```$", text, re.MULTILINE | re.DOTALL)))
    assert page.blocks and not problems(page, tmp_path)


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
