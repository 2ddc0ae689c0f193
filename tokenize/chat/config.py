"""Settings for a build whose records are conversations."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Learn = Literal["assistant", "all"]
"""assistant: the turns of the assistant; all: whole conversations."""

FROM_TOKENIZER = "tokenizer"
"""Name that stands for the tokenizer's own template."""
SHIPPED_TEMPLATES = {path.stem: path for path in sorted(Path(__file__).parent.glob("*.jinja"))}
"""Shipped templates: files by name."""


@dataclass(frozen=True, kw_only=True)
class ChatFields:
    """Fields of a record that hold a conversation. Manifests store them. In Parquet and Arrow
    files, null keys of messages are taken for absent: there, all messages have the same keys."""

    messages: str = "messages"
    """List of messages, each with `role` and `content`, or with `from` and `value`."""
    prompt: str = "prompt"
    """The user's text, in records without messages."""
    response: str = "response"
    """The assistant's text, in records without messages."""


@dataclass(frozen=True, kw_only=True)
class ChatConfig:
    template: str
    """A Jinja file, a tokenizer_config.json, a repository of the Hub, the name of a shipped
    template, or `tokenizer`: the tokenizer's own. The clock and random choices are errors. A name
    like `<|user|>` that is no special token of the tokenizer is plain text; a warning names it."""
    learn: Learn = "assistant"
    """Parts of a conversation that are learnt. A token that is partly learnt is learnt. The end of
    the document is not, unless the template writes that token at the end of a learnt part."""
    fields: ChatFields = field(default_factory=ChatFields)
    """Fields of a record that hold a conversation."""
    variables: dict[str, Any] = field(default_factory=dict)
    """Variables of the template. `bos_token`, `eos_token` and the like are those of the tokenizer's
    configuration; without one, `eos_token` is the token that ends documents."""
