"""Write and read tensors: torch's distributed checkpoint files, keyed by logical name.

The planners below pass fragments to torch's writer and reader box by box: nothing is gathered, and
reading copies nothing. Any tool that reads torch's format reads these files
(`python -m torch.distributed.checkpoint.format_utils dcp_to_torch …`).
"""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ...console.errors import CheckpointError, StorageError, UserError, file_fault
from ...dataplane.storage import storage
from .fragments import Box, Fragment
from .kinds import MASTER, tensor_key
from .metadata import METADATA, parse
from .store import TENSORS, StoredFile

READERS = 8
"""Boxes that a rank reads concurrently: in a store, a box is a request."""


def write(
    folder: Path,
    fragments: Sequence[Fragment],
    group: dist.ProcessGroup,
    report: Callable[[int], None] = lambda size: None,
) -> list[StoredFile]:
    """Write the fragments that this rank stores, and `report` the bytes after every write. Return
    this rank's files. Collective."""
    writer = FileSystemWriter(folder, single_file_per_rank=True, per_thread_copy_ahead=0)
    files = HashingFiles(report)
    writer.fs = files
    target = f"a checkpoint in {folder.parent.parent}"
    try:
        with converting_errors("write", target):
            metadata = save_tensors(
                {}, storage_writer=writer, planner=_SavePlanner(fragments), process_group=group
            )
    except UserError as error:
        if files.failure is None:
            raise
        raise convert_error(files.failure, "write", target) from error
    if dist.get_rank(group) == 0:
        _check_complete(metadata, folder)
    return [
        # torch renames its metadata when all ranks have written.
        StoredFile(f"{TENSORS}/{file.removesuffix('.tmp')}", sink.size, sink.digest.hexdigest())
        for file, sink in files.written.items()
    ]


def read(
    folder: Path | str, fragments: Sequence[Fragment], group: dist.ProcessGroup | None
) -> None:
    """Fill the fragments from a checkpoint, whatever layout saved it. Collective."""
    reader = BoxReader(str(folder))
    try:
        with converting_errors("read", str(folder).rpartition("/")[0]):
            load_tensors(
                {}, storage_reader=reader, planner=LoadFragments(fragments), process_group=group
            )
    except UserError as error:
        if reader.failure is None:
            raise
        raise reader.failure from error


class StoredTensors:
    """A checkpoint's tensors, read by a single process."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.reader = BoxReader(folder)
        self.metadata = self.reader.read_metadata()
        self.reader.set_up_storage_reader(self.metadata, is_coordinator=True)

    def shapes(self, kind: str) -> dict[str, tuple[int, ...]]:
        """Return, by parameter, the shapes of its tensors with this kind."""
        prefix = tensor_key(kind, "")
        return {
            key.removeprefix(prefix): tuple(item.size)
            for key, item in self.metadata.state_dict_metadata.items()
            if key.startswith(prefix) and isinstance(item, TensorStorageMetadata)
        }

    def read(self, fragments: Sequence[Fragment]) -> None:
        planner = LoadFragments(fragments)
        planner.set_up_planner({}, self.metadata, is_coordinator=True)
        with converting_errors("read", self.folder.rpartition("/")[0]):
            self.reader.read_data(planner.create_local_plan(), planner)


class BoxReader(StorageReader):
    """Reads a stored box with a single ranged read, from disk or from a store."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.locations: dict[MetadataIndex, Any] = {}
        self.failure: UserError | None = None
        """The failure to read the index, for which torch raises a different error."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        file = storage.join(self.folder, METADATA)
        try:
            return parse(storage.read(file), file)
        except UserError as error:
            self.failure = error
            raise

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any
    ) -> None:
        self.locations = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_box: dict[MetadataIndex, list[ReadItem]] = {}
        for item in plan.items:
            by_box.setdefault(item.storage_index, []).append(item)

        def fill(index: MetadataIndex) -> None:
            box = self._read_box(index)
            for item in by_box[index]:
                ranges = zip(item.storage_offsets, item.lengths, strict=True)
                region = tuple(slice(offset, offset + size) for offset, size in ranges)
                target = planner.resolve_tensor(item).detach()
                target.copy_(box[region])
                planner.commit_tensor(item, target)

        with ThreadPoolExecutor(READERS) as pool:
            list(pool.map(fill, by_box))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_box(self, index: MetadataIndex) -> torch.Tensor:
        location = self.locations[index]
        url = storage.join(self.folder, location.relative_path)
        data = storage.read(url, location.offset, location.offset + location.length)
        box = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        assert isinstance(box, torch.Tensor)
        return box

    def reset(self, checkpoint_id: Any = None) -> None:
        self.locations = {}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class _SavePlanner(DefaultSavePlanner):
    """Plans this rank's writes, a box each."""

    def __init__(self, fragments: Sequence[Fragment]) -> None:
        super().__init__()
        self.views: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        self.items: list[WriteItem] = []
        for fragment in fragments:
            if fragment.writes:
                for box, view in fragment.boxes():
                    self._add(fragment, box, view)

    def _add(self, fragment: Fragment, box: Box, view: torch.Tensor) -> None:
        data = TensorWriteData(
            chunk=_chunk(box),
            properties=TensorProperties(dtype=view.dtype),
            size=torch.Size(fragment.shape),
        )
        index = MetadataIndex(fragment.key, box.offsets)
        self.items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        self.views[fragment.key, box.offsets] = view

    def create_local_plan(self) -> SavePlan:
        # `planner_data` maps keys to paths in a nested state: ours is flat.
        paths = {item.index.fqn: (item.index.fqn,) for item in self.items}
        self.plan = SavePlan(self.items, planner_data=paths)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self.views[index.fqn, tuple(index.offset or ())]


