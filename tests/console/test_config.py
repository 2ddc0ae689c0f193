"""Configurations are read completely, or refused with all wrong values, lines and hints."""

import enum
import math
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.console import config, yaml_text
from headrace.console.errors import ConfigError, StorageError


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, kw_only=True)
class Circle:
    kind: Literal["circle"] = "circle"
    radius: float


@dataclass(frozen=True, kw_only=True)
class Square:
    kind: Literal["square"] = "square"
    side: float
    colour: Colour = Colour.RED


SHAPES = {"circle": Circle, "square": Square}
Shape = Annotated[object, config.OneOf(SHAPES, tag="kind")]


@dataclass(frozen=True, kw_only=True)
class Warmup:
    tokens: int
    peak: float = 1.0

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise ValueError(f"tokens must not be negative, not {self.tokens}")


@dataclass(frozen=True, kw_only=True)
class Run:
    name: str
    steps: int = 10
    lr: float = 1e-3
    debug: bool = False
    precision: Literal["fp32", "bf16"] = "fp32"
    warmup: Warmup | None = None
    peak: float | Warmup = 1.0
    betas: tuple[float, float] = (0.9, 0.95)
    sizes: tuple[int, ...] = ()
    out: Path | None = None
    phases: dict[str, Warmup] = field(default_factory=dict)
    stages: list[Warmup] = field(default_factory=list)
    shapes: dict[str, Shape] = field(default_factory=dict)
    shape: Shape | None = None
    course: dict[Literal["from", "to"], float] = field(default_factory=dict)


def read(text: str, *overrides: str, folder: Path) -> Run:
    file = folder / "run.yaml"
    file.write_text(text)
    return config.load(Run, file, overrides)


def problems(text: str, *overrides: str, folder: Path) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(text, *overrides, folder=folder)
    return [str(problem) for problem in caught.value.problems]


names = st.text(min_size=1)
finite = st.floats(allow_nan=False)
warmups = st.builds(Warmup, tokens=st.integers(0, 10**15), peak=finite)
shapes = st.builds(Circle, radius=finite) | st.builds(
    Square, side=finite, colour=st.sampled_from(Colour)
)
runs = st.builds(
    Run,
    name=st.text(),
    steps=st.integers(),
    lr=finite,
    debug=st.booleans(),
    precision=st.sampled_from(["fp32", "bf16"]),
    warmup=st.none() | warmups,
    peak=finite | warmups,
    betas=st.tuples(finite, finite),
    sizes=st.lists(st.integers(), max_size=3).map(tuple),
    out=st.none() | st.just(Path("a/b")),
    phases=st.dictionaries(names, warmups, max_size=3),
    stages=st.lists(warmups, max_size=3),
    shapes=st.dictionaries(names, shapes, max_size=3),
    shape=st.none() | shapes,
)


