"""Digest of this package's source files: two checkouts of a version may differ."""

from __future__ import annotations

import hashlib
from pathlib import Path

FOLDERS = (
    *("configs", "console", "dataplane", "mixtures", "models"),
    *("planner", "reports", "tokenize", "trainer"),
)
"""Folders of the package. (A checkout also holds tests, environments and runs.)"""


def digest(root: Path = Path(__file__).parents[1]) -> str:
    """Return a digest over the names and contents of all Python and YAML files."""
    files = [root / "__init__.py"]
    for folder in FOLDERS:
        files += [path for path in (root / folder).rglob("*") if path.suffix in (".py", ".yaml")]
    result = hashlib.blake2b(digest_size=8)
    for path in sorted(files):
        content = path.read_bytes()
        result.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode())
        result.update(content)
    return result.hexdigest()
