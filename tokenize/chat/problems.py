"""Records that do not become conversations."""

from __future__ import annotations

BROKEN = "broken conversation"
MISSING = "missing field"
NOTHING = "no assistant turn"
REFUSED = "refused by the template"
FAILED = "the template fails"
UNSTEADY = "unsteady template"
"""Kinds of problems, as kinds of bad records. The last one is the template's: a build stops at it,
whatever becomes of bad records."""


class ChatProblem(Exception):
    """A record that does not become a conversation. A build reports it as a bad record."""

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(what)
        self.kind = kind
