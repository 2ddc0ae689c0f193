"""Train a byte-level BPE tokenizer on a sample of a corpus."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..console.errors import InputError
from ..console.log import get_logger
from ..dataplane import storage
from ..dataplane.tokenizers.byte import END
from .inputs import find
from .sources import SourceConfig, source

log = get_logger(__name__)

MEND = "mend the file, or train on inputs without it"

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
    """How much text to train on, taken evenly from the whole corpus."""
    source: SourceConfig = field(default_factory=SourceConfig)
    """How the corpus is read."""

    def __post_init__(self) -> None:
        least = 256 + len(self.special_tokens)
        if self.vocab_size < least:
            raise ValueError(f"vocab_size is {self.vocab_size}; bytes and specials need {least}")


def train(config: TrainConfig) -> Any:
    """Train a tokenizer, save it, and return it (a `tokenizers.Tokenizer`)."""
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
    """Documents from all over the corpus: chosen by their hash, so that a run is repeatable."""
    files = find(config.inputs, config.source, fingerprints=False)
    total = sum(file.size for file in files)
    share = min(1.0, config.sample_bytes / max(1, total))
    taken = 0
    for text in _documents(files, config.source):
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        if int.from_bytes(digest, "little") < share * 2**64 or taken == 0:
            taken += 1
            yield text
    if not taken:
        raise InputError("the inputs hold no text to train on")


def _documents(files: Sequence[Any], config: SourceConfig) -> Iterator[str]:
    for file in files:
        reader = source(file.format)
        for part in reader.cut(file, config, file.size + 1):
            for texts in reader.read(part, config):
                for problem in texts.problems:
                    raise InputError(
                        f"{problem.kind}: {problem.what}", where=problem.where(), mend=MEND
                    )
                yield from texts.texts
