"""JSON lines: one object per line, with the text in a field, or with a conversation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from simdjson import Parser

from ..chat.problems import ChatProblem
from ..files.input_file import File
from .delimited import cut_bytes, record_blocks
from .fields import FieldKind, FieldProblem, build_table, find_value, json_kind, read_json_value
from .format import LIMITS, BadRecord, CorpusFormat, ReadLimits, Slice, SourceConfig, Texts

if TYPE_CHECKING:
    from ...dataplane.tokenizers.marks import TextSpans

DELIMITER = b"\n"
UNIT = "line"

_parser = Parser()


class Jsonl(CorpusFormat):
    """JSON lines; the text is in a field."""

    endings = ("jsonl", "ndjson", "json")
    settings = ("text_field", "id_field", "keep", "chat")

    def cut(self, file: File, config: SourceConfig, size: int) -> list[Slice]:
        return cut_bytes(file, DELIMITER, size)

    def read(
        self, file_slice: Slice, config: SourceConfig, limits: ReadLimits = LIMITS
    ) -> Iterator[Texts]:
        name = file_slice.file.name
        is_plain = not (config.chat or config.id_field or config.keep)
        for block in record_blocks(file_slice, DELIMITER, limits, unit=UNIT, split=False):
            texts: list[str] = []
            marks: list[TextSpans] = []
            positions: list[int] = []
            ids: list[str | None] = []
            fields: list[list[Any]] = []
            problems = [] if block.problem is None else [block.problem]
            for number, line in enumerate(block.lines(), start=block.first):
                plain_text = _read_plain_text(line, config.text_field) if is_plain else None
                if plain_text is not None:
                    texts.append(plain_text)
                    positions.append(number)
                    continue
                if line.isspace():
                    continue
                try:
                    text, text_marks, id, values = _parse_document(line, config)
                except _BadLine as bad:
                    kind, message = bad.kind, str(bad)
                    if number == 0 and (description := _describe_form(line)) is not None:
                        kind, message = NOT_LINES, description
                    problems.append(BadRecord(kind, message, name, number, UNIT))
                    continue
                texts.append(text)
                positions.append(number)
                if text_marks is not None:
                    marks.append(text_marks)
                if config.id_field:
                    ids.append(id)
                if config.keep:
                    fields.append(values)
            yield Texts(
                texts,
                positions,
                ids if config.id_field else None,
                problems,
                block.read,
                build_table(fields, config.keep) if config.keep else None,
                marks if config.chat else None,
            )

    def field_kinds(
        self, file_slice: Slice, names: Sequence[str]
    ) -> dict[str, set[FieldKind | str]]:
        kinds: dict[str, set[FieldKind | str]] = {}
        for block in record_blocks(file_slice, DELIMITER, unit=UNIT, split=False):
            for line in block.lines():
                with suppress(ValueError, RecursionError):  # reading reports bad records
                    record: Any = json.loads(line)
                    for name in names if isinstance(record, dict) else ():
                        with suppress(KeyError):
                            if (value := find_value(record, name)) is not None:
                                kinds.setdefault(name, set()).add(json_kind(value))
            break
        return kinds


FORMAT = Jsonl()


NOT_LINES = "not JSON lines"
"""Kind of bad record: a JSON file in another form. `documents.py` has the hint."""


def _describe_form(line: bytes) -> str | None:
    """Describe a JSON file that is not JSON lines, by the first line; None if it looks like JSON
    lines."""
    if line.lstrip().startswith(b"["):
        return "the file is a JSON array; JSON lines has one object on each line, and no brackets"
    if line.strip() == b"{":
        return "an object takes several lines; JSON lines has one object on each line"
    return None


class _BadLine(Exception):
    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def _read_plain_text(line: bytes, key: str) -> str | None:
    """Return the text of a usual line; None for a line that needs a closer look."""
    try:
        text = _parse_fast(line)[key]
    except (ValueError, TypeError, LookupError):
        return None
    return text if isinstance(text, str) else None


def _parse_document(
    line: bytes, config: SourceConfig
) -> tuple[str, TextSpans | None, str | None, list[Any]]:
    record, has_surrogates = _parse_json(line)
    if not isinstance(record, dict):
        raise _BadLine("broken JSON", f"a JSON {type(record).__name__}, not an object")
    marks = None
    if config.chat is None:
        text = _read_text(record, config)
    else:
        try:
            text, marks = config.chat.read(record)
        except ChatProblem as problem:
            raise _BadLine(problem.kind, str(problem)) from None
    if has_surrogates and not _is_encodable(text):
        raise _BadLine("invalid UTF-8", "half of a surrogate pair, which is not a character")
    try:
        values = [read_json_value(record, field) for field in config.keep]
    except FieldProblem as problem:
        raise _BadLine(problem.kind, str(problem)) from None
    return text, marks, _read_id(record, config.id_field), values


def _parse_json(line: bytes) -> tuple[Any, bool]:
    """Parse a line; return its value, and True if strings may hold lone surrogates.

    `json` decides what a line is. The fast parser refuses lone surrogates and some numbers; what it
    accepts, both read alike (tests/tokenize/sources/test_json_parsers.py).
    """
    try:
        return _parse_fast(line), False
    except ValueError:
        pass
    try:
        return json.loads(line.removesuffix(b"\n").decode()), True
    except UnicodeDecodeError as error:
        raise _BadLine("invalid UTF-8", f"at byte {error.start} of the line") from None
    except (ValueError, RecursionError) as error:
        raise _BadLine("broken JSON", str(error)) from None


def _parse_fast(line: bytes) -> Any:
    """Parse an object by simdjson; raise ValueError for what it refuses."""
    if not line.startswith(b"{"):  # simdjson would skip a byte-order mark
        raise ValueError("not an object")
    try:
        return _parser.parse(line, True)
    except RuntimeError as error:  # nested too deeply, or an error that it has no name for
        raise ValueError(str(error)) from None


def _read_text(record: dict[str, Any], config: SourceConfig) -> str:
    text = record.get(config.text_field)
    if not isinstance(text, str):
        if config.text_field in record:
            kind = "null" if text is None else f"a JSON {type(text).__name__}"
            raise _BadLine("missing field", f"`{config.text_field}` is {kind}, not a string")
        known = ", ".join(f"`{key}`" for key in list(record)[:10])
        raise _BadLine("missing field", f"no field `{config.text_field}` (it has {known})")
    return text


def _read_id(record: dict[str, Any], key: str | None) -> str | None:
    if key is None:
        return None
    if key not in record:
        known = ", ".join(f"`{key}`" for key in list(record)[:10])
        raise _BadLine("missing field", f"no field `{key}` (it has {known})")
    id = record[key]
    if isinstance(id, list | dict):
        message = f"`{key}` is a JSON {type(id).__name__}, not a string or a number"
        raise _BadLine("missing field", message)
    if isinstance(id, str) and not _is_encodable(id):
        raise _BadLine("invalid UTF-8", f"half of a surrogate pair in `{key}`")
    return None if id is None else str(id)


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
