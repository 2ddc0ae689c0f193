"""Packed rows: document boundaries, and the layouts in which operators isolate documents.

Everything follows from a single tensor, the tokens' positions in their documents. A token sees j
steps back if its position is at least j. This also holds if a row continues a longer sequence (its
first position is then not zero), as under context parallelism and in generation.

    row        a a a a b b c c c c c        three documents
    positions  0 1 2 3 0 1 0 1 2 3 4
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ..console.errors import ConfigError, ConfigProblem
from .parallel.axes import Axis

T = TypeVar("T")


@dataclass(frozen=True)
class Documents:
    """A batch's documents; layouts are built once and cached."""

    positions: Tensor
    """int64 [rows, length]: each token's position in its document."""
    full_rows: Documents | None = field(default=None, repr=False, compare=False)
    """Documents in full rows, if these cover a rank's local tokens only (context parallelism)."""
    host: Documents | None = field(default=None, repr=False, compare=False)
    """Copy in host memory, if these are on a GPU: sizes are computed there, without waiting for the
    GPU."""
    _longer: dict[int, Documents] = field(default_factory=dict, repr=False, compare=False)
    _layouts: dict[int, Aligned] = field(default_factory=dict, repr=False, compare=False)
    _buckets: list[Buckets] = field(default_factory=list, repr=False, compare=False)
    _spans: list[Spans] = field(default_factory=list, repr=False, compare=False)
    _derived: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def build(cls, cu_seqlens: Tensor, shape: tuple[int, int]) -> Documents:
        """Build from the boundaries in the flattened rows; every row start is a boundary too.

        `cu_seqlens` is 0, …, rows·length; repeated values (padding to a fixed size) are allowed.
        It is checked where it is in host memory: reading it from a GPU would wait for the GPU.
        """
        rows, length = shape
        if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
            check_cu_seqlens(cu_seqlens, shape)
        starts = torch.zeros(rows * length + 1, dtype=torch.bool, device=cu_seqlens.device)
        starts[cu_seqlens.long()] = True
        starts = starts[:-1].view(rows, length)
        starts[:, 0] = True
        column = torch.arange(length, device=cu_seqlens.device).expand(rows, length)
        return cls(column - torch.where(starts, column, 0).cummax(dim=1).values)

    @property
    def packed(self) -> bool:
        """True if a document begins inside a row. Read it in host memory."""
        return bool((self.positions[:, 1:] == 0).any())

    def shard(self, axis: Axis) -> Documents:
        """Select this rank's tokens in each row, under context parallelism."""
        if axis.size == 1:
            return self
        return Documents(self.positions[:, axis.part(self.positions.shape[1])], self)

    def to(self, device: torch.device) -> Documents:
        """Copy to a device."""
        if self.positions.device == device:
            return self
        full_rows = None if self.full_rows is None else self.full_rows.to(device)
        return Documents(copy_async(self.positions, device), full_rows, self)

    @property
    def index(self) -> Tensor:
        """int64 [rows, length]: the token's document, counted through the batch."""
        starts = self.segment_starts().flatten()
        return (starts.cumsum(0) - 1).view_as(self.positions)

    def segment_starts(self) -> Tensor:
        """bool [rows, length]: True where a document or the row begins."""
        starts = self.positions == 0
        starts[:, 0] = True
        return starts

    def prepend_history(self, before: int) -> Documents:
        """Prepend `before` history tokens to each row.

        Positions before the first document are negative: the history must be zero there.
        """
        if before in self._longer:
            return self._longer[before]
        past = torch.arange(-before, 0, device=self.positions.device)
        longer = Documents(torch.cat([self.positions[:, :1] + past, self.positions], dim=1))
        if not torch.compiler.is_compiling():  # a graph must not depend on earlier calls
            self._longer[before] = longer
        return longer

    def buckets(self) -> Buckets:
        """Layout in which each document has its own row."""
        if not self._buckets:
            built = Buckets.build(self.host or self)
            self._buckets.append(built.to(self.positions.device))
        return self._buckets[0]

    def spans(self, *, compiled: bool = False) -> Spans:
        """Return the documents' ends, for attention kernels that isolate documents."""
        if not self._spans:
            built = Spans.build(self.host or self, compiled=compiled)
            built = built.to(self.positions.device)
            if compiled:
                torch._dynamo.mark_dynamic(built.ends, 0)
            self._spans.append(built)
        return self._spans[0]

    def get_or_build(self, key: Hashable, build: Callable[[Documents], T]) -> T:
        """Return another module's layout, which `build` derives from documents in host memory, once
        per key."""
        if key not in self._derived:
            self._derived[key] = build(self.host or self)
        layout: T = self._derived[key]
        return layout

    def prepare(
        self, chunks: Iterable[int], *, spans: bool = False, compiled: bool = False
    ) -> None:
        """Build layouts in advance: their sizes depend on the data, which a compiler cannot see.

        If `compiled`, sizes take few values, because each size has its own graphs.
        """
        for chunk in chunks:
            self.aligned(chunk, compiled=compiled)
        if spans:  # under context parallelism, attention is over whole rows
            (self.full_rows or self).spans(compiled=compiled)

    def aligned(self, chunk: int, *, compiled: bool = False) -> Aligned:
        """Return the layout in which every document begins at a multiple of `chunk`."""
        if chunk not in self._layouts:
            built = Aligned.build(self.host or self, chunk, compiled=compiled)
            self._layouts[chunk] = built.to(self.positions.device)
        return self._layouts[chunk]


