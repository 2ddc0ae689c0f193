"""Where a chat template comes from, and templates that are wrong."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from headrace.console.errors import InputError
from headrace.dataplane.tokenizers.byte import ByteConfig, ByteTokenizer
from headrace.tokenize.chat.config import ChatConfig
from headrace.tokenize.chat.find import load_chat

BYTES = ByteTokenizer(ByteConfig(special_tokens=("<|endoftext|>", "<s>")))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def load_template(template: str | Path, folder: Path, **options: Any) -> tuple[str, dict[str, Any]]:
    config = ChatConfig(template=str(template), **options)
    chat = load_chat(config, BYTES, str(folder / "tokenizer.json"))
    return chat.source, chat.variables


def test_a_misspelt_name_is_likened_to_templates_and_to_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (folder / "chat").mkdir()
    (folder / "chat.jinja").touch()
    for misspelt, near in {"chatmll": "chatml", "chat.jnja": "chat.jinja"}.items():
        with pytest.raises(InputError, match="there is no chat template") as caught:
            load_template(misspelt, folder)
        assert caught.value.hint == f"did you mean {near}?"


@pytest.mark.parametrize("place", ["tokenizer", "folder", "file"])
def test_a_tokenizer_brings_a_template_and_its_tokens(folder: Path, place: str) -> None:
    path = folder / "tokenizer_config.json"
    source = "{{ bos_token }}{{ eos_token }}"
    settings = {"bos_token": {"content": "<s>"}, "chat_template": source}
    path.write_text(json.dumps(settings))
    name = {"tokenizer": "tokenizer", "folder": folder, "file": path}[place]
    tokens = {"bos_token": "<s>", "eos_token": "<|endoftext|>"}
    assert load_template(name, folder) == (source, tokens)
    several = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    path.write_text(json.dumps({"chat_template": several}))
    assert load_template(name, folder) == ("d", {})
    if place != "file":
        (folder / "chat_template.jinja").write_text("beside")
        assert load_template(name, folder) == ("beside", {})


def test_a_variable_replaces_a_token(folder: Path) -> None:
    (folder / "t.jinja").write_text("{{ bos_token }}")
    variables = {"bos_token": "", "date": "today"}
    assert load_template(folder / "t.jinja", folder, variables=variables) == (
        "{{ bos_token }}",
        variables,
    )


def test_names_that_are_no_special_tokens_are_warned_of(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        load_template("chatml", folder)
    assert "<|im_start|>, <|im_end|>, no special token" in caplog.text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{% for m in messages %}\n{{ m }", "wrong in line 2: unexpected '}'"),
        (b"a\n\n{% endfor %}", "wrong in line 3"),
        (b"{{ [1, 2] | random }}", "No filter named 'random'"),
        ("\ufdd0".encode(), "from U\\+FDD0 to U\\+FDD3"),
        (b"\xff", "is not UTF-8"),
    ],
)
def test_a_wrong_template_is_an_error(folder: Path, content: bytes, message: str) -> None:
    (folder / "t.jinja").write_bytes(content)
    with pytest.raises(InputError, match=message):
        load_template(folder / "t.jinja", folder)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "holds no chat template"),
        ("{}", "has no chat_template"),
        ("[]", "is no JSON object"),
        ("{", "is not JSON"),
    ],
)
def test_a_tokenizer_without_a_template_is_an_error(
    folder: Path, config: str | None, message: str
) -> None:
    if config is not None:
        (folder / "tokenizer_config.json").write_text(config)
    with pytest.raises(InputError, match=message):
        load_template("tokenizer", folder)
