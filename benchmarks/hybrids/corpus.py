"""Write a corpus from Debian's documentation and source packages: text.jsonl and code.jsonl.

    python -m benchmarks.hybrids.corpus FOLDER

Downloads PACKAGES with `apt-get download`, unpacks them with `dpkg -x` (nothing is installed), and
writes a document for each file: manuals and HTML pages without their tags, and programs as they
are. Run it again to continue; packages that lie in the folder are not downloaded again.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

PACKAGES = (
    "bash-doc",
    "debian-handbook",
    "debian-policy",
    "debian-reference-en",
    "developers-reference",
    "erlang-doc",
    "fortunes",
    "git-doc",
    "libpython3.11-stdlib",
    "linux-doc-6.1",
    "manpages",
    "manpages-dev",
    "perl-doc",
    "perl-modules-5.36",
    "postgresql-doc-15",
    "python-django-doc",
    "python3-django",
    "python3-sympy",
    "python3.11-doc",
    "sqlite3-doc",
    "vim-doc",
)
SKIPPED = ("/translations/", "/locale/", "/genindex", "/searchindex", "/copyright", "/changelog")
"""Parts of paths: other languages, indexes, and files that many packages repeat."""
CODE = (".py", ".pm", ".pl")
PAGES = (".html", ".htm")
PLAIN = (".txt", ".pod", ".rst", *(f".{section}" for section in range(1, 9)))
BLOCKS = {"p", "div", "li", "tr", "br", "pre", "h1", "h2", "h3", "h4", "h5", "dt", "dd", "table"}
HIDDEN = {"script", "style", "nav", "head", "footer"}
MIN_CHARACTERS = 200


class _Text(HTMLParser):
    """Collects a page's text, a line for each block."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []
        self.hidden_depth = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.hidden_depth += tag in HIDDEN
        if tag in BLOCKS:
            self.pieces.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self.hidden_depth = max(0, self.hidden_depth - (tag in HIDDEN))
        if tag in BLOCKS:
            self.pieces.append("\n")

    def handle_data(self, data: str) -> None:
        if not self.hidden_depth:
            self.pieces.append(data)


def strip_tags(page: str) -> str:
    parser = _Text()
    parser.feed(page)
    lines = (line.rstrip() for line in "".join(parser.pieces).split("\n"))
    return "\n".join(line for line in lines if line)


def download(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield each package's name and unpacked folder."""
    packages, unpacked = folder / "packages", folder / "unpacked"
    packages.mkdir(parents=True, exist_ok=True)
    unpacked.mkdir(exist_ok=True)
    for name in PACKAGES:
        if not list(packages.glob(f"{name}_*.deb")):
            subprocess.run(["apt-get", "download", "-qq", name], cwd=packages, check=True)
        (archive,) = packages.glob(f"{name}_*.deb")
        if not (unpacked / name).exists():
            subprocess.run(["dpkg", "-x", archive, unpacked / name], check=True)
        yield name, unpacked / name


def read_document(file: Path) -> tuple[str, str] | None:
    """Return the kind of a file (text, code) and its text; None for other files."""
    name = file.name.removesuffix(".gz")
    suffix = Path(name).suffix
    fortune = "/games/fortunes/" in str(file) and not suffix
    if not (suffix in (*CODE, *PAGES, *PLAIN) or fortune):
        return None
    data = file.read_bytes()
    text = (gzip.decompress(data) if file.suffix == ".gz" else data).decode(errors="replace")
    if suffix in PAGES:
        text = strip_tags(text)
    return ("code" if suffix in CODE else "text"), text


def is_skipped(path: str) -> bool:
    handbook = "/debian-handbook/" in path and "/en-US/" not in path
    return handbook or any(part in path for part in SKIPPED)


def main(folder: Path) -> None:
    counts = {"text": [0, 0], "code": [0, 0]}
    with (
        (folder / "text.jsonl").open("w") as text_file,
        (folder / "code.jsonl").open("w") as code_file,
    ):
        files = {"text": text_file, "code": code_file}
        for name, root in download(folder):
            seen: set[str] = set()
            for file in sorted(root.rglob("*")):
                path = str(file.relative_to(root))
                if not file.is_file() or file.is_symlink() or is_skipped(f"/{path}"):
                    continue
                document = read_document(file)
                if document is None or len(document[1]) < MIN_CHARACTERS or document[1] in seen:
                    continue
                kind, text = document
                seen.add(text)
                json.dump({"id": f"{name}:{path}", "text": text}, files[kind])
                files[kind].write("\n")
                counts[kind][0] += 1
                counts[kind][1] += len(text.encode())
            print(name, counts, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
