"""A run's model and training data as a CycloneDX 1.6 inventory (ML-BOM).

The model is the component that the inventory describes; each source is a component with data.
"""

from __future__ import annotations

import uuid
from typing import Any

from ... import __version__
from .facts import SourceFacts, TrainingFacts

SPEC = "1.6"
NAMESPACE = uuid.UUID("6f2d6a3e-6c55-5c1c-9a7e-0d6f1f3c9d1b")
"""Makes serial numbers from hashes: one run at one step has one number."""


def render_cyclonedx(facts: TrainingFacts) -> dict[str, Any]:
    """Render the inventory."""
    state = facts.commitment or facts.plan
    return {
        "$schema": f"http://cyclonedx.org/schema/bom-{SPEC}.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": SPEC,
        "serialNumber": f"urn:uuid:{uuid.uuid5(NAMESPACE, state)}",
        "version": 1,
        "metadata": {
            "tools": {
                "components": [{"type": "application", "name": "headrace", "version": __version__}]
            },
            "component": _model(facts),
        },
        "components": [_source(source) for source in facts.sources],
        "dependencies": [
            {"ref": "model", "dependsOn": [_reference(source) for source in facts.sources]}
        ],
    }


def _model(facts: TrainingFacts) -> dict[str, Any]:
    statement = facts.statement
    component: dict[str, Any] = {
        "type": "machine-learning-model",
        "bom-ref": "model",
        "name": statement.model.name or facts.run,
        "modelCard": {
            "modelParameters": {
                "datasets": [{"ref": _reference(source)} for source in facts.sources]
            }
        },
        "properties": [
            _property("plan", facts.plan),
            *([_property("commitment", facts.commitment)] if facts.commitment else []),
            *([_property("steps", facts.steps)] if facts.steps is not None else []),
            _property("tokens-seen", facts.served_tokens),
        ],
    }
    if statement.provider.name:
        component["supplier"] = {"name": statement.provider.name}
    if statement.model.license:
        component["licenses"] = [{"license": {"name": statement.model.license}}]
    return component


def _source(source: SourceFacts) -> dict[str, Any]:
    stated, tally = source.statement, source.tally
    contents: dict[str, Any] = {"url": stated.link or source.url}
    languages = source.languages.tokens if source.languages else {}
    contents["properties"] = [
        _property("tokens-seen", source.served_tokens),
        _property("distinct-tokens-seen", source.distinct_tokens),
        *([_property("documents-seen", tally.documents)] if tally else []),
        *([_property("category", stated.category)] if stated.category else []),
        *([_property("newest", source.newest)] if source.newest else []),
        *(_property(f"language:{name}", count) for name, count in sorted(languages.items())),
    ]
    data: dict[str, Any] = {"type": "dataset", "name": source.title, "contents": contents}
    if stated.description:
        data["description"] = stated.description
    component: dict[str, Any] = {
        "type": "data",
        "bom-ref": _reference(source),
        "name": source.title,
        "version": source.dataset,
        "hashes": [{"alg": "SHA-256", "content": source.dataset}],
        "data": [data],
    }
    if source.licenses:
        component["licenses"] = [{"license": {"name": license}} for license in source.licenses]
    return component


def _reference(source: SourceFacts) -> str:
    return f"source:{source.name}"


def _property(name: str, value: object) -> dict[str, str]:
    return {"name": f"headrace:{name}", "value": str(value)}
