"""Find a chat template: a file, that of a tokenizer, or one of those that are shipped here."""

from __future__ import annotations

import json
import re
from typing import Any

from ...console.errors import InputError, MisuseError
from ...console.explain import nearest, nearest_path
from ...console.log import get_logger
from ...dataplane.storage import hub, storage
from ...dataplane.tokenizers import Tokenizer
from .config import OWN, SHIPPED, ChatConfig
from .conversation import Chat
from .template import Template, compiled

log = get_logger(__name__)

CONFIG, BESIDE = "tokenizer_config.json", "chat_template.jinja"
"""Files beside a tokenizer.json that may hold its template."""

TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
"""Variables of a template that name special tokens."""
LOOKS_SPECIAL = re.compile(r"<\|[^|<>\s]+\|>")


def chat_of(config: ChatConfig, tokenizer: Tokenizer, place: str) -> Chat:
    """Return how records become texts; `place` is where the tokenizer comes from."""
    source = _source(config.template, place)
    template = compiled(source, config.template)
    if tokenizer.whole_because is not None:
        raise MisuseError(
            f"--chat cannot use the tokenizer {place}: {tokenizer.whole_because}",
            hint="use a byte-level tokenizer, as those of GPT-2, Llama 3 or Qwen",
        )
    variables = {**_special_tokens(template, tokenizer, place), **config.variables}
    for name in sorted({"bos_token", "eos_token"} & template.variables - variables.keys()):
        raise MisuseError(
            f"the chat template {config.template} writes {name}, and the tokenizer names none",
            hint=f"name it with --chat-set {name}=TOKEN, or write --chat-set {name}= for none",
        )
    unknown = [
        name
        for text in template.texts
        for name in LOOKS_SPECIAL.findall(text)
        if name not in tokenizer.special and len(tokenizer.encode([name]).tokens) > 2
    ]
    if unknown:
        log.warning(
            "the chat template %s writes %s, no special token of the tokenizer: plain text, which "
            "messages can imitate",
            config.template,
            ", ".join(dict.fromkeys(unknown)),
        )
    return Chat(
        name=config.template,
        source=source,
        learn=config.learn,
        fields=config.fields,
        variables=variables,
        special=dict(tokenizer.special),
    )


def _source(name: str, tokenizer: str) -> str:
    if name == OWN:
        if tokenizer == "byte":
            raise MisuseError(
                "--chat tokenizer: the byte tokenizer has no chat template",
                hint=f"name a Jinja file, or one of {', '.join(SHIPPED)}",
            )
        return _of_folder(_folder(tokenizer))
    if name in SHIPPED:
        return SHIPPED[name].read_text(encoding="utf-8")
    if hub.file_of(name, CONFIG) != name or _is_folder(name):
        return _of_folder(name.rstrip("/"))
    if not storage.exists(name):
        path = nearest_path(storage.local_path(name)) if storage.is_local(name) else None
        near = nearest(name, [OWN, *SHIPPED, *([path] if path else [])])
        hint = f"name a Jinja file, {OWN}, or one of {', '.join(SHIPPED)}"
        raise InputError(
            f"there is no chat template {name}", hint=f"did you mean {near}?" if near else hint
        )
    data = storage.read(name)
    if name.endswith(".json"):
        return _in_config(data, name)
    return _text(data, name)


def _folder(tokenizer: str) -> str:
    """Return the folder that holds a tokenizer.json."""
    return hub.file_of(tokenizer, "tokenizer.json").rpartition("/")[0] or "."


def _is_folder(name: str) -> bool:
    return storage.is_local(name) and storage.local_path(name).is_dir()


def _of_folder(folder: str) -> str:
    beside, config = storage.join(folder, BESIDE), storage.join(folder, CONFIG)
    if storage.exists(beside):
        return _text(storage.read(beside), beside)
    if not storage.exists(config):
        raise InputError(
            f"{folder} holds no chat template: neither {BESIDE} nor {CONFIG}",
            hint=f"name a Jinja file, or one of {', '.join(SHIPPED)}",
        )
    return _in_config(storage.read(config), config)


def _in_config(data: bytes, where: str) -> str:
    found = _config(data, where).get("chat_template")
    if isinstance(found, list):  # several templates: the one without a purpose of its own
        found = {entry["name"]: entry["template"] for entry in found}.get("default")
    if not isinstance(found, str):
        raise InputError(
            f"{where} has no chat_template",
            hint=f"name a Jinja file, or one of {', '.join(SHIPPED)}",
        )
    return found


def _config(data: bytes, where: str) -> dict[str, Any]:
    try:
        config = json.loads(data)
    except ValueError as error:
        raise InputError(f"{where} is not JSON: {error}", hint="name a Jinja file") from None
    if not isinstance(config, dict):
        raise InputError(f"{where} is no JSON object", hint="name a Jinja file")
    return config


def _text(data: bytes, where: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InputError(
            f"the chat template {where} is not UTF-8: {error.reason} at byte {error.start}",
            hint="save it as UTF-8",
        ) from None


def _special_tokens(template: Template, tokenizer: Tokenizer, place: str) -> dict[str, str]:
    """Return the names of special tokens that the template reads: those of the tokenizer's
    configuration; `eos_token` is else the token that ends documents."""
    wanted = set(TOKENS) & template.variables
    found: dict[str, str] = {}
    ends = tokenizer.info.end_of_document
    ending = [name for name, token in tokenizer.special.items() if token.id == ends]
    if "eos_token" in wanted and ending:
        found["eos_token"] = ending[0]
    config = storage.join(_folder(place), CONFIG)
    if wanted and place != "byte" and storage.exists(config):
        values = _config(storage.read(config), config)
        for name in wanted & values.keys():
            value = values[name]
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                found[name] = value
    return found
