"""The data plane: storage, datasets, the order of rows, and the loader."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .stream.stream import Stream

__all__ = ["Stream"]


def __getattr__(name: str) -> Any:
    """Import `Stream` when it is asked for: rooms of this folder import this file."""
    if name in __all__:
        from .stream.stream import Stream

        return Stream
    raise AttributeError(f"module {__name__} has no attribute {name}")
