"""Rules of the repository: packaging, imports between folders, fast help, documented options."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
import typing
import zipfile
from pathlib import Path

import pytest
from support.code.import_graph import imports

ROOT = Path(__file__).parents[1]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]

MAY_IMPORT = {
    "configs": set(),
    "console": set(),
    "dataplane": {"console"},
    "models": {"console", "configs"},
    "mixtures": {"dataplane", "console", "configs"},
    "tokenize": {"dataplane", "console", "configs"},
    "trainer": {"mixtures", "models", "dataplane", "console", "configs"},
    "planner": {"trainer", "mixtures", "models", "dataplane", "console", "configs"},
    "reports": {"trainer", "mixtures", "models", "dataplane", "console", "configs"},
}
"""Folders that each folder may import: planner and reports → trainer → mixtures → dataplane,
tokenize → dataplane, trainer → models; all may import console. console/commands.py alone names
modules of every folder: strings that it imports when a command is called."""

LONG_FILE = 400


def files_of(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


ALL_FILES = [ROOT / "__init__.py", *(file for room in MAY_IMPORT for file in files_of(room))]


def run_python(code: str, *, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True)


# Packaging


def test_every_folder_is_in_the_table() -> None:
    elsewhere = {"tests", "benchmarks", "docs", "build", "dist", "runs", "data"}
    rooms = {
        folder.name
        for folder in ROOT.iterdir()
        if folder.is_dir()
        and folder.name not in elsewhere
        and not folder.name.startswith(".")
        and any(folder.rglob("*.py"))
    }
    assert rooms == set(MAY_IMPORT)


def test_the_root_holds_no_module() -> None:
    """The wheel would contain it, outside the package headrace."""
    assert [file.name for file in ROOT.glob("*.py")] == ["__init__.py"]


def test_every_folder_with_code_is_a_listed_package() -> None:
    folders = {file.parent.relative_to(ROOT) for file in ALL_FILES}
    assert {".".join(["headrace", *folder.parts]) for folder in folders} == set(
        SETUPTOOLS["packages"]
    )


def test_every_folder_but_tokenize_is_a_package() -> None:
    """With an __init__.py, tokenize/ would shadow the standard library's tokenize in the root."""
    without = {file.parent for file in ALL_FILES if not (file.parent / "__init__.py").exists()}
    assert without == {ROOT / "tokenize"}


def test_the_standard_tokenize_wins_in_the_root() -> None:
    result = run_python("import tokenize; print(tokenize.__file__)")
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip()) == Path(inspect.__file__).with_name("tokenize.py")


def test_a_shadowed_tokenize_is_detected(tmp_path: Path) -> None:
    (tmp_path / "tokenize").mkdir()
    (tmp_path / "tokenize" / "__init__.py").touch()
    result = run_python("import tokenize; print(tokenize.__file__)", cwd=tmp_path)
    assert result.stdout.strip() == str(tmp_path / "tokenize" / "__init__.py")


