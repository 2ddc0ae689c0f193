"""The pages: links resolve, and the generated reference has every command, key and public name."""

import dataclasses
import re
from functools import partial
from importlib import import_module
from pathlib import Path

import click
import pytest
import yaml
from packaging.version import Version
from test_house import ROOT, configurations

from docs.generate import generated_pages, peers, run_notebook
from docs.generate.configuration import ROOTS, sections
from docs.generate.explanations import FIGURES
from docs.generate.markdown import definitions, escaped
from docs.generate.other_programs import other_arguments
from docs.generate.python_api import MODULES, public_names
from headrace.console.headrace import main


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return generated_pages()


def headings(text: str) -> set[str]:
    """Return the anchors of a page, as GitHub and MkDocs make them."""
    outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", outside, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def broken_links(page: Path) -> list[str]:
    """Return the relative links and pictures of a page that lead to no file or no heading."""
    text = page.read_text()
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)
    broken = []
    for target in targets:
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        if not file.exists() or (anchor and anchor not in headings(file.read_text())):
            broken.append(target)
    return broken


def test_links_between_pages_resolve() -> None:
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    assert len(files) > 15
    assert not {file.name: links for file in files if (links := broken_links(file))}


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A title\n[a](#a-title) [b](#no) [c](page.md#a-title) [d](gone.md)\n"
        '<img src="gone.png">\n```sh\n# no heading\n```\n[e](#no-heading) [f](https://a.example/)\n'
    )
    assert broken_links(page) == ["#no", "gone.md", "#no-heading", "gone.png"]


def test_each_cell_beside_others_has_its_proof() -> None:
    proofs = []
    for page, not_found in (("README.md", "–"), ("docs/beside-others.md", "not found")):
        text = (ROOT / page).read_text()
        rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
        cells = [cell.strip() for row in rows[2:] for cell in row]
        assert len(cells) == 8 * 7
        assert not [
            cell for cell in cells if "](" not in cell and "][" not in cell and cell != not_found
        ]
        proofs.append(dict(re.findall(r"^\[([\w-]+)\]: (https://\S+)$", text, re.MULTILINE)))
        assert set(proofs[-1]) == set(re.findall(r"\]\[([\w-]+)\]", text))
    short, long = proofs
    assert short == long


