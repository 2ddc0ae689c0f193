"""MkDocs' hook: adds the generated pages, and files of the repository that pages link to."""

from __future__ import annotations

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

LINK = re.compile(r"""(?<=\]\()(?P<target>[^)#\s:]+)|(?<=(?:src|set)=")(?P<source>[^"]+)""")


def on_files(files: Files, config: Any) -> Files:
    pages = generated_pages()
    pages |= {place: _from_root((ROOT / name).read_text()) for name, place in PAGES.items()}
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    for page in (ROOT / "docs").rglob("*.md"):
        for target in set(re.findall(r"\]\((?:\.\./)+([^)#\s]+)", page.read_text())):
            if target not in PAGES and (ROOT / target).is_file():
                place = f"repository/{target}"
                if files.get_file_from_path(place) is None:
                    files.append(File.generated(config, place, abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links that leave docs/ at their copies in the site."""
    if page.file.generated_by:
        return markdown

    def moved(found: re.Match[str]) -> str:
        above, target = found.groups()
        depth = "../" * (above.count("../") - 1)
        return f"]({depth}{PAGES.get(target, f'repository/{target}')}"

    return re.sub(
        r"\]\(((?:\.\./)+)([A-Z]+\.md|benchmarks/[^)#\s]+|configs/[^)#\s]+)", moved, markdown
    )


def _from_root(text: str) -> str:
    """Return a page of the root with the links that it needs in docs/."""

    def moved(found: re.Match[str]) -> str:
        target = found.group(0)
        return PAGES.get(target, target.removeprefix("docs/"))

    return LINK.sub(moved, text)
