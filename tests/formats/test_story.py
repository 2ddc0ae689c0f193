"""Commands make a small world again: its files and what they print are those of the samples.

Then the commands that read it do so with the committed files. A key that moves, in a file or in
printed JSON, is a difference.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from formats import files, story
from formats.samples import (
    RENEW,
    WORLD,
    as_text,
    compare,
    differing_lines,
    distinct,
    masked,
    pin_keys,
    shape,
)
from formats.story import MAKING, READING, Step
from support.ranks import forked

from headrace.dataplane.order.plan import Plan
from headrace.dataplane.runlog import writer
from headrace.dataplane.storage import storage
from headrace.reports.anneal import train
from headrace.reports.board.board import Board
from headrace.reports.board.details import details
from headrace.trainer.record.logger import evaluation_losses, step_scalars

NOT_KEPT = re.compile(
    r"\.lock$|\.html$|^(cache/matplotlib|cache/headrace-traces|anneal/runs/00/(checkpoints|logs)|main/logs)/"
    r"|step-0000000[1-7]/|^main/board/"
)
"""Files of the world that are no samples: pages, caches, large files that others stand for."""
HASHES = "headrace-tokenize/fingerprints.sqlite"
"""The cache of hashes of inputs."""
HASH = re.compile(r"[0-9a-f]{32,}")
MEASURED = ("main/", "anneal/", "cache/")
"""Folders of what a run has measured."""


@pytest.fixture(scope="module")
def patch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(train, "run_trainer", run_trainer)
        yield patch


def run_trainer(words: list[str]) -> int:
    command = [sys.executable, "-m", "headrace.trainer.cli", *words]
    return forked.run(command).returncode


World = tuple[Path, dict[str, str], dict[str, list[Any]]]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, patch: pytest.MonkeyPatch) -> World:
    """The world, what the commands printed, and the JSON of its temporary files."""
    root, printed = tmp_path_factory.mktemp("world"), {}
    passing: dict[str, list[Any]] = {}
    write = storage.write

    def watched(url: str, data: bytes, *more: Any, **options: Any) -> None:
        if "/work/" in url and url.endswith(".json"):
            name = re.sub(r"^.*/work/", "work/", HASH.sub("HASH", url))
            passing.setdefault(name, []).append(shape(json.loads(data)))
        write(url, data, *more, **options)

    patch.setattr(storage, "write", watched)
    story.write_inputs(root)
    for step in MAKING:
        printed[step.name] = output(step, root)
    patch.setattr(storage, "write", write)
    hashes = Path(os.environ["XDG_CACHE_HOME"], HASHES)
    (root / "cache" / HASHES).parent.mkdir(parents=True)
    shutil.copyfile(hashes, root / "cache" / HASHES)
    if RENEW:
        shutil.rmtree(WORLD, ignore_errors=True)
        for name in kept(root):
            (WORLD / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / name, WORLD / name)
        forget_folder(patch)
    return root, printed, passing


@pytest.fixture(scope="module")
def read(
    tmp_path_factory: pytest.TempPathFactory,
    patch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Path:
    """A copy of the committed world, with a damaged dataset and a foreign one."""
    if RENEW:
        request.getfixturevalue("world")
    root = tmp_path_factory.mktemp("committed") / "world"
    shutil.copytree(WORLD, root)
    for name in ("damaged", "foreign"):
        shutil.copytree(root / "corpora/mds", root / name)
    (root / "foreign/manifest.json").unlink()
    shard = next((root / "damaged/shards").iterdir())
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    (root / "main/logs").mkdir()  # of an empty folder git keeps nothing
    return root


def forget_folder(patch: pytest.MonkeyPatch) -> None:
    """Let the committed plans name no folder of this machine."""
    plans = [
        WORLD / name
        for name in kept(WORLD)
        if re.search(r"(plan|changing|held-out-\w+)\.json$", name)
    ]
    with contextlib.chdir(WORLD):
        loaded = [Plan.load(file) for file in plans]
    with patch.context() as here:
        here.setattr(Path, "cwd", lambda: Path("/world"))
        for file, plan in zip(plans, loaded, strict=True):
            plan.save(file)


def output(step: Step, root: Path) -> str:
    """Return what a command prints, as it is compared."""
    with contextlib.chdir(root):
        code, out, error = story.perform(step, root)
    assert code == step.code, error
    package = str(Path(sys.modules["headrace"].__file__ or "").parent)
    out = out.replace(str(root), "WORLD").replace(package, "HEADRACE")
    documents = story.parsed(out) if "--json" in step.words else []
    return "".join(as_text(masked(value, measured=step.measured)) for value in documents)


def kept(root: Path) -> list[str]:
    names = (str(file.relative_to(root)) for file in root.rglob("*") if file.is_file())
    return sorted(name for name in names if not NOT_KEPT.search(name))


def test_commands_write_the_files_of_the_samples(world: World) -> None:
    root = world[0]
    assert kept(root) == kept(WORLD)
    different = [
        name for name in kept(root) if content(root / name, name) != content(WORLD / name, name)
    ]
    first = "".join(
        "\n".join(differing_lines(name, content(WORLD / name, name), content(root / name, name)))
        for name in different[:3]
    )
    assert not different, f"{different}\n{first}"


def content(file: Path, name: str) -> str:
    value = files.content(file, measured=name.startswith(MEASURED))
    return as_text(value).replace(str(file).removesuffix(name).rstrip("/"), "WORLD")


@pytest.mark.parametrize("step", MAKING, ids=[step.name for step in MAKING])
def test_commands_that_write_print_the_samples(step: Step, world: World) -> None:
    compare(f"printed/{step.name}.json", world[1][step.name])


@pytest.mark.parametrize("step", READING, ids=[step.name for step in READING])
def test_commands_that_read_the_samples_print_the_samples(step: Step, read: Path) -> None:
    compare(f"printed/{step.name}.json", output(step, read))


def test_files_of_a_build_that_goes_on(world: World) -> None:
    """Tasks, states and locks: the next start of a killed build or search reads them."""
    result = {name: distinct(shapes) for name, shapes in sorted(world[2].items())}
    compare("keys/work.json", as_text(result))


def test_what_the_board_serves_and_keeps(read: Path) -> None:
    """The page of a board asks for these, and its folder holds the curves' files."""
    board = Board([str(read / "main")])
    board.scan()
    board.refresh()
    [run] = board.runs.values()
    with contextlib.chdir(read):  # the plan names its datasets by relative paths
        rows = board.rows.page(run, 1, 0)
    pin_keys(
        "board",
        {
            "runs": board.summary(),
            "settings": list(run.settings),
            "run": details(run),
            "step": rows,
            "files": {
                str(file.relative_to(read / "main/board")): shape(json.loads(file.read_text()))
                for file in sorted((read / "main/board").rglob("index.json"))
            },
        },
    )


