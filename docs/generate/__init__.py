"""Pages of the documentation site made from the code: commands, configuration, keys of
other programs, Python API."""

from __future__ import annotations

from .commands import command_pages
from .configuration import configuration_pages
from .notebook import notebook_page
from .other_programs import other_programs_page
from .python_api import api_page


def generated_pages() -> dict[str, str]:
    """Return the Markdown of each generated page by its path in the site's sources."""
    return {
        **command_pages(),
        **configuration_pages(),
        "reference/other-programs.md": other_programs_page(),
        "reference/python.md": api_page(),
        "notebook.md": notebook_page(),
    }
