"""The documentation site, built with mkdocs and opened from a disk in a real Chromium."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from support.pages import chromium
from test_house import ROOT

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]


@pytest.mark.parametrize("page", ["index.html", "reference/run-file.html"])
def test_search_works_without_a_server(page: str, tmp_path: Path) -> None:
    pytest.importorskip("material", reason="`make docs` installs it")
    chromium.install()
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", tmp_path],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        check=True,
    )
    with chromium.Chromium() as browser:
        browser.device(1440, 950)
        browser.open((tmp_path / page).as_uri())
        browser.click(".md-search__input")
        browser.run(
            "const input = document.querySelector('.md-search__input'); input.value = 'ledger';"
            "input.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true}))"
        )
        links = browser.until(
            "const found = [...document.querySelectorAll('.md-search-result__link')];"
            "return found.length && found.map(link => link.href)"
        )
        assert all(Path(urlsplit(link).path).is_file() for link in links)
        assert not browser.errors()
        assert not [url for url in browser.requests() if url.startswith("http")]
