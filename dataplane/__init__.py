"""The data plane: storage, datasets, the order of rows, and the loader."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .stream.hugging_face import to_datasets
    from .stream.stream import Stream

__all__ = ["Stream", "to_datasets"]


def __getattr__(name: str) -> Any:
    """Import the public names when they are asked for: rooms of this folder import this file."""
    if name == "Stream":
        from .stream.stream import Stream

        return Stream
    if name == "to_datasets":
        from .stream.hugging_face import to_datasets

        return to_datasets
    raise AttributeError(f"module {__name__} has no attribute {name}")
