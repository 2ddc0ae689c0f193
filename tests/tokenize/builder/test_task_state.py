"""Task ids and task states: a build that was left unfinished is resumed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.dataplane.datasets.manifest import Shard
from headrace.dataplane.tokenizers.byte import ByteConfig, ByteTokenizer
from headrace.tokenize.builder.settings import BuildJob
from headrace.tokenize.builder.task_state import OutputState, TaskState
from headrace.tokenize.builder.tasks import Task
from headrace.tokenize.files.input_file import File
from headrace.tokenize.sources.format import BadRecord, Slice, SourceConfig

TOKENIZER = ByteTokenizer(ByteConfig())
JOB = BuildJob(
    url="out",
    format="arrow",
    compression=None,
    shard_size=1 << 20,
    source=SourceConfig(id_field="id"),
    tokenizer=TOKENIZER.info,
    tokenizer_files=TOKENIZER.files,
    splits=(("val", 0.1),),
    max_document_tokens=100,
    skip_bad=True,
    seed=7,
    dedup=True,
)
SLICE = Slice(File("a.jsonl", 1000, "jsonl", None, "f" * 32), 0, 500, 0, 500)


def task_id(slice: Slice, job: BuildJob, drops: str | None = "drops/x.bin") -> str:
    return Task.make([slice], job, drops).id


def test_task_ids_do_not_move() -> None:
    """A dataset can grow only if its settings keep their names."""
    assert task_id(SLICE, JOB) == "6578a3f35d623d5ae342aa460ef7c5c6"


@pytest.mark.parametrize("change", ["slice", "settings", "drops", "url"])
def test_task_ids_depend_on_all_that_decides_the_bytes(change: str) -> None:
    changed_id = {
        "slice": lambda: task_id(replace(SLICE, end=501), JOB),
        "settings": lambda: task_id(SLICE, replace(JOB, seed=8)),
        "drops": lambda: task_id(SLICE, JOB, None),
        "url": lambda: task_id(SLICE, replace(JOB, url="elsewhere")),
    }[change]()
    assert (changed_id == task_id(SLICE, JOB)) is (change == "url")


def test_a_task_state_keeps_the_format_of_its_file(tmp_path: Path) -> None:
    shard = Shard(
        name="shards/0.arrow", size=1, documents=2, tokens=3, hash="h", chunks=b"\xff", task="t"
    )
    state = TaskState({"": OutputState([shard], next=5, split=1)}, untokenizable={"3": "why"})
    state.stats.add_bad(BadRecord("broken JSON", "not JSON", "a.jsonl", 1, "line"))
    state.stats.notes.append("note")
    state.save(str(tmp_path), "t")
    assert TaskState.load(str(tmp_path), "t", [""]) == state
    file = tmp_path / "work" / "tasks" / "t.json"
    stored = json.loads(file.read_text())
    del stored["seal"]
    (stored_shard,) = stored["outputs"][""].pop("shards")
    assert stored_shard["chunks"] == "/w=="
    assert stored == {
        "outputs": {"": {"next": 5, "split": 1}},
        "counts": {"bad: broken JSON": 1},
        "problems": ["a.jsonl, line 2: broken JSON: not JSON"],
        "notes": ["note"],
        "untokenizable": {"3": "why"},
        "done": False,
    }
    TaskState.delete(str(tmp_path), "t")
    assert TaskState.load(str(tmp_path), "t", [""]) == TaskState({"": OutputState()})
