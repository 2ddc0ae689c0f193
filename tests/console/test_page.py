"""Pages as HTML, read back by the standard library's parser."""

from __future__ import annotations

from html.parser import HTMLParser

from headrace.console.page import render_file, render_html, table


class Elements(HTMLParser):
    """Collects each element's tag, attributes and text; raises for one that is not closed."""

    VOID = ("meta", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[int] = []
        self.elements: list[tuple[str, str]] = []
        self.classes: list[str | None] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(len(self.elements))
        self.elements.append((tag, ""))
        self.classes.append(dict(attrs).get("class"))

    def handle_endtag(self, tag: str) -> None:
        assert self.elements[self.open.pop()][0] == tag

    def handle_data(self, data: str) -> None:
        for number in self.open:
            tag, text = self.elements[number]
            self.elements[number] = (tag, text + data)

    def texts(self, tag: str) -> list[str]:
        return [text for name, text in self.elements if name == tag]


HOSTILE = "a | b <script>alert(1)</script> & `x"


def test_a_page_as_html_has_its_texts() -> None:
    rows = [("`code`", "1,234"), (HOSTILE, "5")]
    block = ["````", "{% if <b> %}", "", "# no heading | no cell", "````"]
    page = "\n".join(
        [
            "# Dataset web",
            "",
            *table(("kind", "count"), rows),
            "",
            "First.  ",
            "Second.",
            *block,
            "",
        ]
    )
    result = Elements(render_html(page))
    assert result.texts("title") == result.texts("h1") == ["Dataset web"]
    assert result.texts("th") == ["kind", "count"]
    assert result.texts("td") == ["code", "1,234", HOSTILE, "5"]
    numbers = [
        text for (_, text), kind in zip(result.elements, result.classes, strict=True) if kind
    ]
    assert numbers == ["count", "1,234", "5"]
    assert result.texts("code") == ["code"]
    assert result.texts("p") == ["First.\nSecond."]
    assert len(result.texts("br")) == 1
    assert result.texts("pre") == ["\n".join(block[1:-1])]
    assert not result.texts("script")


def test_the_ending_decides() -> None:
    page = "# A\n\n" + "\n".join(table(("", ""), [("name", "value")])) + "\n"
    assert render_file(page, "s3://b/card.md") == page.encode()
    for out in ("card.html", "CARD.HTML"):
        result = Elements(render_file(page, out).decode())
        assert result.texts("td") == ["name", "value"]
        assert not result.texts("th")
