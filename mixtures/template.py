"""Write a first mixture for datasets: commented, ready to edit."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from ..console.errors import ConfigError, ConfigProblem
from ..console.progress import format_number
from ..console.yaml_text import value
from .lr_shapes import DEFAULT_SHAPE, SHAPES
from .mixture_file.mixture import SourceSpec
from .planning.open_sources import OpenedSource, open_sources, source_mismatches

SEQ_LEN = 4096
BATCH = 1 << 22
STEPS = 2_000
"""Minimum number of steps; small datasets get a smaller batch."""
STABLE = 90
"""Percentage of the tokens in the first phase."""
SPARE = 3
"""Percentage of the tokens that no phase asks for, where `--tokens` says nothing: rows and
steps are whole, so a plan of all of them would begin a second epoch."""
EXAMPLES = {"web": 0.8, "code": 0.2}
PHASES = ("stable", "anneal")

TEMPLATE = """\
# A mixture: the datasets of a run, their shares, and the phases of training.
#   mixtures check FILE      report all problems, with line numbers
#   mixtures plan FILE       show rows, tokens and epochs of every source; starts nothing
#   mixtures plot FILE --out mixture.svg
# Every value can be overridden on the command line: phases.anneal.tokens=50B
# What a key means: headrace config mixture.phases.NAME.weights; more: docs/mixtures.md

seed: 0                        # seed of the order of the rows

sources:                       # datasets, built by `tokenize build` or `tokenize index`
{sources}
phases:                        # trained one after the other; each is rounded to whole steps
  stable:
    tokens: {stable}
    seq_len: {seq_len:<18}# tokens of a row; default of later phases
    batch: {batch:<20}# tokens of a step
    weights:                   # shares of the phase's tokens; they must sum to 1
{weights}    lr:                        # in multiples of the run's peak
      warmup: {warmup}
      shape: {shape:<18}# or {other_shapes}
  anneal:
    tokens: {anneal}
    weights:                   # the name of an earlier phase replays it, unseen tokens first
      stable: 1.0              # or give the best sources more: stable: 0.6, math: 0.4
    lr: {{shape: linear, end: 0}}
