"""README.md in a real Chromium, at the widths of GitHub's column and of a phone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import markdown  # tensorboard brings it
import pytest
from support.pages import chromium
from test_house import ROOT

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]

COLUMN = 838
"""Width of a README on GitHub, in pixels."""
SCREEN_AND_A_HALF = 1425
WIDEST = 600.0
"""Pixels of `SAMPLE` in Noto Sans, the widest of GitHub's fonts."""
SAMPLE = "Pretraining of language and genome models on data whose order is a function"
GITHUB = """
body { margin: 0; color-scheme: light dark }
article { max-width: 838px; margin: auto; font: 16px/1.5 -apple-system, BlinkMacSystemFont,
  "Segoe UI", "Noto Sans", Helvetica, Arial, sans-serif; overflow-wrap: break-word }
p, pre, table { margin: 0 0 16px }
h1, h2 { margin: 24px 0 16px; padding-bottom: .3em; border-bottom: 1px solid; line-height: 1.25 }
article > :first-child { margin-top: 0 } article > :last-child { margin-bottom: 0 }
h1 { font-size: 2em } h2 { font-size: 1.5em }
img { max-width: 100%; box-sizing: content-box }
table { display: block; width: max-content; max-width: 100%; overflow: auto;
  border-spacing: 0; border-collapse: collapse }
th, td { padding: 6px 13px; border: 1px solid }
th { font-weight: 600 }
pre, code { font-family: ui-monospace, Menlo, Consolas, "Liberation Mono", monospace }
pre { padding: 16px; overflow: auto; font-size: 85%; line-height: 1.45 }
pre code { font-size: 100% }
"""
"""The rules of GitHub's style that set heights and widths."""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Chromium]:
    chromium.install()
    folder = tmp_path_factory.mktemp("page")
    (folder / "docs").symlink_to(ROOT / "docs")
    html = markdown.markdown((ROOT / "README.md").read_text(), extensions=["tables", "fenced_code"])
    head = (
        '<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    )
    file: Path = folder / "README.html"
    file.write_text(f"{head}<style>{GITHUB}</style><article>{html}</article>")
    with chromium.Chromium() as browser:
        browser.open(file.as_uri())
        yield browser


def shown(page: chromium.Chromium, width: int, **device: bool) -> None:
    page.device(width, 950, **device)
    page.run("location.reload()")
    page.until("return [...document.images].every(image => image.naturalWidth)")


def test_the_front_page_fits_into_a_screen_and_a_half(page: chromium.Chromium) -> None:
    shown(page, COLUMN + 40)
    sample = (
        "const text = document.createElement('span'); text.textContent = arguments[0];"
        "document.querySelector('article').append(text);"
        "const width = text.getBoundingClientRect().width; text.remove(); return width"
    )
    if page.run(sample, SAMPLE) > WIDEST:
        pytest.skip("this machine has none of GitHub's fonts, but a wider one")
    height = page.run("return document.querySelector('article').getBoundingClientRect().height")
    assert height <= SCREEN_AND_A_HALF
    cut = (
        "return [...document.querySelectorAll('table, pre')]"
        ".filter(each => each.scrollWidth > each.clientWidth).length"
    )
    assert page.run(cut) == 0
    widths = "return [...document.images].map(image => image.clientWidth / image.naturalWidth)"
    assert min(page.run(widths)) == 1, "a picture that is made smaller cannot be read"


def test_a_phone_shows_the_picture_in_its_whole_width(page: chromium.Chromium) -> None:
    shown(page, 390, phone=True)
    assert page.run("return document.documentElement.scrollWidth") == 390
    assert min(page.run("return [...document.images].map(image => image.clientWidth)")) > 340
