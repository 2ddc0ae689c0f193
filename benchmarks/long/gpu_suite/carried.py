"""Programs that another machine compiled, for a Triton of any version: a `sitecustomize`.

Triton names a program's entry in its cache by a digest of itself, so that a version finds the
programs of another never. Here a program of headrace is named by what decides its binary: its
source, types, constants, attributes and options. `install` copies this file into the environment of
the device, where Python imports it at its start; there it imports the standard library alone.
"""

from __future__ import annotations

import hashlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

CACHE = "triton.runtime.cache"
"""Module of Triton that names the entries."""
PACKAGE = "headrace."
OPTIONS = ("num_warps", "num_ctas", "num_stages", "maxnreg")
"""Options that headrace's launches set."""


def name_program(source: Any, options: Any) -> str:
    """Return what decides a program's binary, as text: `source` is Triton's ASTSource."""
    function = source.fn
    attributes = {
        str(position): sorted(map(str, values))
        for position, values in source.attrs.items()
        if values
    }
    parts = (
        f"{function.fn.__module__}.{function.fn.__name__}",
        hashlib.sha256(function.src.encode()).hexdigest(),
        sorted(source.signature.items()),
        sorted((str(position), repr(value)) for position, value in source.constants.items()),
        sorted(attributes.items()),
        [getattr(options, option) for option in OPTIONS],
    )
    return repr(parts)


def name_entry(text: str) -> str:
    """Return the name of a cache's folder, as Triton makes it from a key."""
    import base64

    digest = hashlib.sha256(text.encode()).digest()
    return base64.b32encode(digest).decode().rstrip("=")


def carry(module: ModuleType) -> None:
    """Let a loaded `triton.runtime.cache` name headrace's programs by `name_program`."""
    usual = module.get_cache_key  # type: ignore[attr-defined]

    def get_cache_key(src: Any, backend: Any, backend_options: Any, env_vars: Any) -> str:
        function = getattr(getattr(src, "fn", None), "fn", None)
        if not getattr(function, "__module__", "").startswith(PACKAGE):
            return str(usual(src, backend, backend_options, env_vars))
        return name_program(src, backend_options)

    module.get_cache_key = get_cache_key  # type: ignore[attr-defined]


class Finder(importlib.abc.MetaPathFinder):
    """Changes Triton's module when it is imported, before others import from it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != CACHE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                carry(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, Finder())