def check_cu_seqlens(cu_seqlens: Tensor, shape: tuple[int, int]) -> None:
    """Raise ConfigError unless these are document boundaries in rows with this shape."""
    rows, length = shape
    total = rows * length
    problems = []
    if min(rows, length) < 1:
        problems.append(f"the rows are {rows} × {length}: at least one row of one token is needed")
    elif cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point() or not len(cu_seqlens):
        actual = f"{tuple(cu_seqlens.shape)} of {cu_seqlens.dtype}"
        problems.append(f"it must be one dimension of integers, not {actual}")
    else:
        first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
        falls = (cu_seqlens.diff() < 0).nonzero().flatten()
        if first != 0:
            problems.append(f"it begins with {first}, not with 0")
        if last != total:
            problems.append(f"it ends with {last}, and {rows} × {length} tokens end at {total}")
        if len(falls):
            place = int(falls[0])
            pair = f"{int(cu_seqlens[place])}, {int(cu_seqlens[place + 1])}"
            problems.append(f"it falls at index {place}: {pair}")
    if problems:
        raise ConfigError(
            "cu_seqlens",
            [ConfigProblem("", problem) for problem in problems],
            hint="pass the ends of the documents in the flattened rows, from 0 to rows · length",
        )


@dataclass(frozen=True)
class Aligned:
    """Rows spread out so that no chunk holds two documents.

    Padding is less than a chunk per document, plus at most a sixteenth, so that the number of
    chunks takes few values. (In a compiled model plus at most a quarter, or twice the padding, so
    that it takes at most nine values with 32-token chunks.) A chunk either begins its document, and
    no state enters it, or continues the previous chunk.
    """

    chunk: int
    source: Tensor
    """int64 [rows, chunks · chunk]: each position's source column; `length` means padding."""
    place: Tensor
    """int64 [rows, length]: each column's position."""
    continues: Tensor
    """bool [rows, chunks]: True if the chunk continues the previous chunk's document."""

    @classmethod
    def build(cls, documents: Documents, chunk: int, *, compiled: bool = False) -> Aligned:
        starts = documents.segment_starts()
        rows, length = starts.shape
        column = torch.arange(length, device=starts.device).expand(rows, length)
        begins = torch.where(starts, column, 0).cummax(dim=1).values
        # Pad the document before each start to whole chunks.
        previous = column[:, 1:] - begins[:, :-1]
        padding = torch.where(starts[:, 1:], -previous % chunk, 0)
        place = column + F.pad(padding, (1, 0)).cumsum(dim=1)
        needed, fewest = int(place.max()) // chunk + 1, -(-length // chunk)
        if compiled and needed > fewest:  # padding is a quarter of the row, or twice that, …
            step = max(1, fewest // 4)
            chunks = fewest + step * power_of_two(-(-(needed - fewest) // step))
        else:
            step = max(1, length // chunk // 16)
            chunks = -(-needed // step) * step
        source = torch.full((rows, chunks * chunk), length, device=starts.device)
        source.scatter_(1, place, column)
        # A chunk that starts at position 0 has no incoming state; a row may continue a document.
        fresh = torch.zeros(rows, chunks, dtype=torch.int64, device=starts.device)
        fresh.scatter_add_(1, place // chunk, (documents.positions == 0).long())
        return cls(chunk, source, place, fresh == 0)

    def to(self, device: torch.device) -> Aligned:
        tensors = (self.source, self.place, self.continues)
        return Aligned(self.chunk, *(copy_async(tensor, device) for tensor in tensors))

    def spread(self, x: Tensor) -> Tensor:
        """[rows, length, width] → [rows, chunks, chunk, width]; padding is zero."""
        padded = F.pad(x, (0, 0, 0, 1))
        index = self.source.unsqueeze(-1).expand(-1, -1, x.shape[-1])
        chunks: Tensor = padded.gather(1, index).unflatten(1, (-1, self.chunk))
        return chunks

    def collect(self, chunks: Tensor) -> Tensor:
        """[rows, chunks, chunk, width] → [rows, length, width]."""
        index = self.place.unsqueeze(-1).expand(-1, -1, chunks.shape[-1])
        return chunks.flatten(1, 2).gather(1, index)


@dataclass(frozen=True)
class Buckets:
    """One row per document; a bucket holds documents with similar lengths.

    Documents with lengths in (2ⁿ⁻¹, 2ⁿ] share a bucket. Its rows are as long as the longest
    document, rounded up by at most 2ⁿ/8: sizes with fast transforms.
    """

    sources: list[Tensor]
    """For each bucket int64 [documents, size]: indices into the flattened rows; rows·length means
    padding."""
    place: Tensor
    """int64 [rows · length]: the token's position in the concatenated buckets."""

    @classmethod
    def build(cls, documents: Documents) -> Buckets:
        starts = documents.segment_starts().flatten()
        total = starts.numel()
        begins = starts.nonzero().squeeze(1)
        lengths = torch.diff(begins, append=begins.new_tensor([total]))
        longest = int(lengths.max())
        sources = []
        size, smaller = 1, 0
        while smaller < longest:
            chosen = (lengths > smaller) & (lengths <= size)
            if bool(chosen.any()):
                step = -(-size // 8)
                width = -(-int(lengths[chosen].max()) // step) * step
                column = torch.arange(width, device=starts.device)
                index = begins[chosen, None] + column
                sources.append(torch.where(column < lengths[chosen, None], index, total))
            size, smaller = size * 2, size
        everywhere = torch.cat([source.flatten() for source in sources])
        place = torch.empty(total + 1, dtype=torch.int64, device=starts.device)
        place[everywhere] = torch.arange(len(everywhere), device=starts.device)
        return cls(sources, place[:-1])

    def to(self, device: torch.device) -> Buckets:
        sources = [copy_async(source, device) for source in self.sources]
        return Buckets(sources, copy_async(self.place, device))

    def spread(self, x: Tensor) -> list[Tensor]:
        """[rows, length, …] → [documents, size, …] for each bucket; padding is zero."""
        flat = x.flatten(0, 1)
        padded = torch.cat([flat, flat.new_zeros(1, *flat.shape[1:])])
        return [padded[source] for source in self.sources]

    def collect(self, buckets: list[Tensor], rows: int) -> Tensor:
        """Reverse `spread`."""
        flat = torch.cat([bucket.flatten(0, 1) for bucket in buckets])
        tokens: Tensor = flat[self.place].unflatten(0, (rows, -1))
        return tokens


@dataclass(frozen=True)
class Spans:
    """Documents as ranges in the flattened rows."""

    ends: Tensor
    """int32 [documents + 1]: 0, then every document's end. Empty documents at the end round their
    number up to a power of two."""
    longest: int
    """Upper bound on document lengths, a power of two. In a compiled model it is at least length/8:
    each value has its own graphs."""

    @classmethod
    def build(cls, documents: Documents, *, compiled: bool = False) -> Spans:
        length = documents.positions.shape[1]
        starts = documents.segment_starts().flatten()
        begins = starts.nonzero().squeeze(1)
        ends = torch.cat([begins, begins.new_tensor([starts.numel()])])
        longest = int(ends.diff().max())
        if compiled:
            longest = max(longest, length // 8)
        # cuDNN has a plan for each number of documents, and builds one in a tenth of a second.
        total = ends[-1:]
        missing = power_of_two(len(begins)) - len(begins)
        return cls(torch.cat([ends, total.expand(missing)]).int(), power_of_two(longest))

    @classmethod
    def of_rows(cls, x: Tensor) -> Spans:
        """Return the rows of x [rows, length, …], each a document."""
        rows, length = x.shape[:2]
        ends = torch.arange(rows + 1, dtype=torch.int32, device=x.device) * length
        return cls(ends, power_of_two(length))

    def to(self, device: torch.device) -> Spans:
        return Spans(copy_async(self.ends, device), self.longest)


def plain_layout(rows: int, length: int, chunk: int, device: torch.device) -> Aligned:
    """Return the layout for rows that hold a single document."""
    chunks = -(-length // chunk)
    column = torch.arange(chunks * chunk, device=device).clamp(max=length)
    # The first chunk too: it may continue a state from before the row.
    continues = torch.ones(rows, chunks, dtype=torch.bool, device=device)
    return Aligned(
        chunk,
        column.expand(rows, -1),
        column[:length].expand(rows, -1),
        continues,
    )


def power_of_two(number: int) -> int:
    """Round up to a power of two."""
    return 1 << (number - 1).bit_length()


def copy_async(x: Tensor, device: torch.device) -> Tensor:
    """Copy x to a device; copies to a GPU are asynchronous."""
    if device.type != "cuda" or x.is_cuda:
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)
