"""Rules within folders: rooms import downwards, no import cycles, no crowded folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from support.code.import_graph import cycles, graph

ROOT = Path(__file__).parents[1]

ROOMS: Mapping[str, Sequence[str]] = {
    "trainer": (
        "folders",
        "layout",
        "cluster",
        "checkpoints",
        "engines",
        "weights",
        "placement",
        "scores",
        "loop",
        "record",
        "run",
        "accounting",
        "inference",
        "launch",
        "cli",
        "guide",
    ),
    "planner": (
        "hardware",
        "grid",
        "division",
        "traces",
        "memory",
        "prices",
        "measure",
        "modules",
        "search",
        "lengths",
        "simulation",
        "show",
        "table",
        "scaling",
        "price",
        "tune",
        "cli",
    ),
    "reports": (
        "board",
        "scores",
        "documents",
        "report",
        "anneal",
        "hybrids",
    ),
    "mixtures": (
        "lr_shapes",
        "controllers",
        "mixture_file",
        "planning",
        "learning_rate",
        "template",
        "view",
        "steering",
        "audit",
        "exposure",
        "proof",
        "disclosure",
        "search",
        "cli",
    ),
    "dataplane": (
        "arrays",
        "freed",
        "storage",
        "shards",
        "order",
        "runlog",
        "datasets",
        "tokenizers",
        "account",
        "loader",
        "stream",
    ),
    "tokenize": (
        "files",
        "chat",
        "sources",
        "corpus",
        "executors",
        "builder",
        "options",
        "inspect",
        "views",
        "read_shard",
        "external",
        "neardup",
        "train",
        "count",
        "card",
        "verify",
        "index",
        "contamination",
        "cli",
    ),
    "models": (
        "config",
        "weights",
        "parallel",
        "documents",
        "kernels",
        "layers",
        "operators",
        "model",
        "transforms",
        "accounting",
        "attestation",
        "compilation",
        "conversion",
        "cli",
    ),
}
"""Rooms of each folder from the ground up; a module beside the rooms counts as a room. A room
imports rooms before it. Every room and module is listed. Deeper, rooms form no circle."""

CROWD = {"trainer": 12, "planner": 12, "reports": 12, "dataplane": 12}
"""Most modules at one level of these folders, at any depth."""
DEFAULT_CROWD = 16
ONE_FILE_A_KIND = {
    "models/config/options",
    "models/operators",
    "models/kernels",
    "models/kernels/programs",
    "models/conversion",
    "tokenize/sources",
}
"""Folders of one file for each kind, which may be longer lists."""


def package_files() -> list[Path]:
    folders = ("configs", "console", *ROOMS)
    return sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))


def upward(edges: Mapping[str, set[str]], rooms: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the imports that point from a room to a room above it."""
    wrong = []
    for module, targets in edges.items():
        folder, _, inner = module.partition(".")
        order = rooms.get(folder, ())
        room = inner.split(".")[0]
        for target in targets:
            target_folder, _, target_module = target.partition(".")
            target_room = target_module.split(".")[0]
            if target_folder != folder or {room, target_room} - set(order):
                continue
            if order.index(target_room) > order.index(room):
                wrong.append(f"{module} imports {target}")
    return wrong


