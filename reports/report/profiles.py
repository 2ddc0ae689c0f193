"""Render the tables of `--profile`: which operation spends the device's time in a step."""

from __future__ import annotations

from html import escape

from ...console.html.page import section
from ...trainer.folders.folder import RunFolder

TABLES = "steps-*.rank-0.txt"
"""Tables of the first rank; those of other ranks stay in the folder."""


def profiles_section(folder: RunFolder) -> str:
    """Render the tables; empty if no step was traced."""
    tables = [
        file.read_text(encoding="utf-8", errors="replace")
        for file in sorted(folder.profiles.glob(TABLES))
    ]
    blocks = "".join(f'<div class="scroll"><pre>{escape(table)}</pre></div>' for table in tables)
    return section("Profile", blocks) if blocks else ""
