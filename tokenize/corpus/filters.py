"""Filters: a user's function decides which documents stay.

    def keep(text, fields, *, shortest=100):
        return None if len(text) >= shortest else "too short"

`None` and `True` keep a document; `False` and a reason (a string) drop it. A build's identity
includes the hash of the module's source, and the settings.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ...console.errors import InputError, MisuseError

Keep = Callable[..., Any]

MAX_REASONS = 100
"""Distinct reasons in one task: the manifest stores all of them."""
MAX_REASON_LENGTH = 100
UNNAMED = "no reason given"
FAULTS = (Exception, SystemExit)
"""What a user's module may raise: its sys.exit() must not end a worker silently."""


@dataclass(frozen=True, kw_only=True)
class Filter:
    """A build's filter; every worker imports its module."""

    name: str
    """`module:function` or `./rules.py:function`."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for the function."""
    source: str
    """The module source's sha256."""

    @staticmethod
    def load(name: str, settings: Mapping[str, Any]) -> Filter:
        """Import a filter; raise MisuseError if that fails or it does not take the settings."""
        function, source = _import_function(name)
        try:
            inspect.signature(function).bind("", {}, **settings)
        except TypeError as error:
            raise MisuseError(
                f"the filter {name} cannot be called with (text, fields, settings): {error}",
                hint="write it as def NAME(text, fields, *, SETTING=…), and give each setting as "
                "--filter-set SETTING=VALUE",
            ) from None
        return Filter(name=name, settings=dict(settings), source=source)

    @property
    def identity(self) -> dict[str, Any]:
        """Return everything that decides which documents stay; a file's folder does not."""
        module, _, function = self.name.rpartition(":")
        name = Path(module).name if module.endswith(".py") else module
        return {"name": f"{name}:{function}", "source": self.source, "settings": self.settings}

    @cached_property
    def function(self) -> Keep:
        function, source = _import_function(self.name)
        if source != self.source:
            raise InputError(
                f"the filter {self.name} has another source here than where the build started",
                hint="give every node the same module, and do not change it during a build",
            )
        return function

    def reason(self, text: str, fields: dict[str, Any], where: Callable[[], str]) -> str | None:
        """Return why a document is dropped; None keeps it. `where` names the document."""
        try:
            verdict = self.function(text, fields, **self.settings)
        except FAULTS as error:
            raise InputError(
                f"the filter {self.name} raised {type(error).__name__}: {error}",
                where=where(),
                hint="correct the function for this document",
            ) from error
        if verdict is None or verdict is True:
            return None
        if verdict is False:
            return UNNAMED
        if not isinstance(verdict, str) or not 0 < len(verdict) <= MAX_REASON_LENGTH:
            raise InputError(
                f"the filter {self.name} returned {verdict!r:.100}",
                where=where(),
                hint="return None or True to keep a document, and False or a short reason to drop "
                "it",
            )
        return verdict


def _import_function(name: str) -> tuple[Keep, str]:
    """Import a function; return it and its module source's sha256."""
    module_name, _, function = name.rpartition(":")
    hint = "write --filter module:function, or --filter path.py:function"
    if not module_name or not function.isidentifier():
        raise MisuseError(f"--filter {name} names no function", hint=hint)
    try:
        module = _import_module(module_name)
        source = Path(inspect.getfile(module)).read_bytes()
    except FAULTS as error:
        raise MisuseError(
            f"the filter {name} cannot be imported: {type(error).__name__}: {error}", hint=hint
        ) from None
    attribute = getattr(module, function, None)
    if not callable(attribute):
        raise MisuseError(f"{module_name} has no function {function}", hint=hint)
    return attribute, hashlib.sha256(source).hexdigest()


def _import_module(module_name: str) -> Any:
    if not module_name.endswith(".py"):
        working_folder = str(Path.cwd())
        sys.path.insert(0, working_folder)  # finds a local module, as `python -m` would
        try:
            return importlib.import_module(module_name)
        finally:
            with suppress(ValueError):
                sys.path.remove(working_folder)
    spec = importlib.util.spec_from_file_location(Path(module_name).stem, module_name)
    if spec is None or spec.loader is None or not Path(module_name).is_file():
        raise FileNotFoundError(f"no file {module_name}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
