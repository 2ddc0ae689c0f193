"""The model card of an exported folder (`README.md`): where the weights come from.

Everything is read from the checkpoint and its run's folder: the step and its hashes, the tokens of
each source up to it, the mixture, and the kernels that were attested before the run computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...console.page import table
from ...dataplane.order.stream import Stream
from ...dataplane.runlog import writer as lines
from ...models.accounting.count import build_meta, count_parameters
from ..checkpoints import store
from ..folders.folder import ATTESTED, RunFolder
from .source import Checkpoint

if TYPE_CHECKING:
    from ...models.config.config import ModelConfig

MODEL_CARD = "README.md"


def render_model_card(
    source: Checkpoint, model: ModelConfig, *, family: str, format: str, stream: Stream | None
) -> str:
    """Render the page. `stream` is the run's, if its folder is there."""
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
    if source.run is not None and stream is not None:
        run = source.run.root.resolve().name
        sections += [
            [
                f"`mixtures audit {run} --step N` proves which documents step N saw, against the "
                "ledger. DATA.md describes the datasets."
            ],
            ["## Tokens by source", "", *_source_table(stream, state.row)],
        ]
    if source.run is not None and source.run.mixture.exists():
        mixture = source.run.mixture.read_text(encoding="utf-8").rstrip()
        sections.append(["## Mixture", "", "```yaml", mixture, "```"])
    return "\n\n".join("\n".join(section) for section in sections) + "\n"


def _front_matter(family: str, format: str) -> list[str]:
    """Return what model hubs read."""
    if format != "huggingface":
        return []
    tags = f"tags: [headrace, {family}]"
    return ["---", "library_name: transformers", "pipeline_tag: text-generation", tags, "---", ""]


def _kernel_rows(run: RunFolder, step: int) -> Iterator[tuple[str, str]]:
    """Yield the attestations of the starts up to a step, each once."""
    events = lines.read(run.events) if run.events.exists() else ()
    seen = set()
    for event in events:
        if event["event"] != ATTESTED or event["step"] > step or event["digest"] in seen:
            continue
        seen.add(event["digest"])
        kernels = [*event["kernels"], *(f"plain torch for {name}" for name in event["failed"])]
        yield event["what"], f"`{event['digest']}`: {', '.join(kernels)}"
    if not seen:
        yield "kernels", "plain torch: no start attested a fused kernel"


def _source_table(stream: Stream, row: int) -> list[str]:
    tokens = stream.tokens(min(row, stream.plan.end_row))
    total = sum(tokens) or 1
    rows = [
        (
            source.name,
            f"{count:,}",
            f"{count / total:.2%}",
            f"`{source.url}`",
            f"`{source.dataset}`",
        )
        for source, count in zip(stream.plan.sources, tokens, strict=True)
    ]
    table_lines = table(("source", "tokens", "share", "dataset", "hash"), rows)
    if stream.plan.parent is None:
        return table_lines
    return [
        *table_lines,
        "",
        f"The plan continues `{stream.plan.parent.hash}`, which is not counted.",
    ]
