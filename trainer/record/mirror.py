"""Copies of a run's records in a store, where `trainer board s3://…` shows the run while it trains.

A store cannot append: a file is copied whole. It is copied again when it has grown by a part of its
size, so that all copies of a long file together have no more than a fixed multiple of its bytes.
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
"""Growth of a file after which it is copied again."""
KINDS = (".yaml", ".json", ".jsonl")


class Mirror:
    """The copies of one run, below a URL, in a folder of the run's name."""

    def __init__(self, folder: RunFolder, url: str) -> None:
        self.folder = folder
        self.url = storage.join(url, folder.root.resolve().name)
        self.copied: dict[str, int] = {}
        """Bytes of the last copy of each file."""
        self.failed = False

    def update(self, *, whole: bool = False) -> None:
        """Copy the files that have grown enough; with `whole`, each that has changed, and the
        report. A store that does not answer is no reason to end a run."""
        try:
            for file in self._files(with_report=whole):
                self._copy(file, whole)
            self.failed = False
        except (UserError, OSError) as error:
            if not self.failed:
                log.warning("the run is not copied to %s: %s; trying again", self.url, error)
            self.failed = True

    def _files(self, *, with_report: bool) -> Iterator[Path]:
        """Yield the files; run.yaml, which marks a run, is last."""
        root = self.folder.root
        names = {path.name for path in root.iterdir() if path.suffix in KINDS}
        # Names with two dots are of lines that were cut off, and of files half written.
        yield from (root / name for name in sorted(names - {RUN}) if name.count(".") == 1)
        if with_report and (root / REPORT).exists():
            yield root / REPORT
        yield root / RUN

    def _copy(self, file: Path, whole: bool) -> None:
        size, last = file.stat().st_size, self.copied.get(file.name)
        if last is not None and (size == last or (last < size < GROWN * last and not whole)):
            return
        link = self.folder.root / f".{file.name}.{uuid.uuid4().hex[:8]}.tmp"
        os.link(file, link)  # `put` removes what it has sent
        try:
            storage.put(link, storage.join(self.url, file.name))
        finally:
            link.unlink(missing_ok=True)
        self.copied[file.name] = size
