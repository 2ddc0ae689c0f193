"""The model card of an exported folder (`README.md`): where the weights come from, on one page.

Everything is read from the checkpoint, its run's folder and those of the runs that it continues:
the step and its hashes, the tokens of each source that the weights have seen, the mixture, the card
of its data, and the kernels that were attested before the run computed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ...console.page import table
from ...dataplane.order.stream import Stream
from ...dataplane.runlog import ledger
from ...dataplane.runlog import writer as records
from ...mixtures.disclosure.facts import cut_lineage
from ...mixtures.disclosure.served_tokens import count_served
from ...mixtures.exposure.lineage import Lineage, open_lineages
from ...mixtures.view.card import render_card
from ...models.accounting.count import build_meta, count_parameters
from ..checkpoints import store
from ..folders.folder import ATTESTED, RunFolder
from .source import Checkpoint

if TYPE_CHECKING:
    from ...models.config.config import ModelConfig

MODEL_CARD = "README.md"
HEADING = re.compile(r"^(?=#)", re.MULTILINE)


def render_model_card(
    source: Checkpoint, model: ModelConfig, *, family: str, format: str, stream: Stream | None
) -> str:
    """Render the page. `stream` is the run's, if its folder is there."""
    lineage = None
    if source.run is not None and stream is not None:
        [lineage] = open_lineages([str(source.run.root)])
        lineage = cut_lineage(lineage, source.step)
    manifest, state = store.read_checkpoint(source.where)
    name = source.where.rstrip("/").rpartition("/")[2]
    title = name if source.run is None else f"{source.run.root.resolve().name}, step {state.step}"
    trained_by = ", ".join(f"{key} {value}" for key, value in state.layout.items())
    average = "moving average of the weights" if source.average else "weights"
    rows = [
        ("weights", f"{average} of step {state.step:,}, after {state.updates:,} updates"),
        ("rows, tokens", f"{state.row:,} rows, {state.tokens:,} tokens"),
        ("plan", f"`{state.plan_hash}`"),
        ("ledger at this step", f"`{state.ledger}`"),
        *([] if lineage is None else _commitment_rows(lineage, state.step)),
        ("checkpoint", f"`{manifest.seal}`"),
        ("run", f"`{state.run}`"),
        ("trained by", f"{trained_by}; headrace {state.headrace}, torch {state.torch}"),
        *([] if source.run is None else _kernel_rows(source.run, state.step)),
    ]
    sections = [
        [*_front_matter(family, format), f"# {title}"],
        [f"{family}, {count_parameters(build_meta(model)):,} parameters: `{model.pattern}`."],
        ["## Provenance", "", *table(("of", "is"), rows)],
    ]
    if source.run is not None and lineage is not None:
        run = source.run.root.resolve().name
        sections += [
            [
                f"`mixtures audit {run} --step N` proves which documents step N saw, against the "
                f"ledger, and `mixtures prove {run} --step {state.step}` that these weights saw a "
                "document, or did not."
            ],
            ["## Tokens by source", "", *_source_table(lineage)],
        ]
    if source.run is not None and source.run.mixture.exists():
        mixture = source.run.mixture.read_text(encoding="utf-8").rstrip()
        sections.append(["## Mixture", "", "```yaml", mixture, "```"])
    if stream is not None:
        data_card = render_card(stream, steps=source.step - stream.plan.first_step)
        sections.append([HEADING.sub("#", data_card).rstrip()])
    return "\n\n".join("\n".join(section) for section in sections) + "\n"


def _front_matter(family: str, format: str) -> list[str]:
    """Return what model hubs read."""
    if format != "huggingface":
        return []
    tags = f"tags: [headrace, {family}]"
    return ["---", "library_name: transformers", "pipeline_tag: text-generation", tags, "---", ""]


def _kernel_rows(run: RunFolder, step: int) -> Iterator[tuple[str, str]]:
    """Yield the attestations of the starts up to a step, each once."""
    events = records.read(run.events) if run.events.exists() else ()
    seen = set()
    for event in events:
        if event["event"] != ATTESTED or event["step"] > step or event["digest"] in seen:
            continue
        seen.add(event["digest"])
        kernels = [*event["kernels"], *(f"plain torch for {name}" for name in event["failed"])]
        yield event["what"], f"`{event['digest']}`: {', '.join(kernels)}"
    if not seen:
        yield "kernels", "plain torch: no start attested a fused kernel"


def _commitment_rows(lineage: Lineage, step: int) -> list[tuple[str, str]]:
    """Return the hash of the plan and the ledger, which proofs about these weights hold for."""
    newest = lineage.served[-1]
    if newest.ledger is None or step <= newest.plan.first_step:
        return []
    commitment = ledger.commit(newest.ledger, newest.plan.learnt_hash, step - 1)
    return [("plan and ledger", f"`{commitment}`")]


def _source_table(lineage: Lineage) -> list[str]:
    """Return the tokens that the weights have seen, over all runs behind them."""
    sources = {source.name: source for run in lineage.served for source in run.plan.sources}
    seen = {}
    for name, source in sources.items():
        served, end = count_served(lineage, name), np.array([source.order.tokens])
        counts = (served.count(end * 0, end), served.count_distinct(end * 0, end))
        seen[name] = [int(count[0]) for count in counts]
    total = sum(tokens for tokens, _ in seen.values()) or 1
    rows = [
        (
            name,
            f"{tokens:,}",
            f"{tokens / total:.2%}",
            f"{distinct:,}",
            f"`{sources[name].url}`",
            f"`{sources[name].dataset}`",
        )
        for name, (tokens, distinct) in seen.items()
    ]
    lines = table(("source", "tokens seen", "share", "distinct", "dataset", "hash"), rows)
    runs = [f"`{served.plan.hash}`" for served in lineage.served[:-1]]
    notes = [f"With the tokens of the continued plans {', '.join(runs)}."] if runs else []
    if lineage.unknown is not None:
        notes.append(f"Earlier rows are unknown: {lineage.unknown}.")
    return [*lines, *(["", " ".join(notes)] if notes else [])]
