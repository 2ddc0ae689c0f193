"""The stored list of the harness's tasks is that of its files."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from headrace.trainer.scores import index

TASK = "task: {0}\ntag: [{1}]\ndataset_path: json\noutput_type: multiple_choice\n"
GROUP = "group: both\ntask: [one, two]\n"


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three files in place of the harness's 14,000."""
    folder = tmp_path / "harness"
    (folder / "deep").mkdir(parents=True)
    (folder / "one.yaml").write_text(TASK.format("one", "numbers"))
    (folder / "deep" / "two.yaml").write_text(TASK.format("two", "numbers"))
    (folder / "both.yaml").write_text(GROUP)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def plain(entries: index.Index) -> list[tuple[object, ...]]:
    return [
        (name, entry.name, entry.kind, entry.yaml_path, entry.tags)
        for name, entry in entries.items()
    ]


def test_a_stored_index_equals_that_of_the_files(
    tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = plain(index.read_index([tasks]))
    assert len(expected) == 4  # two tasks, a group, a tag
    assert plain(index.build_index([tasks], tasks)) == expected
    with monkeypatch.context() as patch:
        patch.setattr(index, "read_index", None)
        assert plain(index.build_index([tasks], tasks)) == expected
    (tasks / "deep" / "two.yaml").write_text(TASK.format("zwei", "numbers"))
    assert {"one", "zwei"} <= index.build_index([tasks], tasks).keys()


def test_a_task_of_another_folder_takes_the_place_of_the_harnesss(
    tasks: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    more = tmp_path / "more"
    more.mkdir()
    (more / "mine.yaml").write_text(TASK.format("one", "mine"))
    with caplog.at_level(logging.WARNING):
        entries = index.build_index([tasks, more], tasks)
    assert entries["one"].yaml_path == more / "mine.yaml"
    assert entries["two"].yaml_path == tasks / "deep" / "two.yaml"
    assert "Task 'one' from" in caplog.text and "overrides" in caplog.text


def test_the_harness_takes_the_stored_index(tasks: Path) -> None:
    from headrace.trainer.scores import harness

    assert harness.TaskIndex.build is index.build_index
