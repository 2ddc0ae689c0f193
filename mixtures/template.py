"""A mixture to begin with: written from datasets, commented, ready to edit."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from ..console.errors import ConfigError, Problem
from ..console.progress import human
from ..console.yaml_text import value
from .lr_shapes import DEFAULT_SHAPE, SHAPES
from .planning.open_sources import OpenedSource, open_sources, source_mismatches
from .spec.mixture import SourceSpec

SEQ_LEN = 4096
BATCH = 1 << 22
STEPS = 2_000
"""At least so many updates, where the datasets are small."""
STABLE, ANNEAL = 90, 7
"""Percent of the datasets' tokens that the phases take."""
EXAMPLES = {"web": 0.8, "code": 0.2}
PHASES = ("stable", "anneal")

TEXT = """\
# A mixture: what is trained on, in which shares, and in which order.
#   mixtures check THIS      everything that is wrong with it, with lines
#   mixtures plan THIS       rows, tokens and epochs of every source; nothing is started
#   mixtures plot THIS --out mixture.png
# Every value can be overridden on the command line: phases.anneal.tokens=50B

seed: 0                        # decides the order; another seed is another order

sources:                       # datasets, as `tokenize build` or `tokenize index` made them
{sources}
phases:                        # trained on one after the other; edges are rounded to whole updates
  stable:
    tokens: {stable}
    seq_len: {seq_len:<18}# tokens of a row; later phases keep it
    batch: {batch:<20}# tokens of an update
    weights:                   # shares of the phase's tokens; they sum to 1
{weights}    lr:                        # in multiples of the run's peak
      warmup: {warmup}
      shape: {shape:<18}# or {other_shapes}
  anneal:
    tokens: {anneal}
    weights:                   # an earlier phase's name replays its mixture, unseen tokens first
      stable: 1.0              # give the best sources more: stable: 0.6, math: 0.4
    lr: {{shape: linear, end: 0}}
"""


def template(urls: Sequence[str]) -> str:
    """The YAML of a mixture of these datasets, each in proportion to its tokens."""
    specs = _named(urls)
    opened, wrong = open_sources(specs)
    wrong += source_mismatches(opened, None)
    if wrong:
        problems = [Problem(specs[str(path[1])].data, what) for path, what in wrong]
        raise ConfigError("the datasets", problems)
    if not opened:
        return _written(
            {name: f"  {name}: {{data: s3://bucket/{name}}}" for name in EXAMPLES},
            EXAMPLES,
            tokens=10**12,
            seq_len=SEQ_LEN,
        )
    total = sum(source.tokens for source in opened.values())
    smallest = min(source.tokens for source in opened.values())
    seq_len = _seq_len(smallest)
    shares = _shares(opened, total)
    lines = {}
    for name, source in opened.items():
        rows = max(1, (source.tokens - 1) // seq_len)
        epochs = math.ceil(shares[name] * total / (rows * seq_len) * (STABLE + ANNEAL + 1) / 100)
        more = f", max_epochs: {epochs}" if epochs > 1 else ""
        count = f"{human(source.tokens)} tokens"
        lines[name] = f"  {name}: {{data: {_quoted(source.spec.data)}{more}}}", f"  # {count}"
    width = max(len(line) for line, _ in lines.values())
    aligned = {name: f"{line:<{width}}{count}" for name, (line, count) in lines.items()}
    return _written(aligned, shares, tokens=total, seq_len=seq_len)


def _written(
    sources: Mapping[str, str], shares: Mapping[str, float], *, tokens: int, seq_len: int
) -> str:
    """The text, for datasets of `tokens` tokens in all."""
    rows = max(1, min(BATCH, tokens // STEPS) // seq_len)
    return TEXT.format(
        sources="\n".join(sources.values()) + "\n",
        weights="".join(f"      {name}: {share:.10g}\n" for name, share in shares.items()),
        seq_len=seq_len,
        batch=_count(rows * seq_len),
        stable=_count(_rounded(tokens * STABLE // 100)),
        anneal=_count(_rounded(tokens * ANNEAL // 100)),
        warmup=_count(_rounded(tokens // 100)),
        shape=DEFAULT_SHAPE,
        other_shapes=", ".join(name for name in SHAPES if name != DEFAULT_SHAPE),
    )


def _seq_len(smallest: int) -> int:
    """A power of two that the smallest source holds a few times."""
    return min(SEQ_LEN, 1 << max(3, (smallest // 16).bit_length() - 1))


def _named(urls: Sequence[str]) -> dict[str, SourceSpec]:
    """A name for each dataset: the last part of its URL that is not `train`, the split that
    `tokenize build --split` trains on."""
    specs: dict[str, SourceSpec] = {}
    for url in urls:
        *_, above, last = map(_word, ["", *url.rstrip("/").split("/")])
        base = (last == "train" and above) or last
        # `true` and `null` are no words in YAML, and names that begin with a digit may be numbers.
        clear = base[:1].isalpha() and isinstance(value(base), str)
        base = base if clear else f"source-{base}".strip("-")
        name, number = base, 1
        while name in specs or name in PHASES:
            number += 1
            name = f"{base}-{number}"
        specs[name] = SourceSpec(data=url)
    return specs


def _word(part: str) -> str:
    return re.sub(r"[\W_]+", "-", part.lower()).strip("-")


def _shares(opened: Mapping[str, OpenedSource], total: int) -> dict[str, float]:
    """Shares in proportion to tokens, with as few decimals as the smallest source allows (tables
    grow with them), that sum to one."""
    smallest = min(source.tokens for source in opened.values()) / total
    decimals = min(5, max(3, math.ceil(-math.log10(smallest)) + 1))
    units = 10**decimals
    exact = {name: source.tokens * units / total for name, source in opened.items()}
    whole = {name: max(1, math.floor(part)) for name, part in exact.items()}
    largest = sorted(exact, key=lambda name: whole[name] - exact[name])
    for name in largest[: max(units - sum(whole.values()), 0)]:
        whole[name] += 1
    # The smallest sources may have been rounded up to a unit each: the largest gives it back.
    giver = max(whole, key=lambda name: whole[name])
    whole[giver] -= sum(whole.values()) - units
    return {name: count / units for name, count in whole.items()}


def _rounded(number: int) -> int:
    """Down to three digits."""
    size: int = 10 ** max(0, len(str(number)) - 3)
    return number // size * size


def _count(number: int) -> str:
    """As people write it: 900B, 4096, 4Mi."""
    for suffix, size in (("T", 10**12), ("B", 10**9), ("M", 10**6)):
        if number >= size and number * 1000 % size == 0:
            return f"{number / size:.10g}{suffix}"
    for suffix, size in (("Mi", 1 << 20), ("Ki", 1 << 10)):
        if number >= max(size, 1 << 14) and number % size == 0:
            return f"{number // size}{suffix}"
    return f"{number:_}" if number >= 10_000 else str(number)


def _quoted(url: str) -> str:
    return url if re.fullmatch(r"[\w./:@+-]+", url) else "'" + url.replace("'", "''") + "'"