def test_the_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    source = tmp_path / "source"
    hidden = shutil.ignore_patterns("__pycache__", "*.egg-info")
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "__init__.py", "py.typed"):
        shutil.copy(ROOT / name, source)
    for room in MAY_IMPORT:
        shutil.copytree(ROOT / room, source / room, ignore=hidden)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path)]
    done = subprocess.run([*build, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        [entry] = [name for name in names if name.endswith("entry_points.txt")]
        commands = re.findall(r"^(\w+) = ", archive.read(entry).decode(), re.MULTILINE)
    packaged = {name for name in names if ".dist-info/" not in name}
    shipped = [*ALL_FILES, ROOT / "py.typed", *(ROOT / "configs").rglob("*.yaml")]
    shipped += (ROOT / "reports/board/static").iterdir()
    shipped += (ROOT / "tokenize/chat").glob("*.jinja")
    assert packaged == {f"headrace/{file.relative_to(ROOT)}" for file in shipped}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert set(commands) == {"tokenize", "mixtures", "trainer", "headrace"}


# Imports between folders


def violations(text: str, package: tuple[str, ...]) -> list[str]:
    room = package[0] if package else ""
    allowed = MAY_IMPORT.get(room, set()) | {room}
    return [
        f"line {line}: {target}"
        for line, target in imports(text, package)
        if target.split(".")[0] not in allowed | {"__version__"}
    ]


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_imports_point_downwards(room: str) -> None:
    upward = {}
    for file in files_of(room):
        package = file.parent.relative_to(ROOT).parts
        if wrong := violations(file.read_text(), package):
            upward[str(file.relative_to(ROOT))] = wrong
    assert not upward


@pytest.mark.parametrize(
    ("package", "line"),
    [
        (("models",), "from ..dataplane.plan import Plan"),
        (("models",), "from .. import dataplane"),
        (("models", "operators"), "from ...trainer import loop"),
        (("dataplane", "shards"), "from ...tokenize.build import build"),
        (("console",), "from ..models.config import ModelConfig"),
        (("mixtures",), "def late():\n    from ..trainer import run"),
        (("trainer",), "from headrace.models.model.model import Model"),
        (("trainer",), "import headrace.models"),
        (("trainer",), "from ..tokenize.build import build"),
        (("tokenize",), "WORKER = 'headrace.trainer.launch.rank'"),
    ],
)
def test_upward_imports_are_detected(package: tuple[str, ...], line: str) -> None:
    assert violations(line, package)


@pytest.mark.parametrize(
    ("package", "line"),
    [
        (("trainer",), "from ..models.model import Model"),
        (("trainer", "engines"), "from . import fsdp2\nfrom ..layout import Parallel"),
        (("trainer", "engines"), "from ...models import model"),
        (("console",), "from .. import __version__"),
        (("tokenize",), "import tokenize\nfrom tokenizers import Tokenizer"),
        (("dataplane", "shards"), "FORMATS = {'arrow': 'headrace.dataplane.shards.arrow'}"),
    ],
)
def test_downward_imports_are_accepted(package: tuple[str, ...], line: str) -> None:
    assert not violations(line, package)


# Imports at run time

TORCH_ALONE = """
import importlib, sys
import torch, torch.nn.functional, torch.utils.checkpoint, torch.distributed

class Block:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top not in ("torch", "headrace", *loaded):
            raise ImportError(f"{name} is imported")

loaded = {name.partition(".")[0] for name in sys.modules} - {"yaml", "click", "pydantic"}
sys.meta_path.insert(0, Block())
for module in MODULES:
    importlib.import_module(module)
"""


def modules_of_models() -> list[str]:
    """Return all modules except the command (needs click) and the programs (need Triton)."""
    return [
        ".".join(["headrace", *file.relative_to(ROOT).with_suffix("").parts]).removesuffix(
            ".__init__"
        )
        for file in files_of("models")
        if file.name != "cli.py" and file.parent.name != "programs"
    ]


def test_models_import_with_torch_alone() -> None:
    result = run_python(f"MODULES = {modules_of_models()}\n{TORCH_ALONE}")
    assert result.returncode == 0, result.stderr


def test_forbidden_imports_of_models_are_detected() -> None:
    assert run_python(f"MODULES = ['headrace.models.cli']\n{TORCH_ALONE}").returncode != 0


HELP = """
import sys
import click
from click.testing import CliRunner
from headrace.console.headrace import main

def pages(command, words):
    yield words
    if isinstance(command, click.Group):
        with click.Context(command) as ctx:
            for name in command.list_commands(ctx):
                yield from pages(command.get_command(ctx, name), [*words, name])

found = list(pages(main, []))
for words in found:
    result = CliRunner().invoke(main, [*words, "--help"])
    assert result.exit_code == 0 and result.output.startswith("Usage: headrace"), result.output
slow = {"torch", "numpy", "pyarrow", "pydantic", "yaml", "deepspeed", "streaming"}
print(len(found), sorted(slow & set(sys.modules)))
"""


def test_every_help_page_imports_no_heavy_package() -> None:
    result = run_python(HELP)
    assert result.returncode == 0, result.stderr
    pages, heavy = result.stdout.strip().split(" ", 1)
    assert int(pages) > 10
    assert heavy == "[]"


# Configuration


def dataclasses_in(hint: object, seen: dict[type, None]) -> dict[type, None]:
    """Return all dataclasses reachable from a configuration."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint) and hint not in seen:
        seen |= {kind: None for kind in hint.__mro__ if dataclasses.is_dataclass(kind)}
        for inner in typing.get_type_hints(hint, include_extras=True).values():
            dataclasses_in(inner, seen)
    for mark in getattr(hint, "__metadata__", ()):
        for choice in getattr(mark, "registry", {}).values():
            dataclasses_in(choice, seen)
    for argument in typing.get_args(hint):
        dataclasses_in(argument, seen)
    return seen


def configurations() -> list[type]:
    from headrace.mixtures.mixture_file.mixture import Mixture
    from headrace.models.config.config import ModelConfig
    from headrace.planner.hardware.file import HardwareFile
    from headrace.tokenize.builder.build import BuildConfig
    from headrace.tokenize.train import TrainConfig
    from headrace.trainer.run.config import RunConfig

    seen: dict[type, None] = {}
    for root in (Mixture, ModelConfig, BuildConfig, TrainConfig, RunConfig, HardwareFile):
        dataclasses_in(root, seen)
    return list(seen)


def undocumented(kind: type) -> list[str]:
    """Return the fields without a string below them. A section whose class has a docstring needs
    none, nor does a tag (`kind`): its choices are documented."""
    [node] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(node, ast.ClassDef)
    hints = typing.get_type_hints(kind)
    bare = []
    for position, statement in enumerate(node.body):
        if not isinstance(statement, ast.AnnAssign):
            continue
        assert isinstance(statement.target, ast.Name)
        following = node.body[position + 1] if position + 1 < len(node.body) else None
        documented = (
            isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and isinstance(following.value.value, str)
        )
        name = statement.target.id
        section = next(iter(dataclasses_in(hints.get(name), {})), None)
        if not documented and name != "kind" and not (section and written_doc(section)):
            bare.append(f"{kind.__name__}.{name}")
    return bare


def written_doc(kind: type) -> bool:
    """Return True if the class has its own docstring (dataclass generates a default)."""
    return bool(kind.__doc__) and not kind.__doc__.startswith(f"{kind.__name__}(")


def test_every_configuration_field_is_documented() -> None:
    bare = [field for kind in configurations() for field in undocumented(kind)]
    assert not bare, bare


def test_every_configuration_is_frozen_and_keyword_only() -> None:
    for kind in configurations():
        assert kind.__dataclass_params__.frozen, kind  # type: ignore[attr-defined]
        assert all(field.kw_only for field in dataclasses.fields(kind)), kind


# Size


def test_no_file_is_too_long() -> None:
    files = [*ALL_FILES, *files_of("tests"), *files_of("benchmarks")]
    lines = {str(file.relative_to(ROOT)): file.read_text().count("\n") for file in files}
    assert not {file: count for file, count in lines.items() if count > LONG_FILE}


def test_make_help_lists_the_main_targets() -> None:
    help_text = subprocess.run(
        ["make", "help"], cwd=ROOT, capture_output=True, text=True, env=dict(os.environ)
    ).stdout
    for target in ("run", "test", "check", "bench", "setup", "help"):
        assert f"make {target} " in help_text
