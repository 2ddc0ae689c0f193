"""The messages of a record, and their contents as one text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...dataplane.tokenizers.marks import Marks
from .config import ChatFields
from .problems import BROKEN, MISSING, ChatProblem

OTHER_NAMES = {"human": "user", "gpt": "assistant"}
"""Roles of messages that have `from` and `value` instead of `role` and `content`."""


@dataclass(frozen=True, kw_only=True)
class Contents:
    """Reads a conversation as the contents of its messages: a text for comparisons, which needs no
    template."""

    fields: ChatFields
    """Fields of a record that hold a conversation."""

    def read(self, record: dict[str, Any]) -> tuple[str, Marks]:
        """Return the contents, one after the other; raise ChatProblem."""
        contents = [message.get("content") for message in messages_of(record, self.fields)]
        return "\n".join(text for text in contents if isinstance(text, str)), Marks()

    def columns(self, names: Sequence[str]) -> list[str]:
        """Return the columns of a conversation, in a file with columns of these names."""
        return columns_of(self.fields, names)


def columns_of(fields: ChatFields, names: Sequence[str]) -> list[str]:
    """Return the columns of messages, in a file with columns of these names."""
    pair = [fields.prompt, fields.response]
    found = [fields.messages] if fields.messages in names else []
    return found if found and not set(pair) <= set(names) else found + pair


def messages_of(record: dict[str, Any], fields: ChatFields) -> list[dict[str, Any]]:
    """Return messages with `role` and `content`; raise ChatProblem."""
    if record.get(fields.messages) is not None:
        given = record[fields.messages]
        if not isinstance(given, list) or not given:
            raise ChatProblem(BROKEN, f"`{fields.messages}` is no list with messages")
        return [_message(value, turn) for turn, value in enumerate(given, start=1)]
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


def _message(given: Any, turn: int) -> dict[str, Any]:
    """Return a message with `role` and `content`; raise ChatProblem."""
    if not isinstance(given, dict):
        raise ChatProblem(BROKEN, f"turn {turn} is no object with `role` and `content`")
    value: dict[str, Any] = given
    if "role" not in value and "from" in value and "value" in value:
        rest = {key: item for key, item in value.items() if key not in ("from", "value")}
        role = value["from"]
        value = {"role": OTHER_NAMES.get(role, role), "content": value["value"], **rest}
    known = ", ".join(f"`{key}`" for key in list(value)[:10]) or "nothing"
    if not isinstance(value.get("role"), str):
        raise ChatProblem(BROKEN, f"turn {turn} has no `role` that is a string (it has {known})")
    if not isinstance(value.get("content"), str) and not value.get("tool_calls"):
        raise ChatProblem(BROKEN, f"turn {turn} has no `content` that is a string (it has {known})")
    return value
