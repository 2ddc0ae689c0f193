"""Train a byte-level BPE tokenizer on a sample of a corpus."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from ..console.errors import InputError, MisuseError, run_all
from ..console.log import get_logger
from ..console.progress import Progress, Waiting, format_bytes
from ..dataplane.storage import storage
from ..dataplane.tokenizers.byte import END
from .corpus.documents import DocumentReader
from .corpus.inputs import find_files, store_standard_input
from .corpus.read_stats import ReadStats
from .files.input_file import File
from .sources import cut
from .sources.format import OnError, SourceConfig

log = get_logger(__name__)

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pre-tokenization: contractions, words, groups with up to three digits, punctuation, spaces. Llama
3 and similar models use this pattern."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    inputs: tuple[str, ...]
    """Files, folders, globs or URLs."""
    out: str
    """File for the tokenizer's JSON."""
    vocab_size: int = 32768
    """Number of ids: special tokens, bytes and merges."""
    special_tokens: tuple[str, ...] = (END,)
    """Special tokens; the first one ends documents."""
    sample_bytes: int = 256 << 20
    """Bytes of text to train on, sampled evenly from the whole corpus and held in memory. Equal
    documents count once."""
    source: SourceConfig = field(default_factory=SourceConfig)
    """Settings of reading the corpus."""
    on_error: OnError = "fail"
    """fail: stop at a record that cannot be read; skip: leave it out."""

    def __post_init__(self) -> None:
        min_size = 256 + len(self.special_tokens)
        if self.vocab_size < min_size:
            raise ValueError(
                f"vocab_size is {self.vocab_size}; bytes and special tokens need {min_size}"
            )
        if self.sample_bytes < 1:
            raise ValueError(f"sample_bytes is {self.sample_bytes}; it must be at least 1")


def train(config: TrainConfig) -> Any:
    """Train a tokenizer, save it, and return it as a `tokenizers.Tokenizer`."""
    if storage.is_local(config.out) and storage.local_path(config.out).is_dir():
        raise MisuseError(
            f"{config.out} is a folder", hint="name a file, as in --out FOLDER/bpe.json"
        )
    files, _ = run_all(
        lambda: find_files(config.inputs, config.source, pipe=True),
        lambda: storage.check_writable(config.out, file=True),
    )
    files = store_standard_input(files, config.source)
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        special_tokens=[AddedToken(name, special=True) for name in config.special_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with ExitStack() as stack:
        label = f"counting words and merging, up to {config.vocab_size:,} tokens"
        texts = _feed_trainer(sample(files, config), lambda: stack.enter_context(Waiting(label)))
        tokenizer.train_from_iterator(texts, trainer)
    size = tokenizer.get_vocab_size()
    if size < config.vocab_size:
        log.warning("the sample is small: it gives %d tokens, not %d", size, config.vocab_size)
    storage.write(config.out, tokenizer.to_str(pretty=True).encode())
    return tokenizer


def _feed_trainer(texts: Sequence[bytes], done: Callable[[], object]) -> Iterator[str]:
    """Yield texts while the trainer splits them into words, which takes most of the time; show
    progress. Call `done` at the end: the trainer then merges, and reports nothing. (It asks for
    some hundred texts at once.)"""
    with Progress("splitting", total=sum(map(len, texts)), unit="B") as progress:
        for text in texts:
            yield text.decode()
            progress.advance(len(text))
    done()


def sample(files: Sequence[File], config: TrainConfig) -> list[bytes]:
    """Sample the corpus, in order: the documents with the smallest hashes, up to `sample_bytes` of
    text. File count and compression do not change the sample's size, and every run takes the same
    sample. Equal documents count once."""
    stats = ReadStats()
    chosen: list[tuple[int, int, bytes]] = []  # heap; the largest hash is removed first
    digests: set[int] = set()
    size = 0
    for number, data in enumerate(_documents(files, config, stats)):
        digest = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
        if digest in digests:
            continue
        heapq.heappush(chosen, (-digest, number, data))
        digests.add(digest)
        size += len(data)
        while size - len(chosen[0][2]) >= config.sample_bytes:
            negative_digest, _, dropped = heapq.heappop(chosen)
            digests.remove(-negative_digest)
            size -= len(dropped)
    if not chosen:
        raise InputError("the inputs have no text to train on")
    for line in stats.problems[:20]:
        log.warning("left out: %s", line)
    summary = (len(chosen), format_bytes(size), stats.bad)
    log.info("sample: %d documents, %s; %d bad records", *summary)
    chosen.sort(key=lambda item: item[1])
    return [data for _, _, data in chosen]


def _documents(files: Sequence[File], config: TrainConfig, stats: ReadStats) -> Iterator[bytes]:
    skip_bad = config.on_error == "skip"
    reader = DocumentReader(config.source, skip_bad)
    total = sum(file.size for file in files)
    with Progress("sampling", total=total, unit="B") as progress:
        for file in files:
            slices = cut(file, config.source, file.size + 1, skip_bad=skip_bad)
            for _, texts in reader.read(slices, stats):
                yield from (text.encode() for text in texts.texts)
                progress.advance(texts.size, documents=len(texts.texts))
