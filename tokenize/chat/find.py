"""Load a chat template: a file, the tokenizer's own, or a shipped one."""

from __future__ import annotations

import json
import re
from typing import Any

from ...console.errors import InputError, MisuseError
from ...console.explain import nearest, nearest_path
from ...console.log import get_logger
from ...dataplane.storage import hub, storage
from ...dataplane.tokenizers import Tokenizer
from .config import FROM_TOKENIZER, SHIPPED_TEMPLATES, ChatConfig
from .conversation import Chat
from .template import ChatTemplate, compile_template

log = get_logger(__name__)

CONFIG, TEMPLATE_FILE = "tokenizer_config.json", "chat_template.jinja"
"""Files next to a tokenizer.json that may hold its template."""

TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
"""ChatTemplate variables that name special tokens."""
LOOKS_SPECIAL = re.compile(r"<\|[^|<>\s]+\|>")


def load_chat(config: ChatConfig, tokenizer: Tokenizer, place: str) -> Chat:
    """Load a chat template for a tokenizer; `place` is where the tokenizer comes from."""
    source = _template_source(config.template, place)
    template = compile_template(source, config.template)
    if tokenizer.unsplittable_reason is not None:
        raise MisuseError(
            f"--chat cannot use the tokenizer {place}: {tokenizer.unsplittable_reason}",
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


def _template_source(name: str, tokenizer: str) -> str:
    if name == FROM_TOKENIZER:
        if tokenizer == "byte":
            raise MisuseError(
                "--chat tokenizer: the byte tokenizer has no chat template",
                hint=f"name a Jinja file, or one of {', '.join(SHIPPED_TEMPLATES)}",
            )
        return _template_in_folder(_tokenizer_folder(tokenizer))
    if name in SHIPPED_TEMPLATES:
        return SHIPPED_TEMPLATES[name].read_text(encoding="utf-8")
    if hub.file_url(name, CONFIG) != name or _is_local_folder(name):
        return _template_in_folder(name.rstrip("/"))
    if not storage.exists(name):
        path = nearest_path(storage.local_path(name)) if storage.is_local(name) else None
        near = nearest(name, [FROM_TOKENIZER, *SHIPPED_TEMPLATES, *([path] if path else [])])
        hint = f"name a Jinja file, {FROM_TOKENIZER}, or one of {', '.join(SHIPPED_TEMPLATES)}"
        raise InputError(
            f"there is no chat template {name}", hint=f"did you mean {near}?" if near else hint
        )
    data = storage.read(name)
    if name.endswith(".json"):
        return _template_in_config(data, name)
    return _decode(data, name)


def _tokenizer_folder(tokenizer: str) -> str:
    """Return the folder with the tokenizer.json."""
    return hub.file_url(tokenizer, "tokenizer.json").rpartition("/")[0] or "."


def _is_local_folder(name: str) -> bool:
    return storage.is_local(name) and storage.local_path(name).is_dir()


def _template_in_folder(folder: str) -> str:
    template_file, config_file = storage.join(folder, TEMPLATE_FILE), storage.join(folder, CONFIG)
    if storage.exists(template_file):
        return _decode(storage.read(template_file), template_file)
    if not storage.exists(config_file):
        raise InputError(
            f"{folder} holds no chat template: neither {TEMPLATE_FILE} nor {CONFIG}",
            hint=f"name a Jinja file, or one of {', '.join(SHIPPED_TEMPLATES)}",
        )
    return _template_in_config(storage.read(config_file), config_file)


def _template_in_config(data: bytes, where: str) -> str:
    template = _parse_config(data, where).get("chat_template")
    if isinstance(template, list):  # several templates: the one without a purpose of its own
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if not isinstance(template, str):
        raise InputError(
            f"{where} has no chat_template",
            hint=f"name a Jinja file, or one of {', '.join(SHIPPED_TEMPLATES)}",
        )
    return template


def _parse_config(data: bytes, where: str) -> dict[str, Any]:
    try:
        config = json.loads(data)
    except ValueError as error:
        raise InputError(f"{where} is not JSON: {error}", hint="name a Jinja file") from None
    if not isinstance(config, dict):
        raise InputError(f"{where} is no JSON object", hint="name a Jinja file")
    return config


def _decode(data: bytes, where: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InputError(
            f"the chat template {where} is not UTF-8: {error.reason} at byte {error.start}",
            hint="save it as UTF-8",
        ) from None


def _special_tokens(template: ChatTemplate, tokenizer: Tokenizer, place: str) -> dict[str, str]:
    """Return the template's variables that name special tokens, as the tokenizer's configuration
    has them. Without one, `eos_token` is the token that ends documents."""
    names = set(TOKENS) & template.variables
    tokens: dict[str, str] = {}
    end_id = tokenizer.info.end_of_document
    end_names = [name for name, token in tokenizer.special.items() if token.id == end_id]
    if "eos_token" in names and end_names:
        tokens["eos_token"] = end_names[0]
    config = storage.join(_tokenizer_folder(place), CONFIG)
    if names and place != "byte" and storage.exists(config):
        values = _parse_config(storage.read(config), config)
        for name in names & values.keys():
            value = values[name]
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                tokens[name] = value
    return tokens