class LoadFragments(DefaultLoadPlanner):
    """Plans reads straight into the engine's memory."""

    def __init__(self, fragments: Sequence[Fragment]) -> None:
        super().__init__()
        self.fragments = fragments
        self.views: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        chunks_by_key: dict[str, list[ChunkStorageMetadata]] = {}
        for fragment in self.fragments:
            stored = self.metadata.state_dict_metadata.get(fragment.key)
            if not isinstance(stored, TensorStorageMetadata):
                weights = (
                    tensor_key(MASTER, fragment.parameter) in self.metadata.state_dict_metadata
                )
                raise CheckpointError(
                    f"it holds no {fragment.key}"
                    f"{', but the weights: another optimizer saved it' if weights else ''}",
                    hint=_ANOTHER_OPTIMIZER if weights else _ANOTHER_MODEL,
                )
            if tuple(stored.size) != fragment.shape:
                raise CheckpointError(
                    f"its {fragment.key} has shape {list(stored.size)}, the model's has "
                    f"{list(fragment.shape)}",
                    hint=_ANOTHER_MODEL,
                )
            for box, view in fragment.boxes():
                chunks_by_key.setdefault(fragment.key, []).append(_chunk(box))
                self.views[fragment.key, box.offsets] = view
        items: list[ReadItem] = []
        for key, chunks in chunks_by_key.items():
            stored = cast(TensorStorageMetadata, self.metadata.state_dict_metadata[key])
            items += create_read_items_for_chunk_list(key, stored, chunks)
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self.views[index.fqn, tuple(index.offset or ())]


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))


def _check_complete(metadata: Metadata, folder: Path) -> None:
    """Raise if a tensor would miss elements. torch checks this only for several ranks."""
    for key, item in metadata.state_dict_metadata.items():
        assert isinstance(item, TensorStorageMetadata)
        stored = sum(math.prod(chunk.sizes) for chunk in item.chunks)
        if stored != math.prod(item.size):
            raise CheckpointError(
                f"{key} would be stored with {stored:,} of its {math.prod(item.size):,} elements",
                where=str(folder),
            )


class HashingFiles(FileSystem):
    """Files that hash their bytes while they are written."""

    def __init__(self, report: Callable[[int], None]) -> None:
        self.report = report
        self.written: dict[str, _HashingStream] = {}
        self.failure: OSError | None = None
        """The disk's error, which torch's serializer hides behind a different one."""

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
        # Python closes a stream that it collects, and flushes it: the file must still be open.
        with Path(path).open(mode) as file, closing(_HashingStream(file, self)) as stream:
            self.written[Path(path).name] = stream
            yield stream


class _HashingStream(io.IOBase):
    """Writes forward only: a hash cannot seek."""

    def __init__(self, file: Any, owner: HashingFiles) -> None:
        self.file = file
        self.owner = owner
        self.digest = hashlib.sha256()
        self.size = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        try:
            self.file.write(view)
        except OSError as error:
            self.owner.failure = error
            raise
        self.digest.update(view)
        self.size += len(view)
        self.owner.report(len(view))
        return len(view)

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        self.file.flush()

    def fileno(self) -> int:
        return int(self.file.fileno())


@contextmanager
def converting_errors(verb: str, target: str) -> Iterator[None]:
    """Convert errors from torch or the disk, on any rank, into user errors."""
    try:
        yield
    except CheckpointException as error:  # a BaseException: the failures on all ranks
        rank, (cause, _) = next(iter(error.failures.items()))
        raise convert_error(cause, verb, target, rank) from error
    except (OSError, RuntimeError, ValueError) as error:
        raise convert_error(error, verb, target) from error


def convert_error(cause: BaseException, verb: str, target: str, rank: int = 0) -> UserError:
    if isinstance(cause, UserError):
        cause.where = cause.where or target
        return cause
    where = f"rank {rank}" if rank else None
    if isinstance(cause, OSError):
        reason, hint = file_fault(cause)
        return StorageError(f"cannot {verb} {target}: {reason}", where=where, hint=hint)
    reason = f"{type(cause).__name__}: {cause}"
    return CheckpointError(f"cannot {verb} {target}: {reason}", where=where)


_ANOTHER_MODEL = "load it into the model that it was saved from (model.yaml of its run)"
_ANOTHER_OPTIMIZER = (
    "use the optimizer.kind of the run that saved it, or take its weights alone (init_from without "
    "moments)"
)
