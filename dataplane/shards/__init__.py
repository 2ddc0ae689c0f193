"""Shard formats by name.

To add a format, write a module beside this one with a subclass of `ShardFormat` (format.py) and an
instance of it named FORMAT, and add a line to FORMATS.

This module imports no format: command-line help lists their names.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from ...console.errors import InputError

if TYPE_CHECKING:
    from .format import ShardFormat


class FormatEntry(NamedTuple):
    """A line in FORMATS."""

    module: str
    writable: bool = True
    """True if `tokenize build` may write the format; False if it is only indexed and read."""


FORMATS = {
    "mds": FormatEntry("headrace.dataplane.shards.mds"),
    "megatron": FormatEntry("headrace.dataplane.shards.megatron", writable=False),
    "arrow": FormatEntry("headrace.dataplane.shards.arrow"),
}
"""`tokenize index` asks the formats in this order whether a folder holds their files. Arrow is
last: every dataset has Arrow files, its shard tables."""


def shard_format(name: str) -> ShardFormat:
    """Load the format called `name`."""
    if name not in FORMATS:
        raise InputError(
            f"there is no shard format `{name}`", hint=f"known formats: {', '.join(FORMATS)}"
        )
    format: ShardFormat = import_module(FORMATS[name].module).FORMAT
    return format


def writable_formats() -> list[str]:
    """Return the formats that `tokenize build` may write, in alphabetical order."""
    return sorted(name for name, entry in FORMATS.items() if entry.writable)
