"""Arrow files whose buffers are compressed, as Feather writes them: their tokens cannot be read in
place, so that a reader unpacks the file once into a flat form.

    mark: 8 bytes | documents: int64 | token offsets: (documents + 1) × int64 | tokens

The flat form has the numbers alone, so that every version of pyarrow gives the same bytes.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from ...console.errors import InputError, IntegrityError
from .arrow_ipc import STREAM, is_list
from .format import Reader, ShardLayout

MARK = b"headrace"
HEAD = len(MARK) + 8


def flatten(where: str, packed: bytes, column: str) -> bytes:
    """Return the flat form of a file that holds the documents of a column."""
    source = pa.BufferReader(packed)
    lengths, parts = [np.zeros(1, np.int64)], []
    try:
        stream = packed.startswith(STREAM)
        opened = pa.ipc.open_stream(source) if stream else pa.ipc.open_file(source)
        count = None if stream else opened.num_record_batches
        batches = opened if count is None else map(opened.get_batch, range(count))
        for batch in batches:
            rows = batch.column(column)
            values = rows
            if is_list(rows.type):
                if rows.null_count:
                    raise InputError(f"the column `{column}` has nulls among its ids", where=where)
                lengths.append(np.asarray(rows.value_lengths(), np.int64))
                values = rows.flatten()
            else:
                lengths.append(np.array([len(rows)], np.int64))
            if values.null_count:
                raise InputError(f"the column `{column}` has nulls among its ids", where=where)
            parts.append(np.ascontiguousarray(values.to_numpy()).tobytes())
    except (pa.ArrowInvalid, KeyError, OSError) as error:
        raise IntegrityError(f"{where} cannot be decompressed: {error}") from None
    starts = np.cumsum(np.concatenate(lengths))
    return b"".join([MARK, np.int64(len(starts) - 1).tobytes(), starts.tobytes(), *parts])


def is_flat(read: Reader, size: int) -> bool:
    """Return True if these are the bytes of a flat form."""
    return read(0, min(len(MARK), size)) == MARK


def flat_layout(read: Reader) -> ShardLayout:
    """Return the layout of a flat form, all of whose tokens are one run."""
    documents = int(np.frombuffer(read(len(MARK), HEAD), np.int64)[0])
    end = HEAD + 8 * (documents + 1)
    starts = np.frombuffer(read(HEAD, end), np.int64)
    return ShardLayout(
        document_starts=starts,
        run_tokens=starts[[0, -1]],
        run_bytes=np.array([end], np.int64),
    )
