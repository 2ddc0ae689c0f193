"""The releases that the table `Beside others` names, beside the newest of the index.

    python -m docs.generate.peers

It asks pip, and so the index that pip is configured with, for Python 3.12 and later: an index shows
a Python only the releases that support it. Nothing else here asks: `make pictures` uses no network.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from packaging.version import Version

README = Path(__file__).parents[2] / "README.md"
RELEASE = re.compile(r"^\[[\w-]+\]: https://pypi\.org/project/([\w-]+)/([^/\s]+)/$", re.MULTILINE)
PYTHONS = ("3.12", "3.13", "3.14")


def main() -> None:
    for name, release in table_releases(README.read_text()).items():
        newest = newest_release(name, pre=Version(release).is_prerelease)
        mark = "" if newest == Version(release) else "   the table is older"
        print(f"{name:20} {release:24} {newest or 'not in the index'}{mark}")


def table_releases(page: str) -> dict[str, str]:
    """Return the release of each package that the page links to."""
    return dict(RELEASE.findall(page))


def newest_release(
    name: str, *, pre: bool = False, pythons: Sequence[str] = PYTHONS
) -> Version | None:
    """Return the newest release that supports one of `pythons`; pip knows the index."""
    command = [sys.executable, "-m", "pip", "index", "versions", name, *(["--pre"] if pre else [])]
    versions = []
    for python in pythons:
        output = subprocess.run(
            [*command, "--python-version", python], capture_output=True, text=True
        ).stdout
        if match := re.match(rf"{re.escape(name)} \((\S+)\)", output):
            versions.append(Version(match[1]))
    return max(versions, default=None)


if __name__ == "__main__":
    main()
