"""Render a corpus record as a conversation: its text by a chat template, and the learnt parts.

A special token's name is a special token where the template writes it, and plain text inside a
message. A name composed by the template with a word from the record is a special token if the word
is a usual role, or one that the template compares with; else it is plain text.

The assistant's parts are the template's `{% generation %}` blocks. Without them, the template is
rendered up to every assistant turn, and once more with the turn: the difference is the turn.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from ...dataplane.tokenizers import SpecialToken
from ...dataplane.tokenizers.marks import TextSpans
from .config import ChatFields, Learn
from .messages import conversation_columns, read_messages
from .names import NameParts
from .problems import BROKEN, NOTHING, UNSTEADY, ChatProblem
from .template import BREAK, CLOSE, EDGE, MARKS, OPEN, ChatTemplate, compile_template

TOOLS = "tools"
"""Field with the tools that a conversation may use, and the template's variable for them."""
ROLES = frozenset(["system", "developer", "user", "assistant", "tool", "function", "environment"])
"""Record words from which a template may compose a special token's name."""


@dataclass(frozen=True, kw_only=True)
class Chat:
    """Turns records into texts by a chat template."""

    name: str
    """The template's name, for errors."""
    source: str
    """The template."""
    learn: Learn
    """Parts of a conversation that are learnt."""
    fields: ChatFields
    """Fields of a record that hold a conversation."""
    variables: dict[str, Any]
    """The template's variables, such as `bos_token`."""
    special: dict[str, SpecialToken]
    """The tokenizer's special tokens, by name."""

    @property
    def identity(self) -> dict[str, Any]:
        """Return everything that decides texts and learnt parts, except the tokenizer."""
        return {
            "template": hashlib.sha256(self.source.encode()).hexdigest(),
            "learn": self.learn,
            "fields": vars(self.fields),
            "variables": self.variables,
            "source": self.source,
        }

    def read(self, record: dict[str, Any]) -> tuple[str, TextSpans]:
        """Return a record's text, with special-token spans and learnt parts; raise ChatProblem."""
        messages = self._neutralize(read_messages(record, self.fields))
        variables = {**self.variables}
        if record.get(TOOLS) is not None:
            variables[TOOLS] = self._neutralize(record[TOOLS])
        rendered = self._template.render(messages, variables, prompt=False)
        if self.learn == "assistant" and not self._template.marks_generation:
            rendered = self._mark_turns(rendered, messages, variables)
        return self._take_marks(rendered)

    def columns(self, names: Sequence[str]) -> list[str]:
        """Return the columns that hold a conversation, in a file with the columns `names`."""
        return conversation_columns(self.fields, names) + [TOOLS] * (TOOLS in names)

    @property
    def _template(self) -> ChatTemplate:
        return compile_template(self.source, self.name)

    def _neutralize(self, value: Any) -> Any:
        """Insert marks into a record's value: inside special tokens' names, and at ends where the
        template could compose a name."""
        if isinstance(value, str):
            trusted = value in ROLES or value in self._template.compared
            return self._insert_marks(value, [] if trusted else self._name_parts.find(value))
        if isinstance(value, list):
            return [self._neutralize(item) for item in value]
        if isinstance(value, dict):
            return {
                self._insert_marks(key, []): self._neutralize(item) for key, item in value.items()
            }
        return value

    def _insert_marks(self, text: str, edges: list[int]) -> str:
        if any(mark in text for mark in MARKS):
            raise ChatProblem(BROKEN, "it holds a character from U+FDD0 to U+FDD3")
        marks = dict.fromkeys(edges, EDGE)
        marks |= {match.start() + 1: BREAK for match in self._name_starts.finditer(text)}
        cuts = [*sorted(marks), len(text)]
        return text[: cuts[0]] + "".join(marks[a] + text[a:b] for a, b in pairwise(cuts))

    @cached_property
    def _name_parts(self) -> NameParts:
        return NameParts(self.special)

    @cached_property
    def _name_starts(self) -> re.Pattern[str]:
        """Matches where a name begins, also where names overlap."""
        return re.compile(
            f"(?={'|'.join(map(re.escape, self.special))})" if self.special else "(?!)"
        )

    @cached_property
    def _tokens(self) -> re.Pattern[str]:
        """Matches special tokens, longest first, with the white space that they swallow."""
        space = r"[^\S\x1c-\x1f]*"  # what the `tokenizers` library takes for white space
        patterns = [
            f"{space * token.strips_left}{re.escape(name)}"
            # The mark of a name of one letter stands after it.
            f"{f'(?!{BREAK})' if len(name) == 1 else ''}{space * token.strips_right}"
            for name, token in sorted(self.special.items(), key=lambda item: -len(item[0]))
        ]
        return re.compile("|".join(patterns) or "(?!)")

    def _token_id(self, match: str) -> int:
        return (self.special.get(match) or self.special[match.strip()]).id

    def _mark_turns(
        self, conversation: str, messages: list[dict[str, Any]], variables: Mapping[str, Any]
    ) -> str:
        """Mark the assistant's turns in a rendered conversation."""
        pieces, end = [], 0
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before_turn = self._template.render(messages[:number], variables, prompt=True)
            through_turn = conversation
            if number + 1 < len(messages):
                through_turn = self._template.render(
                    messages[: number + 1], variables, prompt=False
                )
            reason = None
            if not conversation.startswith(through_turn):
                reason = (
                    f"it writes turn {number + 1}, or one before, in another way when more follows"
                )
            elif not through_turn.startswith(before_turn) or len(before_turn) < end:
                reason = f"it writes turn {number + 1} in another way than it prompts for it"
            if reason is not None:
                raise ChatProblem(
                    UNSTEADY,
                    f"{reason}, so the assistant's part is unknown; put {{% generation %}} and "
                    "{% endgeneration %} around what the assistant writes",
                )
            stripped = through_turn.rstrip()
            turn_end = (
                len(stripped) if stripped.endswith(tuple(self.special)) else len(through_turn)
            )
            start = len(before_turn)
            pieces += [conversation[end:start], OPEN, conversation[start:turn_end], CLOSE]
            end = turn_end
        return "".join([*pieces, conversation[end:]])

    def _take_marks(self, rendered: str) -> tuple[str, TextSpans]:
        """Remove the marks from a rendered conversation; return the text and its spans."""
        learnt: list[tuple[int, int]] = []
        open_blocks: list[int] = []
        pieces, position = [], 0
        for piece in re.split(f"([{OPEN}{CLOSE}])", rendered):
            if piece == OPEN:
                open_blocks.append(position)
            elif piece == CLOSE and open_blocks:
                block_start = open_blocks.pop()
                if not open_blocks:  # blocks may be nested
                    learnt.append((block_start, position))
            elif piece != CLOSE:
                pieces.append(piece)
                position += len(piece)
        text = "".join(pieces)
        breaks = [match.start() for match in re.finditer(f"[{BREAK}{EDGE}]", text)]

        def move(k: int) -> int:
            return k - bisect_left(breaks, k)

        special = tuple(
            (move(match.start()), move(match.end()), self._token_id(match.group()))
            for match in self._tokens.finditer(text)
        )
        text = text.replace(BREAK, "").replace(EDGE, "")
        if self.learn == "all":
            return text, TextSpans(special)
        spans = tuple(sorted((move(a), move(b)) for a, b in learnt if a < b))
        if text and not spans:
            raise ChatProblem(NOTHING, "nothing in the conversation is learnt")
        return text, TextSpans(special, spans)
