"""A function of the user's that decides which documents stay.

    def keep(text, fields, *, shortest=100):
        return None if len(text) >= shortest else "too short"

`None` and `True` keep a document, `False` and a reason (a text) drop it. The hash of the module's
source and the settings are part of what a build is.
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

MOST_REASONS = 100
"""Different reasons of a filter in one task: the manifest stores each of them."""
LONGEST_REASON = 100
UNNAMED = "no reason given"
FAULTS = (Exception, SystemExit)
"""What a module of the user's may raise: sys.exit() in it must not end a worker without a word."""


@dataclass(frozen=True, kw_only=True)
class Filter:
    """A filter of a build; each worker imports its module."""

    name: str
    """`module:function` or `./rules.py:function`."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the function."""
    source: str
    """sha256 of the module's source."""

    @staticmethod
    def of(name: str, settings: Mapping[str, Any]) -> Filter:
        """Return a filter; raise if it cannot be imported or does not take the settings."""
        function, source = _imported(name)
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
        """Return what decides the documents that stay. A file's folder does not."""
        module, _, function = self.name.rpartition(":")
        name = Path(module).name if module.endswith(".py") else module
        return {"name": f"{name}:{function}", "source": self.source, "settings": self.settings}

    @cached_property
    def function(self) -> Keep:
        function, source = _imported(self.name)
        if source != self.source:
            raise InputError(
                f"the filter {self.name} has another source here than where the build started",
                hint="give every node the same module, and do not change it during a build",
            )
        return function

    def reason(self, text: str, fields: dict[str, Any], where: Callable[[], str]) -> str | None:
        """Return why a document is dropped; None keeps it. `where` names the document."""
        try:
            answer = self.function(text, fields, **self.settings)
        except FAULTS as error:
            raise InputError(
                f"the filter {self.name} raised {type(error).__name__}: {error}",
                where=where(),
                hint="correct the function for this document",
            ) from error
        if answer is None or answer is True:
            return None
        if answer is False:
            return UNNAMED
        if not isinstance(answer, str) or not 0 < len(answer) <= LONGEST_REASON:
            raise InputError(
                f"the filter {self.name} returned {answer!r:.100}",
                where=where(),
                hint="return None or True to keep a document, and False or a short reason to drop "
                "it",
            )
        return answer


def _imported(name: str) -> tuple[Keep, str]:
    """Import a function; return it and the sha256 of its module's source."""
    place, _, function = name.rpartition(":")
    hint = "write --filter module:function, or --filter path.py:function"
    if not place or not function.isidentifier():
        raise MisuseError(f"--filter {name} names no function", hint=hint)
    try:
        module = _module(place)
        source = Path(inspect.getfile(module)).read_bytes()
    except FAULTS as error:
        raise MisuseError(
            f"the filter {name} cannot be imported: {type(error).__name__}: {error}", hint=hint
        ) from None
    found = getattr(module, function, None)
    if not callable(found):
        raise MisuseError(f"{place} has no function {function}", hint=hint)
    return found, hashlib.sha256(source).hexdigest()


def _module(place: str) -> Any:
    if not place.endswith(".py"):
        here = str(Path.cwd())
        sys.path.insert(0, here)  # a module beside the corpus, as `python -m` would find it
        try:
            return importlib.import_module(place)
        finally:
            with suppress(ValueError):
                sys.path.remove(here)
    spec = importlib.util.spec_from_file_location(Path(place).stem, place)
    if spec is None or spec.loader is None or not Path(place).is_file():
        raise FileNotFoundError(f"no file {place}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
