"""Problems in records that cannot become conversations."""

from __future__ import annotations

BROKEN = "broken conversation"
MISSING = "missing field"
NOTHING = "no assistant turn"
REFUSED = "refused by the template"
FAILED = "the template fails"
UNSTEADY = "unsteady template"
"""Bad-record kinds. An unsteady template is the template's fault: a build stops at it, even if
bad records are skipped."""


class ChatProblem(Exception):
    """A record cannot become a conversation. A build reports it as a bad record."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