@given(run=runs)
@settings(deadline=None)
def test_a_dumped_configuration_is_loaded_back(
    run: Run, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("run") / "run.yaml"
    file.write_text(config.dump(run), encoding="utf-8")
    assert config.load(Run, file) == run


def test_defaults_apply_and_values_are_converted(tmp_path: Path) -> None:
    run = read("name: a\nsteps: 2K\nlr: 1e-4\nbetas: [0, 1]\nout: x/y\n", folder=tmp_path)
    assert run == Run(name="a", steps=2000, lr=1e-4, betas=(0.0, 1.0), out=Path("x/y"))
    assert isinstance(run.betas, tuple)


def test_the_tag_chooses_the_dataclass(tmp_path: Path) -> None:
    run = read("name: a\nshapes: {x: {kind: square, side: 2, colour: blue}}\n", folder=tmp_path)
    assert run.shapes == {"x": Square(side=2.0, colour=Colour.BLUE)}


def test_all_problems_are_reported_at_once_with_lines(tmp_path: Path) -> None:
    messages = problems(
        "steps: many\n"
        "lrr: 1\n"
        "precision: bf61\n"
        "warmup:\n"
        "  tokns: 3\n"
        "shapes:\n"
        "  a: {kind: square, sid: 1}\n"
        "  b: {kind: sqare}\n"
        "  c: {radius: 1}\n",
        folder=tmp_path,
    )
    assert messages == [
        "name: is required",
        "line 1: steps: should be a whole number, not 'many'",
        "line 2: lrr: unknown key; did you mean `lr`? Known: name, steps, lr, debug, precision, "
        "warmup, peak, betas, sizes, out, phases, stages, shapes, shape, course",
        "line 3: precision: `bf61` is not one of 'fp32' or 'bf16'; did you mean `bf16`?",
        "line 4: warmup.tokens: is required",
        "line 5: warmup.tokns: unknown key; did you mean `tokens`? Known: tokens, peak",
        "line 7: shapes.a.side: is required",
        "line 7: shapes.a.sid: unknown key; did you mean `side`? Known: kind, side, colour",
        "line 8: shapes.b.kind: `sqare` is unknown; did you mean `square`? Known: circle, square",
        "line 9: shapes.c: needs the key `kind`",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps: 1.5", "line 2: steps: should be a whole number, not 1.5"),
        ("steps: true", "line 2: steps: should be a number, not true or false"),
        ("lr: fast", "line 2: lr: should be a number, not 'fast'"),
        ("lr: [1]", "line 2: lr: should be a number, not [1]"),
        ("debug: maybe", "line 2: debug: should be true or false, not 'maybe'"),
        ("betas: 0.9", "line 2: betas: should be a list, not 0.9"),
        ("betas: [0.9]", "line 2: betas.1: is required"),
        ("sizes: [1, x]", "line 2: sizes.1: should be a whole number, not 'x'"),
        ("sizes: [1, true]", "line 2: sizes.1: should be a number, not true or false"),
        ("phases: [1]", "line 2: phases: should be keys with values, not [1]"),
        ("phases: {a: 1}", "line 2: phases.a: should be keys with values, not 1"),
        ("phases: {1: {tokens: 2}}", "line 2: phases.1: the key 1 is not text: write it in quotes"),
        ("stages: [{tokens: 1}, {}]", "line 2: stages.1.tokens: is required"),
        ("stages: [{tokens: 1, peek: 2}]", "line 2: stages.0.peek: unknown key; did you mean"),
        ("warmup: {tokens: -1}", "line 2: warmup: tokens must not be negative, not -1"),
        ("warmup: 3", "line 2: warmup: should be keys with values, not 3"),
        ("peak: high", "line 2: peak: should be a number or keys with values, not 'high'"),
        ("peak: {tokns: 1}", "line 2: peak.tokns: unknown key; did you mean `tokens`?"),
        ("shape: 3", "line 2: shape: should be keys with values, not 3"),
        (
            "steps: '8K'",
            "line 2: steps: should be a whole number, not '8K'; write it without quotes",
        ),
        ("course: {form: 1}", "line 2: course.form: unknown key; did you mean `from`? Known: from"),
        ("7: 3", "line 2: 7: the key 7 is not text: write it in quotes"),
        ("out: 3", "line 2: out: "),
    ],
)
def test_one_wrong_value(text: str, message: str, tmp_path: Path) -> None:
    assert any(line.startswith(message) for line in problems(f"name: a\n{text}\n", folder=tmp_path))


def test_other_members_of_a_union_are_not_reported(tmp_path: Path) -> None:
    assert problems("name: a\npeak: {tokens: x}\n", folder=tmp_path) == [
        "line 2: peak.tokens: should be a whole number, not 'x'"
    ]


def test_text_that_looks_like_a_number_must_be_quoted(tmp_path: Path) -> None:
    assert problems("name: 8B\n", folder=tmp_path) == [
        "line 1: name: should be text, not 8000000000; write it in quotes"
    ]
    assert read("name: '8B'\n", folder=tmp_path).name == "8B"


def test_long_values_are_cut_in_messages(tmp_path: Path) -> None:
    [message] = problems(f"name: a\nsteps: {'x' * 500}\n", folder=tmp_path)
    assert len(message) < 120


def test_overrides(tmp_path: Path) -> None:
    text = "name: a\nwarmup:\nstages: [{tokens: 1}, {tokens: 2}]\n"
    run = read(
        text,
        "lr=3e-4",
        "warmup.tokens=8K",
        "stages.1.peak=0.5",
        "sizes=[1, 2]",
        "phases.first.tokens=3",
        "name=b=c",
        "out=",
        folder=tmp_path,
    )
    assert run.lr == 3e-4
    assert run.warmup == Warmup(tokens=8000)
    assert run.stages == [Warmup(tokens=1), Warmup(tokens=2, peak=0.5)]
    assert run.sizes == (1, 2)
    assert run.phases == {"first": Warmup(tokens=3)}
    assert run.name == "b=c"
    assert run.out is None


def test_an_override_does_not_change_its_input() -> None:
    data = {"warmup": {"tokens": 1}}
    assert config.apply_overrides(data, ["warmup.tokens=2"]) == {"warmup": {"tokens": 2}}
    assert data == {"warmup": {"tokens": 1}}


