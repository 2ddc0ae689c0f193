"""A record of a corpus as a conversation: its text by a chat template, and what is learnt of it.

A special token is one where the template writes its name, and plain text where a message holds the
name. A name that is put together from a word of the record and the template is a special token if
the word is a usual role, or one that the template compares with; else it is plain text.

The assistant's parts are the template's `{% generation %}` blocks. A template without them is
rendered up to each turn of the assistant, and once more with it: the difference is the turn.
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
from ...dataplane.tokenizers.marks import Marks
from .config import ChatFields, Learn
from .messages import columns_of, messages_of
from .names import NameParts
from .problems import BROKEN, NOTHING, UNSTEADY, ChatProblem
from .template import BREAK, CLOSE, EDGE, MARKS, OPEN, Template, compiled

TOOLS = "tools"
"""Field of the tools that a conversation may use, and the template's variable for them."""
ROLES = frozenset(["system", "developer", "user", "assistant", "tool", "function", "environment"])
"""Words of a record of which a template may put the name of a special token together."""


@dataclass(frozen=True, kw_only=True)
class Chat:
    """How the records of a build become texts."""

    name: str
    """Name of the template, for errors."""
    source: str
    """The template."""
    learn: Learn
    """Parts of a conversation that are learnt."""
    fields: ChatFields
    """Fields of a record that hold a conversation."""
    variables: dict[str, Any]
    """Variables of the template, such as `bos_token`."""
    special: dict[str, SpecialToken]
    """Special tokens of the tokenizer."""

    @property
    def identity(self) -> dict[str, Any]:
        """Return what decides the texts and the learnt parts; the tokenizer decides the rest."""
        return {
            "template": hashlib.sha256(self.source.encode()).hexdigest(),
            "learn": self.learn,
            "fields": vars(self.fields),
            "variables": self.variables,
            "source": self.source,
        }

    def read(self, record: dict[str, Any]) -> tuple[str, Marks]:
        """Return the text of a record, its special tokens and what is learnt; raise ChatProblem."""
        messages = self._plain(messages_of(record, self.fields))
        variables = {**self.variables}
        if record.get(TOOLS) is not None:
            variables[TOOLS] = self._plain(record[TOOLS])
        rendered = self._template.render(messages, variables, prompt=False)
        if self.learn == "assistant" and not self._template.marks_generation:
            rendered = self._with_turns(rendered, messages, variables)
        return self._text_and_marks(rendered)

    def columns(self, names: Sequence[str]) -> list[str]:
        """Return the columns of a conversation, in a file with columns of these names."""
        return columns_of(self.fields, names) + [TOOLS] * (TOOLS in names)

    @property
    def _template(self) -> Template:
        return compiled(self.source, self.name)

    def _plain(self, value: Any) -> Any:
        """Return a value of a record with a mark in each name of a special token, and where the
        template could put a name together."""
        if isinstance(value, str):
            trusted = value in ROLES or value in self._template.compared
            return self._marked(value, [] if trusted else self._parts.find(value))
        if isinstance(value, list):
            return [self._plain(item) for item in value]
        if isinstance(value, dict):
            return {self._marked(key, []): self._plain(item) for key, item in value.items()}
        return value

    def _marked(self, text: str, edges: list[int]) -> str:
        if any(mark in text for mark in MARKS):
            raise ChatProblem(BROKEN, "it holds a character from U+FDD0 to U+FDD3")
        marks = dict.fromkeys(edges, EDGE)
        marks |= {match.start() + 1: BREAK for match in self._names.finditer(text)}
        cuts = [*sorted(marks), len(text)]
        return text[: cuts[0]] + "".join(marks[a] + text[a:b] for a, b in pairwise(cuts))

    @cached_property
    def _parts(self) -> NameParts:
        return NameParts(self.special)

    @cached_property
    def _names(self) -> re.Pattern[str]:
        """Match the beginning of each name, also of those that overlap."""
        return re.compile(
            f"(?={'|'.join(map(re.escape, self.special))})" if self.special else "(?!)"
        )

    @cached_property
    def _tokens(self) -> re.Pattern[str]:
        """Match special tokens, the longest first, with the white space that they swallow."""
        space = r"[^\S\x1c-\x1f]*"  # what the `tokenizers` library takes for white space
        parts = [
            f"{space * token.takes_left}{re.escape(name)}"
            # The mark of a name of one letter stands after it.
            f"{f'(?!{BREAK})' if len(name) == 1 else ''}{space * token.takes_right}"
            for name, token in sorted(self.special.items(), key=lambda item: -len(item[0]))
        ]
        return re.compile("|".join(parts) or "(?!)")

    def _id(self, found: str) -> int:
        return (self.special.get(found) or self.special[found.strip()]).id

    def _with_turns(
        self, whole: str, messages: list[dict[str, Any]], variables: Mapping[str, Any]
    ) -> str:
        """Mark the assistant's turns in a rendered conversation."""
        parts, at = [], 0
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._template.render(messages[:number], variables, prompt=True)
            upto = whole
            if number + 1 < len(messages):
                upto = self._template.render(messages[: number + 1], variables, prompt=False)
            why = None
            if not whole.startswith(upto):
                why = (
                    f"it writes turn {number + 1}, or one before, in another way when more follows"
                )
            elif not upto.startswith(before) or len(before) < at:
                why = f"it writes turn {number + 1} in another way than it prompts for it"
            if why is not None:
                raise ChatProblem(
                    UNSTEADY,
                    f"{why}, so the assistant's part is unknown; put {{% generation %}} and "
                    "{% endgeneration %} around what the assistant writes",
                )
            short = upto.rstrip()
            end = len(short) if short.endswith(tuple(self.special)) else len(upto)
            parts += [whole[at : len(before)], OPEN, whole[len(before) : end], CLOSE]
            at = end
        return "".join([*parts, whole[at:]])

    def _text_and_marks(self, rendered: str) -> tuple[str, Marks]:
        """Take the marks out of a rendered conversation."""
        learnt: list[tuple[int, int]] = []
        begins: list[int] = []
        parts, at = [], 0
        for part in re.split(f"([{OPEN}{CLOSE}])", rendered):
            if part == OPEN:
                begins.append(at)
            elif part == CLOSE and begins:
                begin = begins.pop()
                if not begins:  # blocks may be nested
                    learnt.append((begin, at))
            elif part != CLOSE:
                parts.append(part)
                at += len(part)
        text = "".join(parts)
        breaks = [match.start() for match in re.finditer(f"[{BREAK}{EDGE}]", text)]

        def place(k: int) -> int:
            return k - bisect_left(breaks, k)

        special = tuple(
            (place(match.start()), place(match.end()), self._id(match.group()))
            for match in self._tokens.finditer(text)
        )
        text = text.replace(BREAK, "").replace(EDGE, "")
        if self.learn == "all":
            return text, Marks(special)
        spans = tuple(sorted((place(a), place(b)) for a, b in learnt if a < b))
        if text and not spans:
            raise ChatProblem(NOTHING, "nothing in the conversation is learnt")
        return text, Marks(special, spans)
