"""Train a byte-level BPE tokenizer on a sample of a corpus."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..console.errors import InputError, MisuseError
from ..console.log import get_logger
from ..console.progress import Progress, as_bytes
from ..dataplane.storage import storage
from ..dataplane.tokenizers.byte import END
from .build.task_state import Record
from .corpus.documents import Reader
from .corpus.inputs import find
from .sources import File, SourceConfig, cut

log = get_logger(__name__)

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How text is cut into words before merging: contractions, words, digits by threes, signs,
spaces. The pattern that Llama 3 and its like use."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    inputs: tuple[str, ...]
    """Files, folders, globs or URLs."""
    out: str
    """Where the tokenizer's JSON goes."""
    vocab_size: int = 32768
    """Special tokens, bytes and merges together."""
    special_tokens: tuple[str, ...] = (END,)
    """The first one ends every document."""
    sample_bytes: int = 256 << 20
    """How much text to train on, taken evenly from the whole corpus; it is held in memory."""
    source: SourceConfig = field(default_factory=SourceConfig)
    """How the corpus is read."""
    on_error: Literal["fail", "skip"] = "fail"
    """What to do about a record that cannot be read."""

    def __post_init__(self) -> None:
        least = 256 + len(self.special_tokens)
        if self.vocab_size < least:
            raise ValueError(f"vocab_size is {self.vocab_size}; bytes and specials need {least}")
        if self.sample_bytes < 1:
            raise ValueError(f"sample_bytes is {self.sample_bytes}; at least one is needed")


def train(config: TrainConfig) -> Any:
    """Train a tokenizer, save it, and return it (a `tokenizers.Tokenizer`)."""
    if storage.is_local(config.out) and storage.local_path(config.out).is_dir():
        raise MisuseError(f"{config.out} is a folder", hint="name a file in it: --out …/bpe.json")
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
    tokenizer.train_from_iterator(sample(config), trainer)
    made = tokenizer.get_vocab_size()
    if made < config.vocab_size:
        log.warning("the sample gives %d tokens, not %d: it is small", made, config.vocab_size)
    storage.write(config.out, tokenizer.to_str(pretty=True).encode())
    return tokenizer


def sample(config: TrainConfig) -> Iterator[str]:
    """Documents from all over the corpus, in its order: those with the smallest hashes, as many as
    make up `sample_bytes` of text. So the sample has that size however the corpus is packed, and
    is the same every time. Of equal documents there is one."""
    files = find(config.inputs, config.source)
    record = Record({})
    chosen: list[tuple[int, int, bytes]] = []  # a heap; what leaves it next has the largest hash
    held: set[int] = set()
    size = 0
    for number, data in enumerate(_documents(files, config, record)):
        hash = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
        if hash in held:
            continue
        heapq.heappush(chosen, (-hash, number, data))
        held.add(hash)
        size += len(data)
        while size - len(chosen[0][2]) >= config.sample_bytes:
            largest, _, dropped = heapq.heappop(chosen)
            held.remove(-largest)
            size -= len(dropped)
    if not chosen:
        raise InputError("the inputs hold no text to train on")
    for line in record.problems[:20]:
        log.warning("left out: %s", line)
    told = (len(chosen), as_bytes(size), record.bad)
    log.info("a sample of %d documents, %s; %d bad records", *told)
    chosen.sort(key=lambda one: one[1])
    return (data.decode() for _, _, data in chosen)


def _documents(files: Sequence[File], config: TrainConfig, record: Record) -> Iterator[bytes]:
    skip_bad = config.on_error == "skip"
    reader = Reader(config.source, skip_bad)
    total = sum(file.size for file in files)
    with Progress("reading for a sample", total=total, unit="B") as progress:
        for file in files:
            whole = cut(file, config.source, file.size + 1, skip_bad=skip_bad)
            for _, texts in reader.read(whole, record):
                yield from (text.encode() for text in texts.texts)
                progress.advance(texts.size, documents=len(texts.texts))
