"""Copy a run's records to a store, where `trainer board s3://…` shows the run while it trains.

A store cannot append, so files are copied whole. A file is copied again when it has grown by a
fraction of its size: all copies together transfer at most a fixed multiple of its bytes.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

from ...console.errors import UserError
from ...console.log import get_logger
from ...dataplane.storage import storage
from ..folders.folder import REPORT, RUN, RunFolder

log = get_logger(__name__)

GROWN = 1.02
"""Growth factor after which a file is copied again."""
KINDS = (".yaml", ".json", ".jsonl")


class Mirror:
    """Copies a run's files into the folder with the run's name below a URL."""

    def __init__(self, folder: RunFolder, url: str) -> None:
        self.folder = folder
        self.url = storage.join(url, folder.root.resolve().name)
        self.copied: dict[str, int] = {}
        """Bytes in the last copy, by file name."""
        self.failed = False

    def update(self, *, final: bool = False) -> None:
        """Copy the files that have grown enough. A `final` update copies all changed files and the
        report. A failure is logged: a store that does not answer must not end a run."""
        try:
            for file in self._files(with_report=final):
                self._copy(file, final)
            self.failed = False
        except (UserError, OSError) as error:
            if not self.failed:
                log.warning("the run is not copied to %s: %s; trying again", self.url, error)
            self.failed = True

    def _files(self, *, with_report: bool) -> Iterator[Path]:
        """Yield the files. run.yaml, which marks a run, is last."""
        root = self.folder.root
        files = sorted(path for path in root.iterdir() if path.suffix in KINDS)
        # Two dots: lines that were cut off, or a file that is being written.
        yield from (file for file in files if file.name != RUN and file.name.count(".") == 1)
        if with_report and (root / REPORT).exists():
            yield root / REPORT
        yield root / RUN

    def _copy(self, file: Path, final: bool) -> None:
        size, copied = file.stat().st_size, self.copied.get(file.name)
        if copied is not None and (
            size == copied or (copied < size < GROWN * copied and not final)
        ):
            return
        link = self.folder.root / f".{file.name}.{uuid.uuid4().hex[:8]}.tmp"
        os.link(file, link)  # `put` removes its argument
        try:
            storage.put(link, storage.join(self.url, file.name))
        finally:
            link.unlink(missing_ok=True)
        self.copied[file.name] = size