def circles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the rooms that import each other, directly or not, in a folder at any depth."""
    arrows: dict[str, dict[str, set[str]]] = {}
    for module, targets in edges.items():
        for target in targets:
            room, target_room = module.split("."), target.split(".")
            pairs = zip(room, target_room, strict=False)
            depth = next((n for n, (a, b) in enumerate(pairs) if a != b), 0)
            if depth == 0:
                continue  # of two folders, or of a folder's own __init__.py
            level = arrows.setdefault(".".join(room[:depth]), {})
            level.setdefault(room[depth], set()).add(target_room[depth])
            level.setdefault(target_room[depth], set())
    return [
        [f"{folder}.{room}" for room in circle]
        for folder, level in arrows.items()
        for circle in cycles(level)
    ]


def crowded(files: Sequence[Path]) -> dict[str, int]:
    """Return the folders with too many modules at one level; `files` are relative to the root."""
    counts: dict[str, int] = {}
    for file in files:
        if file.name != "__init__.py":
            folder = file.parent.as_posix()
            counts[folder] = counts.get(folder, 0) + 1
    return {
        folder: count
        for folder, count in counts.items()
        if count > CROWD.get(folder.split("/")[0], DEFAULT_CROWD) and folder not in ONE_FILE_A_KIND
    }


def test_no_modules_import_each_other() -> None:
    assert cycles(graph(ROOT, package_files())) == []


def test_rooms_import_downwards() -> None:
    assert upward(graph(ROOT, package_files()), ROOMS) == []


def test_no_rooms_import_each_other_at_any_depth() -> None:
    assert circles(graph(ROOT, package_files())) == []


@pytest.mark.parametrize("folder", ROOMS)
def test_the_list_of_rooms_is_true(folder: str) -> None:
    here = {
        path.stem
        for path in (ROOT / folder).iterdir()
        if (path.suffix == ".py" and path.stem != "__init__")
        or (path.is_dir() and any(path.glob("*.py")))
    }
    assert here == set(ROOMS[folder])


def test_no_folder_is_crowded() -> None:
    assert crowded([file.relative_to(ROOT) for file in package_files()]) == {}


# Negative controls


def written(root: Path, files: Mapping[str, str]) -> list[Path]:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return [root / name for name in files]


@pytest.mark.parametrize(
    "back",
    [
        "from ..engines import engine",
        "def late():\n    from ..engines.engine import Engine",
        "if TYPE_CHECKING:\n    from ..engines.engine import Engine",
    ],
)
def test_a_cycle_is_found(tmp_path: Path, back: str) -> None:
    files = written(
        tmp_path,
        {
            "trainer/engines/engine.py": "from ..loop.loop import Loop",
            "trainer/loop/loop.py": "from . import guard",
            "trainer/loop/guard.py": back,
            "trainer/cli.py": "from .loop import loop",
        },
    )
    expected = ["trainer.engines.engine", "trainer.loop.guard", "trainer.loop.loop"]
    assert cycles(graph(tmp_path, files)) == [expected]


def test_a_circle_of_deeper_rooms_is_found(tmp_path: Path) -> None:
    """No two files of it import each other."""
    files = written(
        tmp_path,
        {
            "planner/search/search.py": "from .proof import bounds",
            "planner/search/proof/bounds.py": "",
            "planner/search/proof/nearest.py": "from ..grids import Grid",
            "planner/search/grids.py": "from .exact.solve import solve",
            "planner/search/exact/solve.py": "from ..proof.bounds import bound",
        },
    )
    assert cycles(graph(tmp_path, files)) == []
    names = ["exact", "grids", "proof"]
    assert circles(graph(tmp_path, files)) == [[f"planner.search.{name}" for name in names]]


def test_an_upward_import_is_found(tmp_path: Path) -> None:
    files = written(
        tmp_path,
        {
            "trainer/engines/engine.py": "from ..loop.loop import Loop",
            "trainer/loop/loop.py": "from ..layout.groups import Parallel",
            "trainer/layout/groups.py": "",
            "trainer/folders/folder.py": "from ..cli import main",
            "trainer/cli.py": "",
        },
    )
    assert upward(graph(tmp_path, files), ROOMS) == [
        "trainer.engines.engine imports trainer.loop.loop",
        "trainer.folders.folder imports trainer.cli",
    ]


def test_a_crowd_is_found() -> None:
    many = [Path(f"trainer/loop/module_{number}.py") for number in range(13)]
    operators = [Path(f"models/operators/module_{number}.py") for number in range(30)]
    layers = [Path(f"models/layers/module_{number}.py") for number in range(17)]
    assert crowded([*many, *operators, *layers]) == {"trainer/loop": 13, "models/layers": 17}
    assert crowded([*many[1:], *layers[1:]]) == {}
