"""Arrow files with compressed buffers, as Feather writes them. Tokens cannot be read in place, so a
reader decompresses the file once into a flat form.

    magic: 8 bytes | documents: int64 | token offsets: (documents + 1) × int64 | tokens

The flat form holds plain numbers, so every pyarrow version gives the same bytes.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from ...console.errors import InputError, IntegrityError
from .arrow_ipc import STREAM_MARK, is_list
from .format import Reader, ShardLayout

MAGIC = b"headrace"
HEADER_BYTES = len(MAGIC) + 8


def flatten(where: str, packed: bytes, column: str) -> bytes:
    """Return the flat form of a compressed Arrow file."""
    source = pa.BufferReader(packed)
    lengths, values = [np.zeros(1, np.int64)], []
    try:
        if packed.startswith(STREAM_MARK):
            batches = pa.ipc.open_stream(source)
        else:
            file = pa.ipc.open_file(source)
            batches = map(file.get_batch, range(file.num_record_batches))
        for batch in batches:
            array = batch.column(column)
            column_values = array
            if is_list(array.type):
                if array.null_count:
                    raise InputError(f"the column `{column}` has nulls among its ids", where=where)
                lengths.append(np.asarray(array.value_lengths(), np.int64))
                column_values = array.flatten()
            else:
                lengths.append(np.array([len(array)], np.int64))
            if column_values.null_count:
                raise InputError(f"the column `{column}` has nulls among its ids", where=where)
            values.append(np.ascontiguousarray(column_values.to_numpy()).tobytes())
    except (pa.ArrowInvalid, KeyError, OSError) as error:
        raise IntegrityError(f"{where} cannot be decompressed: {error}") from None
    starts = np.cumsum(np.concatenate(lengths))
    return b"".join([MAGIC, np.int64(len(starts) - 1).tobytes(), starts.tobytes(), *values])


def is_flat(read: Reader, size: int) -> bool:
    """Return True if a file is in the flat form."""
    return read(0, min(len(MAGIC), size)) == MAGIC


def flat_layout(read: Reader) -> ShardLayout:
    """Return the layout of a flat form, which is a single run."""
    num_documents = int(np.frombuffer(read(len(MAGIC), HEADER_BYTES), np.int64)[0])
    header_end = HEADER_BYTES + 8 * (num_documents + 1)
    document_starts = np.frombuffer(read(HEADER_BYTES, header_end), np.int64)
    return ShardLayout(
        document_starts=document_starts,
        run_tokens=document_starts[[0, -1]],
        run_bytes=np.array([header_end], np.int64),
    )
