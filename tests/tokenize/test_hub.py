"""Corpora and tokenizers of the Hugging Face Hub, through `huggingface_hub` and a local hub."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from support.data.corpora import ONE, read_dataset, texts
from support.stores.hub_server import COMMIT, Hub, hub_of

from headrace.console.errors import InputError, StorageError
from headrace.dataplane.storage import storage
from headrace.tokenize.builder.build import BuildConfig, build
from headrace.tokenize.chat.config import ChatConfig
from headrace.tokenize.cli import main
from headrace.tokenize.train import TrainConfig, train

LINES = texts(40)
ROWS = texts(60, seed=1)
URL = f"hf://datasets/owner/corpus@{COMMIT}"
TEMPLATE = "{{ messages[0].content }}{% generation %}:{{ messages[1].content }}{% endgeneration %}"


def parquet(rows: list[str]) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table({"text": rows}), out, row_group_size=20)
    return out.getvalue()


@pytest.fixture
def hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_request_policy: Callable[..., None]
) -> Iterator[Hub]:
    import huggingface_hub
    from huggingface_hub import constants, file_download

    path = tmp_path / "for-the-tokenizer.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in LINES))
    train(TrainConfig(inputs=(str(path),), out=str(tmp_path / "t.json"), vocab_size=300))
    repositories = {
        "datasets/owner/corpus": {
            "README.md": b"a card, which is a text",
            "data/a.jsonl": path.read_bytes(),
            "data/more/b.parquet": parquet(ROWS),
        },
        "owner/model": {
            "tokenizer.json": (tmp_path / "t.json").read_bytes(),
            "tokenizer_config.json": json.dumps({"chat_template": TEMPLATE}).encode(),
        },
    }
    set_request_policy(first_pause=0.01)
    with hub_of(repositories) as served:
        monkeypatch.setattr(constants, "ENDPOINT", served.endpoint)
        template = served.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        for module in (constants, file_download):  # huggingface_hub 2 reads the first, 0 the second
            monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
        huggingface_hub.HfFileSystem.clear_instance_cache()
        yield served
        huggingface_hub.HfFileSystem.clear_instance_cache()


def test_a_build_from_the_hub(tmp_path: Path, hub: Hub) -> None:
    hub.faults += [503]
    config = BuildConfig(
        inputs=(f"{URL}/data",),
        out=str(tmp_path / "out"),
        tokenizer=f"hf://owner/model@{COMMIT}",
        engine=ONE,
    )
    build(config)
    result = read_dataset(tmp_path / "out")
    assert [text for _, text, _ in result] == [*LINES, *ROWS]
    assert {origin.file for origin, _, _ in result} == {
        f"{URL}/data/a.jsonl",
        f"{URL}/data/more/b.parquet",
    }
    before = len(hub.requests)
    build(config)  # nothing is new: no file is read again
    assert not [
        line for line in hub.requests[before:] if "/resolve/" in line and ".json" not in line
    ]


@pytest.mark.parametrize("template", ["tokenizer", f"hf://owner/model@{COMMIT}"])
def test_a_chat_template_of_the_hub(tmp_path: Path, hub: Hub, template: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    config = BuildConfig(
        inputs=(str(tmp_path / "a.jsonl"),),
        out=str(tmp_path / "out"),
        tokenizer=f"hf://owner/model@{COMMIT}",
        chat=ChatConfig(template=template),
        engine=ONE,
    )
    build(config)
    assert [text for _, text, _ in read_dataset(tmp_path / "out")] == ["a:b"]


def test_only_the_bytes_of_a_range_are_sent(hub: Hub) -> None:
    whole = storage.read(f"{URL}/data/a.jsonl")
    hub.sent = 0
    assert storage.read(f"{URL}/data/a.jsonl", 10, 30) == whole[10:30]
    assert hub.sent == 20


@pytest.mark.parametrize(
    ("url", "revision"),
    [
        ("hf://datasets/owner/corpus/data/a.jsonl", "(no commit)"),
        ("hf://datasets/owner/corpus@main/data/*.jsonl", "(`main` is no commit)"),
    ],
)
def test_a_url_must_name_a_commit(hub: Hub, url: str, revision: str) -> None:
    with pytest.raises(InputError, match="must name a commit") as caught:
        storage.exists(url)
    assert revision in caught.value.message
    assert f"@{COMMIT}, the commit that it names now" in str(caught.value.hint)
    with pytest.raises(InputError, match="must name a commit") as caught:
        storage.exists(url.replace("owner", "nobody"))
    assert caught.value.hint == "write …@COMMIT"


def test_the_url_of_a_tokenizer_must_name_a_commit(hub: Hub) -> None:
    with pytest.raises(InputError, match="as in hf://OWNER/NAME@COMMIT") as caught:
        storage.exists("hf://owner/model")
    assert f"@{COMMIT}, the commit that it names now" in str(caught.value.hint)
    with pytest.raises(InputError, match=r"\(`refs/pr/1` is no commit\)"):
        storage.exists("hf://owner/model@refs/pr/1/tokenizer.json")
    with pytest.raises(InputError) as caught:
        storage.exists("hf://owner/corpus/data/a.jsonl")  # a dataset without `datasets/`
    assert "the URL of a dataset begins with hf://datasets/" in str(caught.value.hint)


def test_what_is_not_there_is_named(tmp_path: Path, hub: Hub) -> None:
    with pytest.raises(StorageError, match=r"cannot read .*/nothing: it does not exist"):
        storage.read(f"{URL}/nothing")
    run = CliRunner().invoke(
        main, ["build", f"{URL}/*.fasta", "--tokenizer", "byte", "--out", str(tmp_path / "o")]
    )
    assert run.exit_code == 1
    assert f"no files at {URL}/*.fasta" in run.stderr
    with pytest.raises(StorageError, match="there is no tokenizer hf://owner/corpus"):
        build(
            BuildConfig(
                inputs=(f"{URL}/data",),
                out=str(tmp_path / "out"),
                tokenizer=f"hf://owner/corpus@{COMMIT}",
                engine=ONE,
            )
        )
