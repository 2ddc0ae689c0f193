"""Find the chat template with which a run's conversations were built.

A dataset's manifest contains the template and its variables. transformers passes a template only
the names of special tokens, so the first lines set the variables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...console.errors import UserError
from ...dataplane.datasets import manifest as manifests
from ...dataplane.datasets.view import parse_view
from ...dataplane.order.plan import Plan
from ...dataplane.storage import storage
from ...mixtures.planning.shares import drawn_shares
from .source import Checkpoint, WeightSource


@dataclass(frozen=True)
class RunTemplate:
    """The chat template that is exported with a run's weights."""

    jinja: str
    """Jinja source, as transformers reads it."""
    source: str
    """The first source in the mixture with this template."""
    different: tuple[str, ...]
    """Sources with further templates."""


def find_template(weights: WeightSource) -> RunTemplate | None:
    """Find the template with the most tokens in the run's plan; None without conversations.

    A dataset that cannot be read counts as one without: weights can be exported where their data is
    not.
    """
    run = weights.run if isinstance(weights, Checkpoint) else None
    if run is None or not run.plan.exists():
        return None
    plan = Plan.load(run.plan)
    templates = {}
    for source in plan.sources:
        try:
            template = _read_template(source.url)
        except UserError:
            if storage.is_local(source.url):
                continue
            break  # a store that does not answer is asked once
        if template is not None:
            templates[source.name] = template
    if not templates:
        return None
    tokens = Counter[str]()
    for phase in plan.phases:
        for source, share in zip(plan.sources, drawn_shares(phase), strict=True):
            if source.name in templates:
                tokens[templates[source.name]] += int(share * phase.rows * phase.seq_len)
    most_used = max(tokens, key=lambda template: tokens[template])
    equal = [source for source, template in templates.items() if template == most_used]
    different = tuple(source for source in templates if source not in equal)
    return RunTemplate(most_used, equal[0], different)


def _read_template(url: str) -> str | None:
    """Read the template of a dataset, or of the dataset behind a view."""
    manifest = manifests.load(url)
    view = parse_view(url, manifest)
    chat = (manifest if view is None else manifests.load(view.url)).settings.get("chat")
    return None if chat is None else set_variables(chat["source"], chat["variables"])


def set_variables(template: str, variables: Mapping[str, Any]) -> str:
    """Prepend lines that set the variables. transformers always passes special tokens, with the
    tokenizer's names; callers can pass further variables to `apply_chat_template`. Python literals
    are valid Jinja."""
    lines = [
        f"{{%- set {variable} = {value!r} %}}\n"
        if variable.endswith("_token")
        else f"{{%- set {variable} = {variable} if {variable} is defined else {value!r} %}}\n"
        for variable, value in variables.items()
    ]
    return "".join([*lines, template])
