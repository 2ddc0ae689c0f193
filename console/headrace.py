"""`headrace`: the umbrella command."""

from __future__ import annotations

import click

from .command import group
from .commands import HEADRACE, find_engine_state, lazy


@group("headrace")
def main() -> None:
    """Pretrain models, with the data stream first.

    `tokenize` builds datasets from corpora, `mixtures` plans the stream of a run, and `trainer`
    trains a model on it.

    \b
    Examples:
      headrace doctor
      headrace tokenize build corpus/*.jsonl --out data/web --tokenizer byte
      headrace mixtures plan mixture.yaml

    More: README.md; each command names its own page
    """
    click.get_current_context().obj = find_engine_state


main.add_lazy(*lazy(HEADRACE))

if __name__ == "__main__":
    main()