"""


def render_template(
    urls: Sequence[str],
    *,
    tokens: int | None = None,
    seq_len: int | None = None,
    batch: int | None = None,
) -> str:
    """Render a mixture as YAML, with shares in proportion to the datasets' sizes.

    By default the run reads all tokens once, in rows and batches that fit the datasets. `batch` is
    in tokens, and rounded down to whole rows.
    """
    specs = _name_datasets(urls)
    opened, findings = open_sources(specs)
    findings += source_mismatches(opened, None)
    if findings:
        problems = [ConfigProblem(specs[str(path[1])].data, message) for path, message in findings]
        raise ConfigError("the datasets", problems)
    if not opened:
        return _render(
            {name: f"  {name}: {{data: s3://bucket/{name}}}" for name in EXAMPLES},
            EXAMPLES,
            tokens=tokens or 10**12,
            seq_len=seq_len or SEQ_LEN,
            batch=batch,
        )
    available = sum(source.tokens for source in opened.values())
    smallest = min(source.tokens for source in opened.values())
    seq_len = seq_len or _choose_seq_len(smallest)
    shares = _proportional_shares(opened, available)
    total = tokens or _round_down(available * (100 - SPARE) // 100)
    phase_tokens = sum(_phase_tokens(total, _batch_tokens(total, seq_len, batch)))
    planned = max(phase_tokens, total * 1.01)  # phases are rounded up to whole steps
    lines = {}
    for name, source in opened.items():
        rows = max(1, (source.tokens - 1) // seq_len)
        epochs = math.ceil(shares[name] * planned / (rows * seq_len))
        more = f", max_epochs: {epochs}" if epochs > 1 else ""
        count = f"{format_number(source.tokens)} tokens"
        lines[name] = f"  {name}: {{data: {_quote_url(source.spec.data)}{more}}}", f"  # {count}"
    width = max(len(line) for line, _ in lines.values())
    aligned = {name: f"{line:<{width}}{count}" for name, (line, count) in lines.items()}
    return _render(aligned, shares, tokens=total, seq_len=seq_len, batch=batch)


def _render(
    sources: Mapping[str, str],
    shares: Mapping[str, float],
    *,
    tokens: int,
    seq_len: int,
    batch: int | None,
) -> str:
    """Fill in the template for `tokens` tokens in total."""
    batch = _batch_tokens(tokens, seq_len, batch)
    stable, anneal = _phase_tokens(tokens, batch)
    return TEMPLATE.format(
        sources="\n".join(sources.values()) + "\n",
        weights="".join(f"      {name}: {share:.10g}\n" for name, share in shares.items()),
        seq_len=seq_len,
        batch=_format_count(batch),
        stable=_format_count(stable),
        anneal=_format_count(anneal),
        warmup=_format_count(_round_down(tokens // 100)),
        shape=DEFAULT_SHAPE,
        other_shapes=", ".join(name for name in SHAPES if name != DEFAULT_SHAPE),
    )


def _batch_tokens(tokens: int, seq_len: int, batch: int | None) -> int:
    """Return a step's tokens: whole rows, at least one."""
    return max(1, (batch or min(BATCH, tokens // STEPS)) // seq_len) * seq_len


def _phase_tokens(tokens: int, batch: int) -> tuple[int, int]:
    """Return the tokens of both phases: each needs a step."""
    stable = _round_down(tokens * STABLE // 100)
    return max(stable, batch), max(tokens - stable, batch)


def _choose_seq_len(smallest: int) -> int:
    """Choose a power of two that the smallest source holds several times."""
    return min(SEQ_LEN, 1 << max(3, (smallest // 16).bit_length() - 1))


def _name_datasets(urls: Sequence[str]) -> dict[str, SourceSpec]:
    """Name datasets by the URL's last segment, or by the segment before a final `train` (a training
    split by `tokenize build --split`)."""
    specs: dict[str, SourceSpec] = {}
    for url in urls:
        *_, above, last = map(_slugify, ["", *url.rstrip("/").split("/")])
        base = (last == "train" and above) or last
        # YAML reads `true` and `null` as values, and names that start with a digit as numbers.
        is_plain = base[:1].isalpha() and isinstance(value(base), str)
        base = base if is_plain else f"source-{base}".strip("-")
        name, number = base, 1
        while name in specs or name in PHASES:
            number += 1
            name = f"{base}-{number}"
        specs[name] = SourceSpec(data=url)
    return specs


def _slugify(segment: str) -> str:
    return re.sub(r"[\W_]+", "-", segment.lower()).strip("-")


def _proportional_shares(opened: Mapping[str, OpenedSource], total: int) -> dict[str, float]:
    """Compute shares in proportion to tokens, which sum to 1.

    They have as few decimals as the smallest source allows: more decimals make larger tables.
    """
    smallest = min(source.tokens for source in opened.values()) / total
    decimals = min(5, max(3, math.ceil(-math.log10(smallest)) + 1))
    units = 10**decimals
    exact = {name: source.tokens * units / total for name, source in opened.items()}
    rounded = {name: max(1, math.floor(share)) for name, share in exact.items()}
    by_need = sorted(exact, key=lambda name: rounded[name] - exact[name])
    for name in by_need[: max(units - sum(rounded.values()), 0)]:
        rounded[name] += 1
    # Small sources may have been rounded up to a unit; the largest source pays for them.
    largest = max(rounded, key=lambda name: rounded[name])
    rounded[largest] -= sum(rounded.values()) - units
    return {name: count / units for name, count in rounded.items()}


def _round_down(number: int) -> int:
    """Round down to three digits."""
    size: int = 10 ** max(0, len(str(number)) - 3)
    return number // size * size


def _format_count(number: int) -> str:
    """Write a count with a suffix: 900B, 4096, 4Mi."""
    for suffix, size in (("T", 10**12), ("B", 10**9), ("M", 10**6)):
        if number >= size and number * 1000 % size == 0:
            return f"{number / size:.10g}{suffix}"
    for suffix, size in (("Mi", 1 << 20), ("Ki", 1 << 10)):
        if number >= max(size, 1 << 14) and number % size == 0:
            return f"{number // size}{suffix}"
    return f"{number:_}" if number >= 10_000 else str(number)


def _quote_url(url: str) -> str:
    return url if re.fullmatch(r"[\w./:@+-]+", url) else "'" + url.replace("'", "''") + "'"
