"""Packed rows: the documents of each row, and the layouts in which operators isolate them.

Everything follows from one tensor: for each token, the number of tokens of its document before it.
A token sees j steps back if its position is at least j. This also holds if a row is a part of a
longer sequence (its first position is then not zero), as under context parallelism and in
generation.

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
    """Documents of a batch of rows; layouts are built once and kept."""

    positions: Tensor
    """int64 [rows, length]: number of tokens of its document before each token."""
    whole: Documents | None = field(default=None, repr=False, compare=False)
    """Documents of the whole rows, if these are those of one rank's part (context parallelism)."""
    host: Documents | None = field(default=None, repr=False, compare=False)
    """Copy in host memory, if these are on a GPU: sizes are computed there, without waiting for the
    GPU."""
    _longer: dict[int, Documents] = field(default_factory=dict, repr=False, compare=False)
    _layouts: dict[int, Aligned] = field(default_factory=dict, repr=False, compare=False)
    _buckets: list[Buckets] = field(default_factory=list, repr=False, compare=False)
    _spans: list[Spans] = field(default_factory=list, repr=False, compare=False)
    _others: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor, shape: tuple[int, int]) -> Documents:
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

    def part(self, axis: Axis) -> Documents:
        """Documents of this rank's part of the rows, under context parallelism."""
        if axis.size == 1:
            return self
        return Documents(self.positions[:, axis.part(self.positions.shape[1])], self)

    def to(self, device: torch.device) -> Documents:
        """Copy to a device."""
        if self.positions.device == device:
            return self
        whole = None if self.whole is None else self.whole.to(device)
        return Documents(moved(self.positions, device), whole, self)

    @property
    def index(self) -> Tensor:
        """int64 [rows, length]: number of the document in the batch."""
        starts = self.segment_starts().flatten()
        return (starts.cumsum(0) - 1).view_as(self.positions)

    def segment_starts(self) -> Tensor:
        """bool [rows, length]: True where a document or the row begins."""
        starts = self.positions == 0
        starts[:, 0] = True
        return starts

    def lengthened(self, before: int) -> Documents:
        """Documents with `before` tokens of history in front of each row.

        Positions are negative before the start of the first document: the history must be zero
        there.
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
        """Ends of the documents, for attention that keeps them apart by itself."""
        if not self._spans:
            built = Spans.build(self.host or self, compiled=compiled)
            built = built.to(self.positions.device)
            if compiled:
                torch._dynamo.mark_dynamic(built.ends, 0)
            self._spans.append(built)
        return self._spans[0]

    def kept(self, key: Hashable, build: Callable[[Documents], T]) -> T:
        """Return a layout of another module, which `build` derives from documents in host memory;
        it is built once for each key."""
        if key not in self._others:
            self._others[key] = build(self.host or self)
        layout: T = self._others[key]
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
            (self.whole or self).spans(compiled=compiled)

    def aligned(self, chunk: int, *, compiled: bool = False) -> Aligned:
        """Layout in which each document begins at a multiple of `chunk`."""
        if chunk not in self._layouts:
            built = Aligned.build(self.host or self, chunk, compiled=compiled)
            self._layouts[chunk] = built.to(self.positions.device)
        return self._layouts[chunk]


def check_cu_seqlens(cu_seqlens: Tensor, shape: tuple[int, int]) -> None:
    """Raise ConfigError unless these are boundaries of documents in rows of this shape."""
    rows, length = shape
    total = rows * length
    problems = []
    if min(rows, length) < 1:
        problems.append(f"the rows are {rows} × {length}: at least one row of one token is needed")
    elif cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point() or not len(cu_seqlens):
        what = f"{tuple(cu_seqlens.shape)} of {cu_seqlens.dtype}"
        problems.append(f"it must be one dimension of integers, not {what}")
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
            [ConfigProblem("", what) for what in problems],
            hint="pass the ends of the documents in the flattened rows, from 0 to rows · length",
        )


@dataclass(frozen=True)
class Aligned:
    """Rows spread out so that no chunk holds two documents.

    The cost is less than one chunk of padding for each document, and at most a sixteenth more, so
    that the number of chunks takes few values. (In a compiled model at most a quarter more, or
    twice the padding, so that it takes at most nine values with chunks of 32.) A chunk is either
    the first of its document, and no state enters it, or it continues the chunk before.
    """

    chunk: int
    source: Tensor
    """int64 [rows, chunks · chunk]: source column of each position; `length` means padding."""
    place: Tensor
    """int64 [rows, length]: position of each column."""
    continues: Tensor
    """bool [rows, chunks]: True if the chunk continues the document of the chunk before."""

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
        return Aligned(self.chunk, *(moved(tensor, device) for tensor in tensors))

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
    """Each document in its own row; a bucket holds documents of similar length.

    Documents with lengths in (2ⁿ⁻¹, 2ⁿ] share a bucket. Its rows are as long as the longest,
    rounded up by at most an eighth of 2ⁿ: sizes whose transforms are fast.
    """

    sources: list[Tensor]
    """For each bucket int64 [documents, size]: indices into the flattened rows; rows·length means
    padding."""
    place: Tensor
    """int64 [rows · length]: position of each token in the concatenated buckets."""

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
        sources = [moved(source, device) for source in self.sources]
        return Buckets(sources, moved(self.place, device))

    def spread(self, x: Tensor) -> list[Tensor]:
        """[rows, length, …] → [documents, size, …] for each bucket; padding is zero."""
        flat = x.flatten(0, 1)
        padded = torch.cat([flat, flat.new_zeros(1, *flat.shape[1:])])
        return [padded[source] for source in self.sources]

    def collect(self, buckets: list[Tensor], rows: int) -> Tensor:
        """The reverse of `spread`."""
        flat = torch.cat([bucket.flatten(0, 1) for bucket in buckets])
        whole: Tensor = flat[self.place].unflatten(0, (rows, -1))
        return whole


@dataclass(frozen=True)
class Spans:
    """Documents as ranges of the flattened rows."""

    ends: Tensor
    """int32 [documents + 1]: 0, and the end of each document."""
    longest: int
    """Upper bound of the tokens of a document, a power of two. In a compiled model it is at least
    an eighth of the row: each value has its own graphs."""

    @classmethod
    def build(cls, documents: Documents, *, compiled: bool = False) -> Spans:
        length = documents.positions.shape[1]
        starts = documents.segment_starts().flatten()
        begins = starts.nonzero().squeeze(1)
        ends = torch.cat([begins, begins.new_tensor([starts.numel()])])
        longest = int(ends.diff().max())
        if compiled:
            longest = max(longest, length // 8)
        return cls(ends.int(), power_of_two(longest))

    def to(self, device: torch.device) -> Spans:
        return Spans(moved(self.ends, device), self.longest)


def plain_layout(rows: int, length: int, chunk: int, device: torch.device) -> Aligned:
    """Layout of rows of one document each."""
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
    """Return the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def moved(x: Tensor, device: torch.device) -> Tensor:
    """Copy x to a device; copies to a GPU are asynchronous."""
    if device.type != "cuda" or x.is_cuda:
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)
