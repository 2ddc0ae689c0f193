"""MkDocs' hook: adds the generated pages, and files of the repository that pages link to."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from docs.generate import generated_pages

ROOT = Path(__file__).parents[2]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
"""Pages of the repository's root, by their place in the site."""

LINK = re.compile(r"""(?<=\]\()[^)#\s:]+|(?<=src=")[^":]+|(?<=srcset=")[^":]+""")
"""Relative targets of links and pictures, without their anchors."""


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages, the pages of the root, and the files that pages link to."""
    pages = generated_pages()
    pages |= {place: moved_links(ROOT / name, place) for name, place in PAGES.items()}
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    texts = [*(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in PAGES)]
    linked = {
        file for page in texts for file in map(page.parent.joinpath, LINK.findall(page.read_text()))
    }
    for file in sorted({file.resolve() for file in linked if file.is_file()}):
        place = in_site(file)
        if files.get_file_from_path(place) is None:
            files.append(File.generated(config, place, abs_src_path=str(file)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links that leave docs/ at their copies in the site."""
    if page.file.generated_by:
        return markdown
    return moved_links(ROOT / "docs" / page.file.src_uri, page.file.src_uri)


def in_site(file: Path) -> str:
    """Return the place in the site of a file of the repository."""
    name = file.relative_to(ROOT).as_posix()
    return PAGES.get(name) or (
        name.removeprefix("docs/") if name.startswith("docs/") else f"repository/{name}"
    )


def moved_links(page: Path, place: str) -> str:
    """Return a page with the links that it needs at its place in the site."""

    def moved(match: re.Match[str]) -> str:
        file = (page.parent / match.group()).resolve()
        if not file.exists():
            return match.group()
        return posixpath.relpath(in_site(file), posixpath.dirname(place) or ".")

    return LINK.sub(moved, page.read_text())
