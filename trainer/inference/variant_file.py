"""The file of scored variants, Parquet or TSV: put together from parts in a folder beside it."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow.csv as pc
import pyarrow.parquet as pq

from ...console.errors import InputError, StorageError, file_fault
from ...dataplane.storage.atomic import replacing
from ..folders.request_folder import RequestFolder
from .parts import PREFIX, list_parts, resume
from .variants import SCHEMA

KIND = "scoring"
FORMATS = (".parquet", ".tsv")


class VariantFile:
    """Destination of a command, and the folder of its finished parts."""

    def __init__(self, out: str) -> None:
        self.out = Path(out)
        self.folder = RequestFolder(f"{out}.parts", KIND, before=(PREFIX,))
        if self.out.suffix not in FORMATS:
            raise InputError(
                f"{out} is neither a .parquet nor a .tsv file", hint="--out scores.parquet"
            )

    def check_free(self) -> None:
        """Raise if the file exists, and no part of a request that may go on."""
        if self.out.exists() and not self.folder.request.exists():
            raise InputError(f"{self.out} exists", hint="choose another --out, or remove it")

    @contextlib.contextmanager
    def begun(self, request: Mapping[str, Any]) -> Iterator[int]:
        """Hold the folder's lock. Yield the number of alleles that earlier starts of the same
        request have scored."""
        self.check_free()
        with self.folder.locked():
            if self.folder.read_stored(request) is None:
                self.folder.store(request)
            yield resume(self.folder.root)

    def finish(self) -> None:
        """Write the file from the parts, then remove their folder."""
        files = list_parts(self.folder.root)[1]
        try:
            with replacing(self.out) as file:
                if self.out.suffix == ".tsv":
                    file.write("\t".join([*SCHEMA.names]).encode() + b"\n")
                    options = pc.WriteOptions(
                        include_header=False, delimiter="\t", quoting_style="none"
                    )
                    with pc.CSVWriter(file, SCHEMA, write_options=options) as writer:
                        for part in files:
                            writer.write_table(pq.read_table(part, schema=SCHEMA))
                else:
                    with pq.ParquetWriter(file, SCHEMA) as writer:
                        for part in files:
                            writer.write_table(pq.read_table(part, schema=SCHEMA))
        except OSError as error:
            reason, hint = file_fault(error)
            raise StorageError(f"cannot write {self.out}: {reason}", hint=hint) from None
        shutil.rmtree(self.folder.root)