def test_peers_are_compared_with_the_newest_release_that_a_new_python_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index hides a release from the Pythons that it does not support, and pip pre-releases."""
    folder = tmp_path / "peer"
    folder.mkdir()
    releases = {"1.0": ">=3.8", "2.0": ">=3.99", "2.1.dev1": ">=3.99", "3.0": ">=3.100"}
    links = [
        f'<a href="peer-{version}-py3-none-any.whl" data-requires-python="{python}">'
        f"peer-{version}-py3-none-any.whl</a>".replace(">=", "&gt;=", 1)
        for version, python in releases.items()
    ]
    (folder / "index.html").write_text("<!DOCTYPE html><html><body>" + "".join(links))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", tmp_path.as_uri())
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    newest = partial(peers.newest_release, pythons=["3.99"])
    assert newest("peer") == Version("2.0")
    assert newest("peer", pre=True) == Version("2.1.dev1")
    assert newest("stranger") is None


@pytest.mark.parametrize("page", ["README.md", "docs/beside-others.md"])
def test_the_releases_beside_others_are_those_of_their_links(page: str) -> None:
    text = (ROOT / page).read_text().replace("&nbsp;", " ").replace("&#8209;", "-")
    links = dict(re.findall(r"^\[([\w-]+)\]: (https://\S+)$", text, re.MULTILINE))
    releases = re.findall(r"\[[\w -]+ (\d[\d.]*)(?:dev)?\]\[([\w-]+)\]", text)
    assert len(releases) > 5
    assert not [name for release, name in releases if f"/{release}" not in links[name]]


def test_the_changelog_has_the_form_of_keep_a_changelog() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    versions = text.split("\n## ")[1:]
    assert versions[0].startswith("[Unreleased]\n")
    for version in versions:
        for section in version.split("\n### ")[1:]:
            kind, _, items = section.partition("\n")
            assert kind in kinds
            assert not [
                line for line in items.splitlines() if line and line[:2] not in ("- ", "  ")
            ]
    assert max(map(len, text.splitlines())) < 140


def test_pictures_are_small_and_have_both_forms() -> None:
    pictures = list((ROOT / "docs" / "pictures").iterdir())
    assert all(picture.stat().st_size < 300_000 for picture in pictures)
    single = [picture for picture in pictures if not picture.stem.endswith(("-light", "-dark"))]
    assert all("prefers-color-scheme: dark" in picture.read_text() for picture in single)
    names = {picture.stem.rpartition("-")[::2] for picture in pictures if picture not in single}
    assert names == {("report", "light"), ("report", "dark")}


def test_every_picture_is_on_a_page() -> None:
    pages = "".join(page.read_text() for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
    pictures = [picture.name for picture in (ROOT / "docs" / "pictures").iterdir()]
    assert not [name for name in pictures if f"pictures/{name}" not in pages]


def test_figures_are_those_that_the_code_draws() -> None:
    for name, draw in FIGURES.items():
        file = ROOT / "docs" / "pictures" / f"{name}.svg"
        assert file.read_text() == draw(), f"python -m docs.generate.explanations renews {file}"


def test_the_site_asks_no_other_host_for_scripts() -> None:
    """The plugin `offline` adds a URL of the web if no script is named that replaces it."""
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    scripts = site["extra"]["polyfills"]
    assert "offline" in site["plugins"] and any("iframe-worker" in name for name in scripts)
    assert all((ROOT / "docs" / name).is_file() for name in scripts)


def test_the_site_lists_every_page(pages: dict[str, str]) -> None:
    listed = str(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    written = [str(file.relative_to(ROOT / "docs")) for file in (ROOT / "docs").rglob("*.md")]
    assert not [page for page in [*written, *pages] if f"'{page}'" not in listed]


def test_the_reference_has_every_command_and_option(pages: dict[str, str]) -> None:
    count = 0
    commands: list[tuple[str, click.Command]] = [("headrace", main)]
    while commands:
        name, command = commands.pop()
        program = next((part for part in name.split()[1:2] if f"reference/{part}.md" in pages), "")
        title = name.removeprefix("headrace ") if program else name
        _, result, section = pages[f"reference/{program or 'headrace'}.md"].partition(
            f"\n## {title}\n"
        )
        assert result, name
        section = section.partition("\n## ")[0]
        options = [
            param
            for param in command.params
            if isinstance(param, click.Option) and not param.hidden
        ]
        missing = [option.opts[0] for option in options if f"`{option.opts[0]}" not in section]
        assert not missing, (name, missing)
        count += 1
        if isinstance(command, click.Group):
            with click.Context(command) as context:
                for below in command.list_commands(context):
                    child = command.get_command(context, below)
                    assert child is not None
                    commands.append((f"{name} {below}", child))
    assert count > 30


def test_the_reference_has_every_key(pages: dict[str, str]) -> None:
    text = "\n".join(pages[f"reference/{name}-file.md"] for name in ROOTS)
    result = {section for root, _, _ in ROOTS.values() for section in sections(root)}
    # Base classes hold fields for their subclasses; no file has such a section itself.
    bases = {base for kind in result for base in kind.__mro__[1:]}
    assert set(configurations()) <= result | bases
    for kind in result:
        for field in dataclasses.fields(kind):
            assert not field.init or f"`{field.name}`: `" in text, (kind, field.name)


def test_arguments_of_other_programs_lead_to_keys() -> None:
    names = {
        field.name
        for root, _, _ in ROOTS.values()
        for section in sections(root)
        for field in dataclasses.fields(section)
    }
    places = [place for places in other_arguments().values() for place in places.values()]
    keys = [
        key for place in places for key in re.findall(r"(?:run|mixture|model): ([a-z_.*]+)", place)
    ]
    assert len(keys) > 30
    assert not [key for key in keys if set(key.split(".")) - names - {"*"}]


@pytest.mark.parametrize("name", MODULES)
def test_the_reference_has_every_public_name(name: str, pages: dict[str, str]) -> None:
    _, result, section = pages["reference/python.md"].partition(f": `{name}`\n")
    names = public_names(import_module(name))
    assert result and names
    assert not [item for item in names if f"\n### `{item}`\n" not in section]


def test_docstrings_are_not_read_as_html() -> None:
    assert escaped("a < b, `x<T>`, <NAME> *") == "a &lt; b, `x<T>`, &lt;NAME> \\*"
    assert definitions([("`a`", "x\n\ny"), ("`b`", "")]) == "`a`\n:   x\n\n    y\n\n`b`\n:   –"


def test_cells_of_a_notebook_run_in_one_process() -> None:
    cells = ["x = 20\n!echo shell\nprint('said')\nx", "x + 1", "[x for _ in range(2)]"]
    assert run_notebook.run_cells(cells) == ["shell\nsaid\n20\n", "21\n", "[20, 20]\n"]
    with pytest.raises(SystemExit, match="no_such_name"):
        run_notebook.run_cells(["no_such_name"])
