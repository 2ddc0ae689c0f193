"""Interface for corpus formats, and the types they work with.

A format cuts a file into slices and reads the documents in a slice. A slice is what one task reads:
a range of bytes, row groups or record batches. Cuts depend on the file alone, so a build has the
same tasks on every machine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ..files.input_file import BLOCK_BYTES, File
from .fields import FieldKind, KeptField, check_names

if TYPE_CHECKING:
    from ...dataplane.tokenizers.marks import TextSpans

TextDocuments = Literal["file", "line", "separator"]
OnError = Literal["fail", "skip"]
"""fail: stop at a record that cannot be read; skip: leave it out."""


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    format: str = "auto"
    """Format of the files: a name in CORPUS_FORMATS; `auto` chooses by their endings."""
    text_field: str = "text"
    """Field or column that holds the text."""
    id_field: str | None = None
    """Field or column that holds the corpus' own id of a document. Null: it has none; a record
    without the field is bad."""
    text_documents: TextDocuments = "file"
    """Unit of a plain text that is one document."""
    separator: str = "\n\n"
    """Separator of the documents of a plain text, if `text_documents` is `separator`."""
    split_large: bool = False
    """Read a text above the memory limit in pieces, instead of rejecting it."""
    keep: tuple[KeptField, ...] = ()
    """Fields or columns that the dataset keeps for each document."""
    chat: Any = None
    """How records become conversations: a `conversation.Chat`, which a build makes of its
    `ChatConfig`, or `messages.MessageContents`; None: a record is a text."""

    def __post_init__(self) -> None:
        check_names(self.keep)
        if not self.separator:
            raise ValueError("separator is empty")
        if self.separator != "\n\n" and self.text_documents != "separator":
            raise ValueError("separator needs text_documents: separator")


@dataclass(frozen=True, kw_only=True)
class ReadLimits:
    """Bytes that a reader holds in memory."""

    block_bytes: int = BLOCK_BYTES
    """Bytes read at once, from a file or as texts."""
    document_bytes: int = 32 << 20
    """Upper bound on a text's bytes. A worker holds a document several times (as text, where one
    emoji makes Python use four bytes per character; as ids; in a shard) and must stay below 1
    GiB."""

    @property
    def too_large(self) -> tuple[str, str]:
        """Kind and message for longer texts, which are bad records."""
        return "too large", f"a document of more than {self.document_bytes >> 20} MiB"


LIMITS = ReadLimits()


@dataclass(frozen=True)
class Slice:
    """Part of a file: [start, end) in the format's unit. Build-task ids hash these fields: do not
    rename them."""

    file: File
    start: int
    end: int
    first: int
    """The first document's position in the file."""
    size: int
    """Approximate file bytes in the slice."""

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that decides the slice's records; the file's place and checksums do not."""
        data = asdict(self)
        del data["file"]["path"], data["file"]["checksums"]
        return data


@dataclass(frozen=True)
class BadRecord:
    """A record that cannot be read. Manifests store its kind and message."""

    kind: str
    message: str
    file: str
    position: int | None = None
    unit: str = "record"

    def where(self) -> str:
        if self.position is None:
            return self.file
        return f"{self.file}, {self.unit} {self.position + 1}"

    def __str__(self) -> str:
        return f"{self.where()}: {self.kind}: {self.message}"


@dataclass(frozen=True)
class Texts:
    """Documents read from a file, in file order."""

    texts: Sequence[str]
    positions: Sequence[int]
    ids: list[str | None] | None = None
    problems: list[BadRecord] = field(default_factory=list)
    size: int = 0
    """File bytes read for these documents."""
    fields: Any = None
    """Kept fields: a pyarrow.Table with one row per text, or None."""
    marks: list[TextSpans] | None = None
    """Special-token spans and learnt parts in conversations; None for plain texts."""
    groups: list[str] | None = None
    """What is never divided between splits; None: texts alone decide."""

    def select(self, numbers: Sequence[int]) -> Texts:
        """Select documents by index."""
        import numpy as np

        return replace(
            self,
            texts=[self.texts[k] for k in numbers],
            positions=[self.positions[k] for k in numbers],
            ids=None if self.ids is None else [self.ids[k] for k in numbers],
            fields=None if self.fields is None else self.fields.take(np.array(numbers, np.int64)),
            marks=None if self.marks is None else [self.marks[k] for k in numbers],
            groups=None if self.groups is None else [self.groups[k] for k in numbers],
        )


class CorpusFormat(ABC):
    """A corpus format."""

    endings: ClassVar[tuple[str, ...]]
    """File endings, without the dot."""
    settings: ClassVar[tuple[str, ...]] = ()
    """SourceConfig fields that this format uses and some formats do not."""
    has_ids: ClassVar[bool] = False
    """True if documents have ids even without `id_field`."""
    compressible: ClassVar[bool] = True
    """True if whole files may be compressed (.gz, .zst)."""

    @abstractmethod
    def cut(self, file: File, config: SourceConfig, size: int) -> list[Slice]:
        """Cut a file into slices with about `size` bytes, or raise DamagedFile."""

    @abstractmethod
    def read(
        self, file_slice: Slice, config: SourceConfig, limits: ReadLimits = LIMITS
    ) -> Iterator[Texts]:
        """Read a slice's documents, in batches; unreadable records are in `problems`."""

    def field_kinds(
        self, file_slice: Slice, names: Sequence[str]
    ) -> dict[str, set[FieldKind | str]]:
        """Return the field types in a slice's first records: names from FIELD_KINDS, or
        descriptions for other types. A field without a value there has no entry."""
        return {}
