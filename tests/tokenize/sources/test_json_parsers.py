"""What the fast JSON parser accepts, it reads like Python's; the rest is read by Python's."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from headrace.tokenize.files.file_hashes import hash_files
from headrace.tokenize.files.input_file import File
from headrace.tokenize.sources.delimited import cut_bytes
from headrace.tokenize.sources.jsonl import _BadLine, _parse_json

PIECES = [
    *(
        "{",
        "}",
        "[",
        "]",
        ":",
        ",",
        '"text"',
        '"a"',
        '"text":"x"',
        '"a":2,"a":3',
        '"":1',
        " ",
        "\t",
    ),
    *('"\\u00e9"', '"\\ud83d\\ude00"', '"\\ud800"', '"\\udc00x"', '"\\n"', '"\\x"', '"\\u12"'),
    *("1", "-0", "-0.0", "01", "1.", "1.5", ".5", "1e5", "1E+400", "-1e-400", "1e", "1" * 4400),
    *("123456789012345678901234567890", "9007199254740993.0", "5e-324", "2.2250738585072011e-308"),
    *("NaN", "Infinity", "-Infinity", "nan", "null", "true", "True", "\x0b", "\xa0", "\ufeff"),
    *('"\x01"', '"é"', '"\u2028"', '"🙂"', '"\\/"', '"\\u0000"', "\x00", "//", "{}", "[" * 300),
]


def read(line: bytes) -> tuple[Any, str]:
    """Return a line's value as text (NaN is not equal to itself), or the kind of its error."""
    try:
        return repr(_parse_json(line)[0]), ""
    except _BadLine as error:
        return None, error.kind


def read_with_python(line: bytes) -> tuple[Any, str]:
    try:
        return repr(json.loads(line.decode())), ""
    except UnicodeDecodeError:
        return None, "invalid UTF-8"
    except (ValueError, RecursionError):
        return None, "broken JSON"


def test_both_parsers_read_alike() -> None:
    rng = random.Random(0)

    def value(depth: int) -> str:
        draw = rng.random()
        if depth > 3 or draw < 0.6:
            return rng.choice(PIECES)
        parts = [value(depth + 1) for _ in range(rng.randrange(4))]
        if draw < 0.8:
            return "{" + ",".join(f'"{rng.choice("ab")}":{part}' for part in parts) + "}"
        return "[" + ", ".join(parts) + "]"

    num_values = 0
    for number in range(6000):
        text = value(0) if number % 3 else "".join(rng.choices(PIECES, k=rng.randrange(1, 6)))
        line = bytearray(text.encode())
        if number % 5 == 0:
            line[rng.randrange(len(line))] = rng.randrange(256)
        result = read(bytes(line))
        num_values += result[0] is not None
        assert result == read_with_python(bytes(line)), bytes(line)
    assert num_values > 1000
    for code in range(0, 1 << 16, 7):
        line = b'"\\u%04x"' % code
        assert read(line) == read_with_python(line)


def test_lines_counted_while_hashing_give_the_same_slices(tmp_path: Path) -> None:
    """With whole blocks in a slice, the file is not read again."""
    rng = random.Random(0)
    path = tmp_path / "a.jsonl"
    block = 256 << 10
    for ends in (b"", b"\n"):
        lines = [b"x" * rng.randrange(2000) for _ in range(1500)]
        lines.append(b"y" * (block - len(b"\n".join(lines)) % block - 1))  # a feed ends a block
        path.write_bytes(b"\n".join([*lines, *lines]) + ends)
        file = File(str(path), path.stat().st_size, "jsonl", None, "")
        [hashed] = hash_files([file]).files
        for size in (block, 2 * block, 300_000):
            expected = [(s.start, s.end, s.first) for s in cut_bytes(file, b"\n", size)]
            slices = [(s.start, s.end, s.first) for s in cut_bytes(hashed, b"\n", size)]
            assert slices == expected
            assert hashed.checksums is not None
            counts = [hashed.checksums.count_line_feeds(s, e) for s, e, _ in slices[:-1]]
            assert (None in counts) is (size == 300_000)
