"""Exposures against a walk over every row: which document each input and each target belongs to."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from support.data.plan_data import write_ledger, write_taken_run
from support.data.small_data import plan_of, random_documents, write_dataset

from headrace.console.errors import InputError, PlanError
from headrace.dataplane.datasets import manifest as manifests
from headrace.dataplane.datasets.dataset import Dataset
from headrace.dataplane.loader.rows import RowReader
from headrace.dataplane.order.plan import Plan
from headrace.dataplane.order.stream import Stream
from headrace.dataplane.tokenizers.byte import ByteConfig, ByteTokenizer
from headrace.mixtures.cli import main
from headrace.mixtures.exposure.answers import DocumentAnswer, Exposure, SourceAnswer
from headrace.mixtures.exposure.find import Finder
from headrace.mixtures.exposure.lineage import open_lineages
from headrace.mixtures.exposure.request import DocumentRequest, parse_request

COUNTS = {"web": 120, "code": 90}
WEIGHTS = (1.0, 0.0, 0.25)

Places = dict[tuple[str, int], list[tuple[int, int, int, int, int, float]]]
"""By source and document: row, epoch, first token, tokens, position in the row, loss weight."""


def write_sources(folder: Path) -> dict[str, dict[str, object]]:
    web = random_documents(1, COUNTS["web"])
    codes = [np.random.default_rng(7).integers(0, 3, len(document)) for document in web]
    write_dataset(str(folder / "web"), web, shard_documents=40, codes=codes, weight_table=WEIGHTS)
    write_dataset(
        str(folder / "code"), random_documents(2, COUNTS["code"], longest=40), shard_documents=40
    )
    return {
        "web": {"data": str(folder / "web")},
        "code": {"data": str(folder / "code"), "max_epochs": 3},
    }


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """Two row lengths, so that rows have several spans; `code` is read several times."""
    return plan_of(
        {
            "seed": 3,
            "chunk": 128,
            "window": 4,
            "sources": write_sources(tmp_path_factory.mktemp("data")),
            "phases": {
                "short": {
                    "tokens": 8_192,
                    "seq_len": 32,
                    "batch": 256,
                    "weights": {"web": 0.75, "code": 0.25},
                },
                "long": {"tokens": 4_096, "seq_len": 64, "weights": {"web": 0.5, "code": 0.5}},
            },
        }
    )


def walk(plan: Plan) -> Places:
    """Read every row, and sum up inputs and targets by document."""
    stream, reader = Stream(plan), RowReader(plan)
    places: Places = defaultdict(list)
    for phase in plan.phases:
        located = stream.locate(np.arange(phase.first_row, phase.end_row))
        weights = reader.read(reader.find(located)).arrays.weights
        for index, (row, source, epoch) in enumerate(
            zip(
                located.rows.tolist(),
                located.sources.tolist(),
                located.epochs.tolist(),
                strict=True,
            )
        ):
            dataset, at = reader.dataset(source), 0
            for start, end in located.spans(index):
                for document in dataset.documents(start, end):
                    document_end = document.first_token + document.tokens
                    low, high = max(start, document.first_token), min(end, document_end)
                    targets = [
                        token - 1 - start + at
                        for token in range(max(low, start + 1), min(high + 1, document_end))
                    ]
                    place = (row, epoch, low - document.first_token, high - low, at + low - start)
                    weight = float(weights[index, targets].sum())
                    name = plan.sources[source].name
                    places[name, document.number].append((*place, weight))
                at += end - start
    return places


def answers(
    *runs: object, request: DocumentRequest | None = None, source: str | None = None
) -> list:
    everything = DocumentRequest(frozenset(f"id-{n}" for n in range(200)))
    finder = Finder(request or everything, source)
    return [
        answer
        for lineage in open_lineages([str(run) for run in runs])
        for answer in finder.find(lineage)
    ]


def places_of(answer: DocumentAnswer) -> list[tuple[int, int, int, int, int, float]]:
    names = ("row", "epoch", "first", "tokens", "at", "loss_weight")
    return [tuple(getattr(exposure, name) for name in names) for exposure in answer.exposures]


@pytest.mark.parametrize("isolated", [True, False])
def test_exposures_equal_a_walk_over_all_rows(plan: Plan, tmp_path: Path, isolated: bool) -> None:
    plan = replace(plan, isolate_documents=isolated)
    long = plan.phases[-1]
    assert Stream(plan).locate(np.arange(long.first_row, long.end_row)).pieces
    plan.save(tmp_path / "plan.json")
    walked = walk(plan)
    listed = answers(tmp_path / "plan.json")
    assert [(answer.source, answer.document) for answer in listed] == [
        (name, number) for name, count in COUNTS.items() for number in range(count)
    ]
    for answer in listed:
        assert places_of(answer) == [
            (*place, pytest.approx(weight))
            for *place, weight in walked[answer.source, answer.document]
        ]
        for exposure in answer.exposures:
            step = plan.step_at(exposure.row)
            assert (exposure.step, exposure.phase) == (step.number, step.phase.name)
            assert exposure.seen is None and exposure.first_checkpoint is None
    assert {len(answer.exposures) for answer in listed} >= {0, 1, 4}


def exposures(run: Path) -> list[Exposure]:
    return [exposure for answer in answers(run) for exposure in answer.exposures]


def test_checkpoints_and_steps_not_taken(plan: Plan, tmp_path: Path) -> None:
    run = write_taken_run(tmp_path / "run", plan, 20, checkpoints=(5, 12))
    for exposure in exposures(run):
        assert exposure.seen == (exposure.step < 20)
        first = {step < 5: 5, 5 <= step < 12: 12}.get(True) if (step := exposure.step) >= 0 else 0
        assert exposure.first_checkpoint == first


def test_skipped_and_rolled_back_steps_are_not_in_the_weights(plan: Plan, tmp_path: Path) -> None:
    """At step 9 the run goes back to its checkpoint of step 6; step 3 is skipped alone."""
    run = write_taken_run(tmp_path / "run", plan, 20, checkpoints=(6, 8, 12))
    lines = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    lines[3] |= {"skipped": True, "why": "not finite"}
    lines[9] |= {"skipped": True, "why": "spike", "back_to": 6}
    write_ledger(run, lines)
    by_step = {exposure.step: exposure for exposure in exposures(run)}
    assert {step for step, exposure in by_step.items() if exposure.undone} == {3, 6, 7, 8, 9}
    firsts = {step: by_step[step].first_checkpoint for step in (2, 3, 6, 7, 8, 9, 10, 12)}
    assert firsts == {2: 6, 3: None, 6: 8, 7: 8, 8: None, 9: None, 10: 12, 12: None}
    assert by_step[6].format_text("run").endswith("back; in the checkpoints from step 8 until then")
    assert by_step[10].format_text("run").endswith("; in the checkpoints from step 12 on")


def test_a_branch_has_seen_what_its_parent_had(plan: Plan, tmp_path: Path) -> None:
    base = write_taken_run(tmp_path / "base", plan, 20, checkpoints=(10, 15))
    child = plan_of(
        {
            "after": {"run": str(base), "step": 10},
            "phases": {"more": {"tokens": 1_024, "weights": {"code": 1}}},
        }
    )
    branch = write_taken_run(tmp_path / "branch", child, 1, checkpoints=(11,))
    whole, continued = walk(plan), walk(child)
    for answer in answers(branch):
        key = answer.source, answer.document
        inherited = [place for place in whole[key] if place[0] < child.first_row]
        assert places_of(answer) == [
            (*place, pytest.approx(weight)) for *place, weight in inherited + continued.get(key, [])
        ]
        for exposure in answer.exposures:
            is_inherited = exposure.row < child.first_row
            assert exposure.served_by == str(base if is_inherited else branch)
            assert exposure.seen == (exposure.step < 11)
            assert exposure.first_checkpoint == (11 if exposure.seen else None)
    shutil.rmtree(base)
    (lineage,) = open_lineages([str(branch)])
    assert f"rows before {child.first_row} are unknown" in lineage.format_text()
    assert "unknown" in json.loads(lineage.format_json())


@pytest.mark.parametrize("reshuffle", [False, True])
def test_a_branch_over_a_dataset_that_has_grown(tmp_path: Path, reshuffle: bool) -> None:
    sources = write_sources(tmp_path)
    phase = {"tokens": 4_096, "seq_len": 32, "batch": 256, "weights": {"code": 1}}
    plan = plan_of({"chunk": 128, "window": 4, "sources": sources, "phases": {"one": phase}})
    base = write_taken_run(tmp_path / "base", plan, 10)
    write_dataset(str(tmp_path / "code"), random_documents(9, 60, longest=90))
    child = plan_of(
        {
            "after": {"run": str(base), "step": 6, "reshuffle": reshuffle},
            "sources": {"code": sources["code"]},
            "phases": {"more": {"tokens": 4_096, "seq_len": 64, "weights": {"code": 1}}},
        }
    )
    branch = write_taken_run(tmp_path / "branch", child, 3)
    whole, continued = walk(plan), walk(child)
    listed = answers(branch)
    assert len(listed) == COUNTS["code"] + 60
    for answer in listed:
        key = answer.source, answer.document
        inherited = [place for place in whole[key] if place[0] < child.first_row]
        assert places_of(answer) == inherited + continued[key]
    assert any(answer.document >= COUNTS["code"] and answer.exposures for answer in listed)


def test_a_lost_dataset_is_answered_from_plan_and_ledger(tmp_path: Path) -> None:
    plan = plan_of(
        {
            "chunk": 128,
            "sources": write_sources(tmp_path),
            "phases": {
                "one": {
                    "tokens": 4_096,
                    "seq_len": 32,
                    "batch": 256,
                    "weights": {"web": 0.5, "code": 0.5},
                }
            },
        }
    )
    run = write_taken_run(tmp_path / "run", plan, 8)
    shutil.rmtree(tmp_path / "web")
    listed = answers(run)
    lost = [answer for answer in listed if isinstance(answer, SourceAnswer)]
    (web,) = lost
    assert (web.source, web.served_tokens, web.epochs) == ("web", 1_024, 1)
    assert "no dataset at" in web.problem and "1,024 of its" in web.format_text()
    assert len(listed) == 1 + COUNTS["code"]
    write_dataset(str(tmp_path / "web"), random_documents(5, 20))
    (web,) = answers(run, source="web")
    assert "not the one that the plan was made for" in web.problem


def test_a_packed_view_shows_every_piece_of_a_document(tmp_path: Path) -> None:
    """Two runs: over a dataset, and over its packed view; the same ids are asked of both."""
    from headrace.tokenize.cli import main as tokenize

    corpus = tmp_path / "corpus.jsonl"
    rng = np.random.default_rng(0)
    corpus.write_text(
        "".join(
            json.dumps({"id": f"id-{n}", "text": "a" * int(rng.integers(1, 200))}) + "\n"
            for n in range(40)
        )
    )
    runner = CliRunner()
    built, packed = str(tmp_path / "built"), str(tmp_path / "packed")
    for words in (
        ["build", str(corpus), "--tokenizer", "byte", "--id-field", "id", "--out", built],
        ["pack", built, "--out", packed, "--length", "64"],
    ):
        result = runner.invoke(tokenize, words)
        assert not result.exit_code, result.output
    plan = plan_of(
        {
            "chunk": 64,
            "sources": {"a": {"data": packed}},
            "phases": {"p": {"tokens": 2_048, "seq_len": 64, "batch": 64, "weights": {"a": 1}}},
        }
    )
    plan.save(tmp_path / "plan.json")
    walked, dataset = walk(plan), Dataset(packed)
    listed = answers(tmp_path / "plan.json")
    assert len(listed) == dataset.shard_documents[-1] > 40
    for answer in listed:
        assert places_of(answer) == [
            (*place, pytest.approx(weight)) for *place, weight in walked["a", answer.document]
        ]
        assert answer.view is not None and answer.origin.id == f"id-{answer.view.document}"
    pieces = [answer for answer in listed if answer.key == "id-3"]
    assert sum(answer.tokens for answer in pieces) == 1 + len(
        json.loads(corpus.read_text().splitlines()[3])["text"]
    )


def test_a_whole_text_is_found(tmp_path: Path) -> None:
    url = str(tmp_path / "text")
    tokenizer = ByteTokenizer(ByteConfig())
    texts = ["Wasser zum Rad", "the headrace", "the tailrace", "δῶς μοι πᾶ στῶ"]
    documents = [tokenizer.encode([text]).tokens for text in texts * 30]
    manifest = write_dataset(url, documents, fingerprint=tokenizer.info.fingerprint)
    manifests.save(url, replace(manifest, tokenizer=tokenizer.info))
    plan = plan_of(
        {
            "sources": {"a": {"data": url}},
            "phases": {"p": {"tokens": 512, "seq_len": 64, "batch": 64, "weights": {"a": 1}}},
        }
    )
    plan.save(tmp_path / "plan.json")
    file = tmp_path / "letter.txt"
    file.write_text("the headrace")
    listed = answers(tmp_path / "plan.json", request=parse_request((), (str(file),)))
    assert [answer.document for answer in listed] == list(range(1, 120, 4))
    assert {answer.key for answer in listed} == {str(file)}
    copy, out = tmp_path / "copy.txt", tmp_path / "plan.json"
    copy.write_text("the headrace")
    words = ["find", str(out), "--text", str(file), "--text", str(copy), "--documents", "number:1"]
    asked = CliRunner().invoke(main, words)
    assert asked.stdout.count("document 1 ") == 1 and "in no dataset" not in asked.stderr
    file.write_text("the headrace ")
    assert not answers(tmp_path / "plan.json", request=parse_request((), (str(file),)))


def test_lists_of_ids(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    text, lines, parquet = (tmp_path / name for name in ("a.txt", "b.jsonl", "c.parquet"))
    text.write_text("\ufeffid-1\n\nid-2\r\n")
    lines.write_text('{"id": "id-3", "text": "a\u2028b"}\n{"id": null}\n{"id": 4}\n')
    pq.write_table(pa.table({"id": ["id-5"], "url": ["x"]}), parquet)
    words = (str(text), str(lines), str(parquet), "id-6,7", "number:8")
    request = parse_request(words, ())
    assert request.ids == {"id-1", "id-2", "id-3", "4", "id-5", "id-6", "7"}
    assert request.numbers == (8,)
    many = [f"id-{number}" for number in range(1000)]  # longer than a file's name may be
    assert parse_request((",".join(many),), ()).ids == set(many)
    text.write_text("\n")
    lines.write_text('{"document": "id-3"}\n')
    parquet.write_bytes(b"PAR1")
    wrong = {text: "is empty", lines: "no list of ids", parquet: "no list of"}
    for file, message in {**wrong, tmp_path / "typo.txt": "there is no file"}.items():
        with pytest.raises(InputError, match=message):
            parse_request((str(file),), ())


def test_absence_by_id_is_not_claimed_of_documents_without_ids(tmp_path: Path) -> None:
    data, run = str(tmp_path / "web"), tmp_path / "run"
    write_dataset(data, random_documents(1, 60), ids=False)
    phase = {"tokens": 512, "seq_len": 32, "batch": 64, "weights": {"web": 1}}
    spec = {"sources": {"web": {"data": data}}, "phases": {"one": phase}}
    write_taken_run(run, plan_of(spec), 8)
    shown = CliRunner().invoke(main, ["find", str(run), "--documents", "id-3", "--json"])
    (source,) = [json.loads(line) for line in shown.stdout.splitlines()[1:-1]]
    assert "have no ids" in source["problem"] and source["served_tokens"] == 512
    assert "id-3: in no dataset that could be searched" in shown.stderr
    numbers = CliRunner().invoke(main, ["find", str(run), "--documents", "number:3"])
    assert "document 3 of web" in numbers.output and "no ids" not in numbers.output
    words = ["prove", str(run), "--document", "id-3", "--out", str(tmp_path / "p.json")]
    assert "documents of web have no ids" in CliRunner().invoke(main, words).output


def test_a_ledger_of_another_plan_is_refused(plan: Plan, tmp_path: Path) -> None:
    run = write_taken_run(tmp_path / "run", plan, 5)
    lines = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    write_ledger(run, [line | {"first_row": line["first_row"] + 1} for line in lines])
    with pytest.raises(PlanError, match="belongs to another plan: its step 4"):
        open_lineages([str(run)])
    steady = write_taken_run(tmp_path / "steady", plan, 5, checkpoints=(4,))
    state = steady / "checkpoints" / "step-00000004" / "state.json"
    state.write_text(json.dumps({"plan_hash": plan.hash}))
    assert open_lineages([str(steady)])
    swapped = replace(plan, sources=plan.sources[::-1])  # rows of the same numbers
    swapped.save(steady / "plan.json")
    with pytest.raises(PlanError, match="belongs to the plan"):
        open_lineages([str(steady)])


def test_the_command_names_what_is_in_no_dataset(plan: Plan, tmp_path: Path) -> None:
    run = write_taken_run(tmp_path / "run", plan, 20, checkpoints=(5,))
    words = ["find", str(run), str(run), "--documents", "id-41,nobody"]
    shown = CliRunner().invoke(main, words)
    assert not shown.exit_code
    assert shown.output.count("document 41 (id-41) of web") == 1
    assert "nobody: in no dataset" in shown.output and "of 2 documents seen" in shown.output
    as_json = CliRunner().invoke(main, [*words, "--json"])
    records = [json.loads(line) for line in as_json.stdout.splitlines()]
    assert records[0] == {"run": str(run), "steps_taken": 20, "checkpoints": [5], "continues": []}
    assert [(record["source"], record["id"]) for record in records[1:3]] == [
        ("web", "id-41"),
        ("code", "id-41"),
    ]
    assert records[3] == {"asked": "nobody", "in_no_dataset": True}
    wrong = CliRunner().invoke(main, [*words, "--source", "cod"])
    assert wrong.exit_code == 1 and "no source cod" in wrong.output
