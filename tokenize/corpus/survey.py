"""Survey a corpus before a build: formats, size, and whether records are conversations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..chat.config import ChatFields
from ..files.input_file import File
from ..sources import corpus_format, cut
from ..sources.format import SourceConfig
from .inputs import find_files

COMPRESSION = 4
"""Estimated bytes of text in a byte of a compressed file."""
SLICE_BYTES = 4 << 20


@dataclass(frozen=True)
class CorpusSurvey:
    formats: tuple[str, ...]
    """Formats of the files, without repeats."""
    size: int
    """Bytes of the corpus; those of compressed files are estimated."""
    documents: int
    """Documents that were seen before `max_documents` were."""
    conversations: bool
    """True if the first record of the first file is a conversation."""


def survey_corpus(
    inputs: Sequence[str], config: SourceConfig, max_documents: int = 0
) -> CorpusSurvey:
    """Survey a corpus; raise UserError if it has no files that can be read.

    At most `max_documents` documents and a slice are read.
    """
    files = find_files(inputs, config)
    return CorpusSurvey(
        tuple(dict.fromkeys(file.format for file in files)),
        sum(file.size * (COMPRESSION if file.compression else 1) for file in files),
        _count_documents(files, config, max_documents),
        _has_conversations(files[0], config),
    )


def _count_documents(files: Sequence[File], config: SourceConfig, limit: int) -> int:
    """Count documents and bad records, until there are `limit`."""
    documents = 0
    for file in files:
        for file_slice in cut(file, config, SLICE_BYTES, skip_bad=True):
            for texts in corpus_format(file.format).read(file_slice, config):
                documents += len(texts.positions) + len(texts.problems)
                if documents >= limit:
                    return documents
    return documents


def _has_conversations(file: File, config: SourceConfig) -> bool:
    fields = ChatFields()
    format = corpus_format(file.format)
    slices = cut(file, config, SLICE_BYTES, skip_bad=True)
    if "chat" not in format.settings or not slices:
        return False
    names = (config.text_field, fields.messages, fields.prompt, fields.response)
    kinds = format.field_kinds(slices[0], names)
    if kinds.get(config.text_field):
        return False
    return bool(
        kinds.get(fields.messages) or (kinds.get(fields.prompt) and kinds.get(fields.response))
    )