def test_names_of_curves(read: Path) -> None:
    """Loggers write the metrics of a step by these names."""
    steps = [*writer.read(read / "main/metrics.jsonl")]
    signals = {entry["step"]: entry for entry in writer.read(read / "main/signals.jsonl")}
    evaluations = [*writer.read(read / "main/evaluations.jsonl")]
    optional = {"mfu": 0.5, "hfu": 0.5, "slowest_lag": 1.0}
    names = {
        name
        for entry in steps
        for name in step_scalars({**entry, **signals.get(entry["step"], {}), **optional})
    }
    names |= {f"evaluation/{name}" for entry in evaluations for name in evaluation_losses(entry)}
    compare("curves.txt", "".join(f"{name}\n" for name in sorted(names)))


RENAMED = {
    "main/metrics.jsonl": ("data_wait", "input_wait"),
    "main/events.jsonl": ("seconds", "duration"),
    "main/ledger.jsonl": ("first_row", "begin_row"),
    "main/run.yaml": ("micro_batch_tokens", "microbatch_tokens"),
    "main/checkpoints/step-00000008/state.json": ("updates", "applied"),
    "corpora/web/train/manifest.json": ("table_hash", "hash_of_table"),
}
"""Keys of files, and other names for them."""


@pytest.mark.parametrize("name", RENAMED)
def test_a_renamed_key_is_a_difference(name: str, tmp_path: Path) -> None:
    """Negative control: masked values hide no key."""
    key, new_key = RENAMED[name]
    text = (WORLD / name).read_text()
    assert key in text
    changed = tmp_path / name
    changed.parent.mkdir(parents=True)
    entries = [line.rpartition(', "check"')[0] + "}\n" for line in text.splitlines()]
    text = "".join(entries) if name.endswith(".jsonl") else text
    changed.write_text(text)
    assert content(changed, name) == content(WORLD / name, name)
    changed.write_text(text.replace(key, new_key, 1))
    assert content(changed, name) != content(WORLD / name, name)
