"""Builds of conversations: bad records, resumes, what the build is, and losses of a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from support.data.corpora import read_dataset, snapshot, texts
from support.data.small_data import plan_of

from headrace.console.errors import InputError, MisuseError, StorageError
from headrace.dataplane.datasets import manifest
from headrace.dataplane.datasets.dataset import Dataset
from headrace.dataplane.tokenizers.byte import ByteConfig
from headrace.tokenize.builder.build import BuildConfig
from headrace.tokenize.builder.fim import FimConfig
from headrace.tokenize.chat.config import ChatConfig
from headrace.tokenize.cli import main
from headrace.tokenize.executors import ExecutorConfig
from headrace.tokenize.sources.fields import KeptField
from headrace.tokenize.sources.format import SourceConfig

Run = Callable[..., Path]
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BYTES = ByteConfig(special_tokens=SPECIAL)
CHATML: dict[str, Any] = {"byte": BYTES, "chat": ChatConfig(template="chatml")}
OPTIONS = [word for name in SPECIAL for word in ("--special", name)]


def write(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def conversation(*contents: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    turns = [{"role": roles[k % 2], "content": text} for k, text in enumerate(contents)]
    return {"messages": turns}


@pytest.fixture
def talks(tmp_path: Path) -> Path:
    words = texts(120, longest=20)
    records = [conversation(*words[k : k + 2 + k % 3]) for k in range(110)]
    return write(tmp_path / "talks.jsonl", [*records, *records[:5]])


def codes(out: Path) -> list[int]:
    data = Dataset(str(out))
    return np.concatenate(data.codes(0, int(data.shard_tokens[-1]))).tolist()


def learnt(out: Path) -> list[str]:
    """Return the learnt part of each document."""
    all_codes, at, parts = codes(out), 0, []
    for _, _, ids in read_dataset(out):
        here = [id for id, code in zip(ids, all_codes[at:], strict=False) if code == 0]
        at += len(ids)
        parts.append(bytes(id for id in here if id < 256).decode())
        assert 256 not in here and 257 not in here
    return parts


def test_the_answers_are_learnt(tmp_path: Path, run_build: Run) -> None:
    records = [conversation("q", "an🙂swer"), conversation("a", "b", "c", "d"), {"prompt": "x"}]
    records[2]["response"] = "y"
    out = run_build(write(tmp_path / "a.jsonl", records), **CHATML)
    assert learnt(out) == ["an🙂swer", "bd", "y"]
    held = manifest.load(str(out))
    assert held.weights == (1.0, 0.0)
    assert "texts that name special tokens" not in held.generations[0].provenance["counts"]
    assert held.generations[0].provenance["versions"]["jinja2"]


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_columns_are_conversations(tmp_path: Path, run_build: Run, ending: str) -> None:
    calls = [{"id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}}]
    records = [
        {"messages": [*conversation("q", "a<|im_end|>🙂")["messages"]], "n": 1},
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": calls}], "n": 2},
        {"prompt": "2+2", "response": "4", "n": 3, "tools": [{"name": "f"}]},
        {"messages": [{"role": "user"}], "n": 4},
    ]
    nothing = dict.fromkeys(["prompt", "response", "messages", "tools"])
    rows = [{**nothing, **record} for record in records]
    table = pa.Table.from_pylist(rows)
    assert "tool_calls" in str(table.schema.field("messages"))
    path = tmp_path / f"a.{ending}"
    if ending == "parquet":
        pq.write_table(table, path)
    else:
        feather.write_feather(table, path)
    template = tmp_path / "t.jinja"
    template.write_text(
        "{{ tools | tojson if tools }}{% for m in messages %}{{ m | tojson }}{% generation %}"
        "{{ m.content if m.role == 'assistant' }}{% endgeneration %}{% endfor %}"
    )
    keep = SourceConfig(keep=(KeptField(name="n", type="int"),))
    options = {"byte": BYTES, "chat": ChatConfig(template=str(template)), "source": keep}
    with pytest.raises(InputError, match="turn 1 has no `content`") as caught:
        run_build(path, **options)
    assert caught.value.where == f"{path}, row 4"
    lines = write(tmp_path / "a.jsonl", records)
    texts_and_ids, masks = [], []
    for number, file in enumerate((path, lines)):
        out = run_build(file, out=str(number), on_error="skip", **options)
        texts_and_ids.append([(text, ids) for _, text, ids in read_dataset(out)])
        masks.append(codes(out))
        assert [fields["n"] for fields in Dataset(str(out)).fields(0, 3)] == [1, 2, 3]
    assert texts_and_ids[0] == texts_and_ids[1]
    assert masks[0] == masks[1]
    assert len(texts_and_ids[0]) == 3


def test_a_file_without_the_columns_is_named(tmp_path: Path, run_build: Run) -> None:
    pq.write_table(pa.table({"prompt": ["a"], "answer": ["b"]}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"other schema: no column `response` \(it has prompt, an"):
        run_build(tmp_path / "a.parquet", **CHATML)


@pytest.mark.slow
def test_workers_and_resumes_give_the_same_bytes(
    talks: Path, run_build: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**CHATML, "shuffle": 3, "dedup": "exact", "splits": {"val": 0.2}}
    whole = snapshot(run_build(talks, out="whole", **options))
    two = ExecutorConfig(workers=2)
    assert snapshot(run_build(talks, out="two", engine=two, **options)) == whole
    with monkeypatch.context() as patched:
        patched.setattr(manifest, "save", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run_build(talks, **options)
    out = run_build(talks, **options)
    assert snapshot(out) == whole
    records = [json.loads(line)["messages"] for line in talks.read_text().splitlines()[:110]]
    answers = ["".join(turn["content"] for turn in talk[1::2]) for talk in records]
    assert sorted([*learnt(out / "train"), *learnt(out / "val")]) == sorted(answers)


BAD = {
    "missing field": {"text": "a"},
    "broken conversation": {"messages": [{"role": "user"}]},
    "no assistant turn": conversation("only a question"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_records_are_named_or_counted(tmp_path: Path, run_build: Run, kind: str) -> None:
    path = write(tmp_path / "a.jsonl", [conversation("q", "a"), BAD[kind], conversation("q", "b")])
    with pytest.raises(InputError, match=kind) as caught:
        run_build(path, **CHATML)
    assert caught.value.where == f"{path}, line 2"
    out = run_build(path, on_error="skip", **CHATML)
    assert learnt(out) == ["a", "b"]
    counts = manifest.load(str(out)).generations[0].provenance["counts"]
    assert counts[f"bad: {kind}"] == 1


def test_a_template_that_does_not_suit_stops_every_build(tmp_path: Path, run_build: Run) -> None:
    template = tmp_path / "t.jinja"
    older = "m.role == 'assistant' and not loop.last"  # as templates that take thoughts out
    text = "{% for m in messages %}{{ '' if " + older + " else m.content }}{% endfor %}"
    template.write_text(text)
    path = write(tmp_path / "a.jsonl", [conversation("q", "a"), conversation(*"abcd")])
    chat = ChatConfig(template=str(template))
    with pytest.raises(InputError, match="unsteady template: it writes turn 2") as caught:
        run_build(path, byte=BYTES, chat=chat, on_error="skip")
    assert caught.value.where == f"{path}, line 2"


def test_another_template_is_another_build(tmp_path: Path, talks: Path, run_build: Run) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{{ x }}{% for m in messages %}{{ m.content }}{% endfor %}")
    chat = ChatConfig(template=str(template), variables={"x": 1})
    run_build(talks, byte=BYTES, chat=chat)
    renamed = template.rename(tmp_path / "other name.jinja")
    renamed_config = ChatConfig(template=str(renamed), variables={"x": 1})
    run_build(talks, byte=BYTES, chat=renamed_config)  # nothing to do
    for changed_config, difference in (
        (ChatConfig(template="chatml"), "chat template was"),
        (ChatConfig(template=str(renamed), variables={"x": 2}), "chat variables was"),
        (ChatConfig(template=str(renamed), variables={"x": 1}, learn="all"), "chat learn was"),
    ):
        with pytest.raises(StorageError, match=f"other settings: {difference}") as caught:
            run_build(talks, byte=BYTES, chat=changed_config)
        assert "endfor" not in str(caught.value)
    renamed.write_text(" {{ x }}{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(StorageError, match="other settings: chat template was"):
        run_build(talks, byte=BYTES, chat=renamed_config)


def test_masked_targets_change_nothing_in_training(talks: Path, run_build: Run) -> None:
    import torch

    from headrace.dataplane.loader import Loader
    from headrace.models.model.loss import cross_entropy

    out = run_build(talks, **CHATML)
    plan = plan_of(
        {
            "sources": {"talks": {"data": str(out)}},
            "phases": {
                "all": {"tokens": 4096, "seq_len": 128, "batch": 512, "weights": {"talks": 1}}
            },
        }
    )
    batches = [batch for step in Loader(plan, micro_batch=4) for batch in step]

    def trained(changed: Callable[[Any], Any]) -> Any:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Embedding(260, 8), torch.nn.Linear(8, 260))
        for batch in batches:
            targets = torch.where(changed(batch.weights), batch.targets + 1, batch.targets) % 259
            loss, total = cross_entropy(model(batch.tokens), targets, batch.weights)
            (loss / total).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
        return model[0].weight.detach()

    assert 0.2 < float(np.mean([(batch.weights == 0).float().mean() for batch in batches])) < 0.8
    usual = trained(lambda weights: weights < 0)
    assert torch.equal(trained(lambda weights: weights == 0), usual)
    assert not torch.equal(trained(lambda weights: weights == 1), usual)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_document_tokens": 9}, "chat needs whole documents"),
        ({"byte": ByteConfig(parse_special=True)}, "would imitate one"),
        ({"byte": ByteConfig(dna=True)}, "no genome"),
        ({"fim": FimConfig(rate=1, sentinels=("a", "b", "c"))}, "an order of its own"),
        ({"source": SourceConfig(text_field="body")}, "fields of its own"),
    ],
)
def test_settings_that_contradict_it_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BuildConfig(inputs=("a",), out="b", **{"tokenizer": "byte", **CHATML, **options})


def test_plain_texts_are_no_conversations(tmp_path: Path, run_build: Run) -> None:
    (tmp_path / "a.txt").write_text("plain")
    with pytest.raises(MisuseError, match=r"a\.txt is text"):
        run_build(tmp_path / "a.txt", **CHATML)


def test_the_command_shows_what_is_learnt(tmp_path: Path) -> None:
    records = [{"q": "2+2", "a": "4"}, {"q": "only a question"}]
    path, out = write(tmp_path / "a.jsonl", records), str(tmp_path / "out")
    command = ["build", str(path), "--tokenizer", "byte", "--out", out, "--workers", "1", *OPTIONS]
    fields = ["--prompt-field", "q", "--response-field", "a", "--on-error", "skip"]
    result = CliRunner().invoke(main, [*command, "--chat", "chatml", *fields])
    assert result.exit_code == 0, result.output
    assert "learns the turns of the assistant" in CliRunner().invoke(main, ["inspect", out]).output
    shown = CliRunner().invoke(main, ["inspect", out, "--document", "0"]).output
    assert "assistant\n⟧4<|im_end|>⟦\n<|endoftext|>⟧" in shown
    data = json.loads(
        CliRunner().invoke(main, ["inspect", out, "--document", "0", "--json"]).output
    )
    assert sum(data["shown"][0]["weights"]) == 2
    card = CliRunner().invoke(main, ["card", out]).output
    assert "tokens of loss weight 0" in card and "{%- for message in messages %}" in card
    llama = ["--chat", "llama-3", "--chat-set", "bos_token=", "--out", f"{out}-2", *fields]
    assert CliRunner().invoke(main, [*command, *llama]).exit_code == 0
    shown = CliRunner().invoke(main, ["inspect", f"{out}-2", "--document", "0"]).output
    assert "⟦<|start_header_id|>user" in shown
    for wrong, message in (
        (["--learn", "all"], "--learn needs --chat"),
        (["--prompt-field", "q"], "--prompt-field needs --chat"),
        (["--chat-set", "a=1"], "--chat-set needs --chat"),
        (["--chat", "chatml", "--text-field", "body"], "chat and text_field"),
        (["--chat", "tokenizer"], "the byte tokenizer has no chat template"),
        (["--chat", "llama-3"], "writes bos_token"),
    ):
        result = CliRunner().invoke(main, [*command, *wrong])
        assert (result.exit_code, message in result.output) == (2, True), result.output
    result = CliRunner().invoke(main, [*command, "--chat", "lama"])
    assert result.exit_code == 1 and "there is no chat template lama" in result.output
