"""A record's messages, and their contents as one text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...dataplane.tokenizers.marks import TextSpans
from .config import ChatFields
from .problems import BROKEN, MISSING, ChatProblem

ROLE_ALIASES = {"human": "user", "gpt": "assistant"}
"""Role names, in messages with `from` and `value` instead of `role` and `content`."""


@dataclass(frozen=True, kw_only=True)
class MessageContents:
    """Reads a conversation as its messages' contents: a text to compare, without template."""

    fields: ChatFields
    """Fields of a record that hold a conversation."""

    def read(self, record: dict[str, Any]) -> tuple[str, TextSpans]:
        """Return the messages' contents, a line feed between them; raise ChatProblem."""
        contents = [message.get("content") for message in read_messages(record, self.fields)]
        return "\n".join(text for text in contents if isinstance(text, str)), TextSpans()

    def columns(self, names: Sequence[str]) -> list[str]:
        """Return the columns that hold a conversation, in a file with the columns `names`."""
        return conversation_columns(self.fields, names)


def conversation_columns(fields: ChatFields, names: Sequence[str]) -> list[str]:
    """Return the columns that hold messages, in a file with the columns `names`."""
    pair = [fields.prompt, fields.response]
    columns = [fields.messages] if fields.messages in names else []
    return columns if columns and not set(pair) <= set(names) else columns + pair


def read_messages(record: dict[str, Any], fields: ChatFields) -> list[dict[str, Any]]:
    """Return messages with `role` and `content`; raise ChatProblem."""
    if record.get(fields.messages) is not None:
        messages = record[fields.messages]
        if not isinstance(messages, list) or not messages:
            raise ChatProblem(BROKEN, f"`{fields.messages}` is no list with messages")
        return [_check_message(value, turn) for turn, value in enumerate(messages, start=1)]
    roles = {"user": fields.prompt, "assistant": fields.response}
    for name in roles.values():
        if name not in record:
            known = ", ".join(f"`{key}`" for key in list(record)[:10])
            raise ChatProblem(
                MISSING,
                f"no field `{fields.messages}`, and no field `{name}` (it has {known})",
            )
        if not isinstance(record[name], str):
            raise ChatProblem(MISSING, f"`{name}` is not a string")
    return [{"role": role, "content": record[name]} for role, name in roles.items()]


def _check_message(entry: Any, turn: int) -> dict[str, Any]:
    """Return a message with `role` and `content`; raise ChatProblem."""
    if not isinstance(entry, dict):
        raise ChatProblem(BROKEN, f"turn {turn} is no object with `role` and `content`")
    message: dict[str, Any] = entry
    if "role" not in message and "from" in message and "value" in message:
        extra = {key: item for key, item in message.items() if key not in ("from", "value")}
        role = message["from"]
        message = {"role": ROLE_ALIASES.get(role, role), "content": message["value"], **extra}
    known = ", ".join(f"`{key}`" for key in list(message)[:10]) or "nothing"
    if not isinstance(message.get("role"), str):
        raise ChatProblem(BROKEN, f"turn {turn} has no `role` that is a string (it has {known})")
    if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
        raise ChatProblem(BROKEN, f"turn {turn} has no `content` that is a string (it has {known})")
    return message
