"""Packed rows: which tokens belong together, and the layouts in which operators keep them apart.

Everything follows from one tensor: for each token, how many tokens of its own document precede
it. A token sees j steps back if its position is at least j. That holds as well where a row is a
piece of a longer sequence (its first position is then not zero), as under context parallelism
and in generation.

    row        a a a a b b c c c c c        three documents
    positions  0 1 2 3 0 1 0 1 2 3 4
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from .parallel.axes import Axis


@dataclass(frozen=True)
class Documents:
    """The documents of a batch of rows; layouts are made once and kept."""

    positions: Tensor
    """int64 [rows, length]: the number of tokens of its document before each token."""
    whole: Documents | None = field(default=None, repr=False, compare=False)
    """Of the whole rows, where these are a part of each."""
    host: Documents | None = field(default=None, repr=False, compare=False)
    """The same in host memory, where these are a GPU's: sizes are found there, which nobody has to
    wait for."""
    _longer: dict[int, Documents] = field(default_factory=dict, repr=False, compare=False)
    _layouts: dict[int, Aligned] = field(default_factory=dict, repr=False, compare=False)
    _buckets: list[Buckets] = field(default_factory=list, repr=False, compare=False)

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor, shape: tuple[int, int]) -> Documents:
        """From the boundaries in the flattened rows. Every row start is a boundary as well.

        `cu_seqlens` is 0, …, rows·length; repeated values (padding to a fixed size) are allowed.
        """
        rows, length = shape
        starts = torch.zeros(rows * length + 1, dtype=torch.bool, device=cu_seqlens.device)
        starts[cu_seqlens.long()] = True
        starts = starts[:-1].view(rows, length)
        starts[:, 0] = True
        column = torch.arange(length, device=cu_seqlens.device).expand(rows, length)
        return cls(column - torch.where(starts, column, 0).cummax(dim=1).values)

    def part(self, axis: Axis) -> Documents:
        """Our part of the rows, where context parallelism divides them."""
        if axis.size == 1:
            return self
        return Documents(self.positions[:, axis.part(self.positions.shape[1])], self)

    def to(self, device: torch.device) -> Documents:
        """The same on a device."""
        if self.positions.device == device:
            return self
        whole = None if self.whole is None else self.whole.to(device)
        return Documents(_moved(self.positions, device), whole, self)

    @property
    def index(self) -> Tensor:
        """int64 [rows, length]: the number of the document in the batch."""
        starts = self.segment_starts().flatten()
        return (starts.cumsum(0) - 1).view_as(self.positions)

    def segment_starts(self) -> Tensor:
        """bool [rows, length]: where a document, or the row, begins."""
        starts = self.positions == 0
        starts[:, 0] = True
        return starts

    def lengthened(self, before: int) -> Documents:
        """The same with `before` tokens of history in front of each row.

        Where the first document did not begin that far back, the positions there are negative:
        whoever fills the history must put zeros.
        """
        if before not in self._longer:
            past = torch.arange(-before, 0, device=self.positions.device)
            positions = torch.cat([self.positions[:, :1] + past, self.positions], dim=1)
            self._longer[before] = Documents(positions)
        return self._longer[before]

    def buckets(self) -> Buckets:
        """The layout in which each document has a row of its own."""
        if not self._buckets:
            built = Buckets.build(self.host or self)
            self._buckets.append(built.to(self.positions.device))
        return self._buckets[0]

    def prepare(self, chunks: Iterable[int]) -> None:
        """Make layouts beforehand: their sizes depend on the data, which a compiler cannot see."""
        for chunk in chunks:
            self.aligned(chunk)

    def aligned(self, chunk: int) -> Aligned:
        """The layout in which each document begins on a multiple of `chunk`."""
        if chunk not in self._layouts:
            built = Aligned.build(self.host or self, chunk)
            self._layouts[chunk] = built.to(self.positions.device)
        return self._layouts[chunk]


@dataclass(frozen=True)
class Aligned:
    """Rows spread out so that no chunk holds two documents.

    It costs less than a chunk of padding for each document, and at most a sixteenth so that the
    number of chunks takes few values. A chunk is then either the first of its document, and
    nothing flows into it, or it continues the chunk before.
    """

    chunk: int
    source: Tensor
    """int64 [rows, chunks · chunk]: the column that stands here; `length` means padding."""
    place: Tensor
    """int64 [rows, length]: where each column went."""
    continues: Tensor
    """bool [rows, chunks]: the chunk continues the document of the chunk before."""

    @classmethod
    def build(cls, documents: Documents, chunk: int) -> Aligned:
        starts = documents.segment_starts()
        rows, length = starts.shape
        column = torch.arange(length, device=starts.device).expand(rows, length)
        begins = torch.where(starts, column, 0).cummax(dim=1).values
        # The document before a start is as long as the column says; pad it to whole chunks.
        previous = column[:, 1:] - begins[:, :-1]
        padding = torch.where(starts[:, 1:], -previous % chunk, 0)
        place = column + F.pad(padding, (1, 0)).cumsum(dim=1)
        step = max(1, length // chunk // 16)
        chunks = -(-(int(place.max()) // chunk + 1) // step) * step
        source = torch.full((rows, chunks * chunk), length, device=starts.device)
        source.scatter_(1, place, column)
        # A start at position 0 lets nothing in; a row that goes on with a document does.
        fresh = torch.zeros(rows, chunks, dtype=torch.int64, device=starts.device)
        fresh.scatter_add_(1, place // chunk, (documents.positions == 0).long())
        return cls(chunk, source, place, fresh == 0)

    def to(self, device: torch.device) -> Aligned:
        tensors = (self.source, self.place, self.continues)
        return Aligned(self.chunk, *(_moved(tensor, device) for tensor in tensors))

    def spread(self, x: Tensor) -> Tensor:
        """[rows, length, width] → [rows, chunks, chunk, width], zeros where there is padding."""
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
    """Each document in a row of its own, those of like lengths together.

    What is longer than half a power of two and no longer than it is together, in rows as long as
    the longest and rounded up by an eighth of the power at most: sizes whose transforms are fast.
    """

    sources: list[Tensor]
    """int64 [documents, size] each: indices into the flattened rows; rows·length means padding."""
    place: Tensor
    """int64 [rows · length]: where each token went, in the buckets one after the other."""

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
                grain = -(-size // 8)
                width = -(-int(lengths[chosen].max()) // grain) * grain
                column = torch.arange(width, device=starts.device)
                index = begins[chosen, None] + column
                sources.append(torch.where(column < lengths[chosen, None], index, total))
            size, smaller = size * 2, size
        everywhere = torch.cat([source.flatten() for source in sources])
        place = torch.empty(total + 1, dtype=torch.int64, device=starts.device)
        place[everywhere] = torch.arange(len(everywhere), device=starts.device)
        return cls(sources, place[:-1])

    def to(self, device: torch.device) -> Buckets:
        return Buckets([_moved(each, device) for each in self.sources], _moved(self.place, device))

    def spread(self, x: Tensor) -> list[Tensor]:
        """[rows, length, …] → [documents, size, …] of each bucket, zeros where there is padding."""
        flat = x.flatten(0, 1)
        padded = torch.cat([flat, flat.new_zeros(1, *flat.shape[1:])])
        return [padded[source] for source in self.sources]

    def collect(self, parts: list[Tensor], rows: int) -> Tensor:
        """The reverse."""
        flat = torch.cat([part.flatten(0, 1) for part in parts])
        whole: Tensor = flat[self.place].unflatten(0, (rows, -1))
        return whole


def plain_layout(rows: int, length: int, chunk: int, device: torch.device) -> Aligned:
    """The layout of rows that are one document each."""
    chunks = -(-length // chunk)
    column = torch.arange(chunks * chunk, device=device).clamp(max=length)
    continues = torch.ones(rows, chunks, dtype=torch.bool, device=device)  # the first, a state
    return Aligned(
        chunk,
        column.expand(rows, -1),
        column[:length].expand(rows, -1),
        continues,
    )


def _moved(x: Tensor, device: torch.device) -> Tensor:
    """x on a device; on the way to a GPU, nobody waits."""
    if device.type != "cuda" or x.is_cuda:
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)
