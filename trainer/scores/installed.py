"""The check for lm-evaluation-harness, an extra."""

from __future__ import annotations

from importlib.util import find_spec

from ...console.errors import MissingError


def check_installed(what: str) -> None:
    """Raise if the harness is not installed, which `what` needs."""
    if find_spec("lm_eval") is None:
        raise MissingError(
            f"{what} runs tasks of lm-evaluation-harness, and lm_eval is not installed",
            hint="pip install 'headrace[eval]'",
        )
