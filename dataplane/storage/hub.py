"""Repositories on the Hugging Face Hub: hf://datasets/OWNER/NAME@COMMIT/PATH.

`huggingface_hub` reads them; HF_ENDPOINT names a different hub, HF_TOKEN holds the token. A URL
must name a commit: a branch may move, and the same command would read different bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ...console.errors import InputError

SCHEME = "hf://"
KINDS = {"datasets": "dataset", "spaces": "space"}
"""Kinds of repositories by a path's first component; without one it is a model's."""
COMMIT = re.compile(r"[0-9a-f]{40}")


def is_hub(url: str) -> bool:
    return url.startswith(SCHEME)


def check_pinned(url: str) -> None:
    """Raise if a URL names no commit; the hint has the commit that its revision stands for."""
    path = url.removeprefix(SCHEME)
    name, _, suffix = path.partition("@")
    if COMMIT.fullmatch(suffix.partition("/")[0]):
        return
    revision = _parse_revision(suffix)
    commit = next(_find_commits(name, revision or None), None)
    hint = f"write …@{commit}, the commit that it names now" if commit else "write …@COMMIT"
    problem = f"`{revision}` is no commit" if suffix else "no commit"
    kind = name.partition("/")[0]
    folder = f"{kind}/" if kind in KINDS else ""
    raise InputError(
        f"{url} must name a commit, as in {SCHEME}{folder}OWNER/NAME@COMMIT ({problem}): another "
        "revision may change",
        hint=hint if folder else f"{hint}; the URL of a dataset begins with {SCHEME}datasets/",
    )


def _parse_revision(suffix: str) -> str:
    """Return the revision that begins a URL's text after the @."""
    return "/".join(suffix.split("/")[: 3 if suffix.startswith("refs/") else 1])


def file_url(url: str, name: str) -> str:
    """Return the URL of the file `name` if the URL names a repository alone, else the URL."""
    if is_hub(url) and COMMIT.fullmatch(url.rstrip("/").rpartition("@")[2]):
        return f"{url.rstrip('/')}/{name}"
    return url


def content_hash(information: dict[str, Any]) -> str | None:
    """Return the hash of a file's content, from its attributes in a repository."""
    large = information.get("lfs")
    hash = large["sha256"] if large else information.get("blob_id")
    return None if hash is None else str(hash)


def read_arguments(fs: Any) -> dict[str, Any]:
    """Return arguments with which `cat_file` fetches a range and no more."""
    return {"cache_type": "none"} if "hf" in fs.protocol else {}


def _find_commits(name: str, revision: str | None) -> Iterator[str]:
    """Yield the commit that a repository's revision stands for, if the hub knows it."""
    from huggingface_hub import HfApi

    kind, _, path = name.partition("/")
    components = (path if kind in KINDS else name).split("/")
    for length in (2, 1):  # old repositories have no owner
        try:
            repository = HfApi().repo_info(
                "/".join(components[:length]),
                repo_type=KINDS.get(kind),
                revision=revision,
                timeout=10,
            )
        except Exception:  # the hub's, and those of its HTTP library, which changes by version
            continue
        if repository.sha:
            yield repository.sha
