"""A run's model and training data as an SPDX 3.0.1 document, with the profiles AI and Dataset."""

from __future__ import annotations

from typing import Any

from ... import __version__
from ...console.progress import exact_count
from .facts import SourceFacts, TrainingFacts

SPEC = "3.0.1"
CONTEXT = f"https://spdx.org/rdf/{SPEC}/spdx-context.jsonld"
CREATION = "_:creation"


def render_spdx(facts: TrainingFacts, *, created: str) -> dict[str, Any]:
    """Render the document. `created` is its time, in UTC: `2026-11-27T00:00:00Z`."""
    base = f"urn:headrace:{facts.commitment or facts.plan}"
    supplier, tool = f"{base}:provider", f"{base}:tool"
    statement = facts.statement
    model: dict[str, Any] = {
        **_element("ai_AIPackage", f"{base}:model"),
        "name": statement.model.name or facts.run,
        "software_primaryPurpose": "model",
        "ai_informationAboutTraining": _describe(facts),
    }
    if statement.provider.name:
        model["suppliedBy"] = supplier
    datasets = [_dataset(source, base) for source in facts.sources]
    elements = [model, *datasets]
    if datasets:
        elements.append(
            {
                **_element("Relationship", f"{base}:trained-on"),
                "relationshipType": "trainedOn",
                "from": model["spdxId"],
                "to": [dataset["spdxId"] for dataset in datasets],
            }
        )
    elements += [element for source in facts.sources for element in _licenses(source, base)]
    author = {
        **_element("Organization", supplier),
        "name": statement.provider.name or "unnamed provider",
    }
    elements += [author, {**_element("Tool", tool), "name": f"headrace {__version__}"}]
    return {
        "@context": CONTEXT,
        "@graph": [
            {
                "type": "CreationInfo",
                "@id": CREATION,
                "specVersion": SPEC,
                "created": created,
                "createdBy": [supplier],
                "createdUsing": [tool],
            },
            {
                **_element("SpdxDocument", f"{base}:document"),
                "profileConformance": ["core", "software", "ai", "dataset", "simpleLicensing"],
                "rootElement": [model["spdxId"]],
                "element": [element["spdxId"] for element in elements],
            },
            *elements,
        ],
    }


def _dataset(source: SourceFacts, base: str) -> dict[str, Any]:
    stated, account = source.statement, source.account
    seen = f"{source.served_tokens:,} tokens seen, {source.distinct_tokens:,} of them distinct"
    package: dict[str, Any] = {
        **_element("dataset_DatasetPackage", _identify(source, base)),
        "name": source.title,
        "comment": seen
        + (f", of {exact_count(source.tally.documents, 'documents')}" if source.tally else ""),
        "software_packageVersion": source.dataset,
        "software_primaryPurpose": "data",
        "software_downloadLocation": stated.link or source.url,
        "dataset_datasetType": ["other" if source.tokenizer == "genome" else "text"],
        "verifiedUsing": [{"type": "Hash", "algorithm": "sha256", "hashValue": source.dataset}],
    }
    if account is not None:
        package["dataset_datasetSize"] = sum(
            generation.size for generation in account.held.generations
        )
    if stated.description:
        package["description"] = stated.description
    if stated.category == "synthetic" and stated.generators:
        package["dataset_dataCollectionProcess"] = f"written by {', '.join(stated.generators)}"
    return package


def _licenses(source: SourceFacts, base: str) -> list[dict[str, Any]]:
    """Relate a dataset to its stated licences, as texts."""
    if not source.licenses:
        return []
    identifiers = [
        f"{base}:license:{source.name}:{number}" for number in range(len(source.licenses))
    ]
    texts = [
        {
            **_element("simplelicensing_SimpleLicensingText", identifier),
            "simplelicensing_licenseText": license,
        }
        for identifier, license in zip(identifiers, source.licenses, strict=True)
    ]
    relationship = {
        **_element("Relationship", f"{base}:licenses:{source.name}"),
        "relationshipType": "hasDeclaredLicense",
        "from": _identify(source, base),
        "to": identifiers,
    }
    return [*texts, relationship]


def _describe(facts: TrainingFacts) -> str:
    steps = "a plan without a run" if facts.steps is None else exact_count(facts.steps, "steps")
    proof = f", commitment {facts.commitment}" if facts.commitment else ""
    return f"{steps}, {facts.served_tokens:,} tokens; plan {facts.plan}{proof}"


def _element(type: str, identifier: str) -> dict[str, Any]:
    return {"type": type, "spdxId": identifier, "creationInfo": CREATION}


def _identify(source: SourceFacts, base: str) -> str:
    return f"{base}:source:{source.name}"
