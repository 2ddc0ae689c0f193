"""The chat template that conversations of a run's datasets were built with.

A template stands in the manifest of a dataset, with the variables that it was given. transformers
gives a template the names of its special tokens alone, so the variables are set in its first lines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...console.errors import UserError
from ...dataplane.datasets import manifest as manifests
from ...dataplane.datasets.view import view_of
from ...dataplane.order.plan import Plan
from ...dataplane.storage import storage
from ...mixtures.planning.shares import drawn_shares
from .source import Checkpoint, WeightSource


@dataclass(frozen=True)
class ChatTemplate:
    text: str
    """Jinja, as transformers reads it."""
    source: str
    """The source of the mixture that has it."""
    different: tuple[str, ...]
    """Sources with other templates."""


def find_template(weights: WeightSource) -> ChatTemplate | None:
    """Return the template of most tokens of conversations in the run's plan; None if it has none.

    A dataset that cannot be read has none: the weights are exported without their data.
    """
    run = weights.run if isinstance(weights, Checkpoint) else None
    if run is None or not run.plan.exists():
        return None
    plan = Plan.load(run.plan)
    texts = {}
    for source in plan.sources:
        try:
            text = _template_of(source.url)
        except UserError:
            if storage.is_local(source.url):
                continue
            break  # a store that does not answer is asked once
        if text is not None:
            texts[source.name] = text
    if not texts:
        return None
    tokens = Counter[str]()
    for phase in plan.phases:
        for source, share in zip(plan.sources, drawn_shares(phase), strict=True):
            if source.name in texts:
                tokens[texts[source.name]] += int(share * phase.rows * phase.seq_len)
    text = max(tokens, key=lambda each: tokens[each])
    names = [name for name in texts if texts[name] == text]
    return ChatTemplate(text, names[0], tuple(name for name in texts if name not in names))


def _template_of(url: str) -> str | None:
    """Return the template of a dataset, or of the one that it is a view of."""
    manifest = manifests.load(url)
    view = view_of(url, manifest)
    chat = (manifest if view is None else manifests.load(view.url)).settings.get("chat")
    return None if chat is None else with_variables(chat["source"], chat["variables"])


def with_variables(template: str, variables: Mapping[str, Any]) -> str:
    """Return a template that has these variables. transformers always names special tokens, as the
    tokenizer does; other variables can be given to `apply_chat_template`. Jinja reads the literals
    of Python."""
    lines = [
        f"{{%- set {name} = {value!r} %}}\n"
        if name.endswith("_token")
        else f"{{%- set {name} = {name} if {name} is defined else {value!r} %}}\n"
        for name, value in variables.items()
    ]
    return "".join([*lines, template])
