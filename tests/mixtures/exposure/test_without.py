"""Documents without loss: their targets weigh 0, and nothing else differs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from support.data.small_data import plan_of, random_documents, write_dataset

from headrace.console.errors import ConfigError
from headrace.dataplane.loader.rows import RowBlock, RowReader
from headrace.dataplane.order.plan import Plan
from headrace.mixtures.audit.auditor import Auditor
from headrace.mixtures.cli import main
from headrace.mixtures.planning.open_plan import open_plan

UNLEARNT = (3, 4, 17, 60)
LENGTHS = {"short": 32, "long": 64}


@pytest.fixture
def spec(tmp_path: Path) -> dict[str, object]:
    """Two row lengths, so that rows have several spans; a source with weights and one without."""
    web = random_documents(1, 120)
    codes = [np.random.default_rng(7).integers(0, 2, len(document)) for document in web]
    write_dataset(str(tmp_path / "web"), web, codes=codes, weight_table=(1.0, 0.5))
    write_dataset(str(tmp_path / "code"), random_documents(2, 90, longest=40))
    (tmp_path / "drop.txt").write_text("".join(f"id-{number}\n" for number in UNLEARNT))
    weights = {"web": 0.75, "code": 0.25}
    return {
        "chunk": 128,
        "window": 4,
        "sources": {
            "web": {"data": str(tmp_path / "web")},
            "code": {"data": str(tmp_path / "code"), "max_epochs": 3},
        },
        "phases": {
            name: {"tokens": 4_096, "seq_len": length, "batch": 256, "weights": weights}
            for name, length in LENGTHS.items()
        },
    }


def read_blocks(plan: Plan) -> list[RowBlock]:
    reader = RowReader(plan)
    located = [
        reader.stream.locate(np.arange(phase.first_row, phase.end_row)) for phase in plan.phases
    ]
    return [reader.read(reader.find(rows)) for rows in located]


def test_unlearnt_targets_weigh_nothing_and_all_else_is_equal(
    tmp_path: Path, spec: dict[str, object]
) -> None:
    whole, without = plan_of(spec), plan_of({**spec, "without": [str(tmp_path / "drop.txt")]})
    assert whole.hash == without.hash and whole.learnt_hash != without.learnt_hash
    without.save(tmp_path / "plan.json")
    without = Plan.load(tmp_path / "plan.json")
    reader, num_masked = RowReader(whole), 0
    for block, masked in zip(read_blocks(whole), read_blocks(without), strict=True):
        assert block.digests == masked.digests
        assert np.array_equal(block.arrays.tokens, masked.arrays.tokens)
        expected = block.arrays.weights.copy()
        for index, source in enumerate(block.located.sources.tolist()):
            dataset, at = reader.dataset(source), -1
            for start, end in block.located.spans(index):
                for document in dataset.documents(start, end + 1):
                    if document.number not in UNLEARNT:
                        continue
                    low = max(document.first_token, start) - start + at
                    high = min(document.first_token + document.tokens, end + 1) - start + at
                    expected[index, max(low, 0) : high] = 0
                at += end - start
        assert np.array_equal(masked.arrays.weights, expected)
        num_masked += int((expected != block.arrays.weights).sum())
    assert num_masked > 200


def test_find_and_audit_show_what_was_not_learnt(tmp_path: Path, spec: dict[str, object]) -> None:
    plan_of({**spec, "without": [str(tmp_path / "drop.txt")]}).save(tmp_path / "plan.json")
    words = ["find", str(tmp_path / "plan.json"), "--documents", "id-3,id-5", "--json"]
    shown = CliRunner().invoke(main, words)
    answers = [json.loads(line) for line in shown.stdout.splitlines()][1:]
    weights = {
        name: sum(e["loss_weight"] for a in answers if a["id"] == name for e in a["exposures"])
        for name in ("id-3", "id-5")
    }
    assert weights["id-3"] == 0 < weights["id-5"]
    planned = CliRunner().invoke(main, ["plan", str(tmp_path / "plan.json")])
    assert "tokens in documents without loss" in planned.output
    auditor = Auditor(open_plan(str(tmp_path / "plan.json")))
    assert auditor.reader.unlearnt.keys() == {0, 1}


def test_a_list_that_names_nothing_is_refused(tmp_path: Path, spec: dict[str, object]) -> None:
    (tmp_path / "drop.txt").write_text("nobody\n")
    with pytest.raises(ConfigError, match="without") as caught:
        plan_of({**spec, "without": [str(tmp_path / "drop.txt")]})
    assert "names no document of any source" in str(caught.value)


def test_unknown_ids_are_counted(
    tmp_path: Path, spec: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    with (tmp_path / "drop.txt").open("a") as file:
        file.write("nobody\n")
    plan_of({**spec, "without": [str(tmp_path / "drop.txt")]})
    assert "1 of 5 ids are in no source, such as nobody" in caplog.text


def test_a_branch_that_learns_the_documents_again_says_so(
    tmp_path: Path, spec: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    lists = {"without": [str(tmp_path / "drop.txt")]}
    plan = plan_of({**spec, **lists})
    plan.save(tmp_path / "plan.json")
    phases = {"more": {"tokens": 256, "weights": {plan.sources[0].name: 1}}}
    branch = {"after": {"run": str(tmp_path), "step": 1}, "phases": phases}
    assert plan_of({**branch, **lists}).sources[0].unlearnt
    assert "learns them" not in caplog.text
    assert not plan_of(branch).sources[0].unlearnt
    assert "and this mixture learns them" in caplog.text