def test_all_wrong_overrides_are_reported_at_once(tmp_path: Path) -> None:
    words = ["lr", "=3", "a..b=1", "name.x=1", "sizes.5=1", "sizes.x=1", "lr=[1"]
    with pytest.raises(ConfigError) as caught:
        read("name: a\nsizes: [1, 2]\n", *words, folder=tmp_path)
    assert "the overrides on the command line" in str(caught.value)
    assert [str(problem) for problem in caught.value.problems] == [
        "lr: write an override as path.to.key=value",
        "write an override as path.to.key=value",
        "a..b: write an override as path.to.key=value",
        "name.x: `name` is a value; it has no keys",
        "sizes.5: the list has no item `5`; it has 2 items, from 0",
        "sizes.x: the list has no item `x`; it has 2 items, from 0",
        "lr: `[1` is not a YAML value; if it is a text, put YAML quotes inside the shell's: "
        "\"lr='[1'\"",
    ]
    typed = shlex.split("\"name='[1'\"")  # what a shell makes of such an example
    assert config.apply_overrides({}, typed) == {"name": "[1"}


def test_a_wrong_override_has_no_line(tmp_path: Path) -> None:
    text = "name: a\nwarmup:\n  tokens: 1\nlr: x\n"
    words = ["warmup.tokens=y", "warmup.peek=1", "phasses.a.tokens=1"]
    assert problems(text, *words, folder=tmp_path) == [
        "warmup.peek: unknown key; did you mean `peak`? Known: tokens, peak",
        "phasses: unknown key; did you mean `phases`? Known: name, steps, lr, debug, precision, "
        "warmup, peak, betas, sizes, out, phases, stages, shapes, shape, course",
        "warmup.tokens: should be a whole number, not 'y'",
        "line 4: lr: should be a number, not 'x'",
    ]


def test_a_missing_file_suggests_a_similar_name(tmp_path: Path) -> None:
    (tmp_path / "stable.yaml").touch()
    with pytest.raises(StorageError, match=r"did you mean .*stable\.yaml"):
        config.load(Run, tmp_path / "stabel.yaml")
    with pytest.raises(StorageError, match="file not found"):
        config.load(Run, tmp_path / "no" / "such" / "folder.yaml")


def test_folders_and_files_that_are_not_utf8_are_errors(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="is a folder"):
        config.load(Run, tmp_path)
    latin = tmp_path / "latin.yaml"
    latin.write_bytes("name: é".encode("latin-1"))
    with pytest.raises(StorageError, match="not UTF-8 text: byte 0xe9 at 6"):
        config.load(Run, latin)


def test_a_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes("name: a\n".encode("utf-8-sig"))
    assert config.load(Run, file).name == "a"


def test_infinity_is_a_number(tmp_path: Path) -> None:
    assert math.isinf(read("name: a\nlr: .inf\n", folder=tmp_path).lr)


@dataclass(frozen=True, kw_only=True)
class Drawing:
    shape: Annotated[object, config.OneOf(SHAPES, tag="kind", default="circle")] = None
    name: Annotated[str, config.NameIn(SHAPES, "auto")] = "auto"


def draw(text: str) -> Drawing:
    return config.build(Drawing, yaml_text.parse(text, source="it")[0], source="it")


def test_a_section_without_its_tag_is_the_default_kind() -> None:
    assert draw("shape: {radius: 2}").shape == Circle(radius=2.0)
    assert draw("shape: {kind: square, side: 1}").shape == Square(side=1.0)
    with pytest.raises(ConfigError, match=r"shape\.side: unknown key\. Known: kind, radius"):
        draw("shape: {radius: 2, side: 1}")
    with pytest.raises(ConfigError, match="shape: should be keys with values, not 3"):
        draw("shape: 3")


def test_a_kind_added_to_the_registry_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Point:
        kind: Literal["point"] = "point"

    with pytest.raises(ConfigError, match=r"shape\.kind: `point` is unknown"):
        draw("shape: {kind: point}")
    monkeypatch.setitem(SHAPES, "point", Point)
    assert draw("shape: {kind: point}").shape == Point()


def test_a_name_must_be_in_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    assert draw("name: square").name == "square"
    assert draw("name: auto").name == "auto"
    with pytest.raises(ConfigError, match=r"name: `sqare` is not one of .*did you mean `square`"):
        draw("name: sqare")
    monkeypatch.setitem(SHAPES, "sqare", Square)
    assert draw("name: sqare").name == "sqare"


@dataclass(frozen=True, kw_only=True)
class Cross:
    arms: int
    rotated: bool | None = config.added_field(None)
    copies: int = config.added_field(1)


def test_defaults_of_added_fields_are_written_nowhere() -> None:
    assert config.plain(Cross(arms=4)) == {"arms": 4}
    assert config.plain([Cross(arms=4, rotated=False)]) == [{"arms": 4, "rotated": False}]
    assert config.plain(Cross(arms=4), complete=True) == {"arms": 4, "rotated": None, "copies": 1}
    written = config.dump(Cross(arms=4, copies=2))
    assert "rotated" not in written
    data = {"arms": 4, "copies": 2}
    assert config.build(Cross, data, source="a test") == Cross(arms=4, copies=2)
    with pytest.raises(ConfigError, match="copies"):
        config.build(Cross, {"arms": 4, "copies": True}, source="a test")
