"""A run's training data as Croissant 1.0 metadata, which dataset hubs read.

The dataset is what the run read: a file for each source's manifest, and the set of its shards.
"""

from __future__ import annotations

import hashlib
from typing import Any

from ...console.errors import UserError
from ...dataplane.datasets import manifest as manifests
from ...dataplane.storage import storage
from .facts import SourceFacts, TrainingFacts

CONFORMS_TO = "http://mlcommons.org/croissant/1.0"
CONTEXT: dict[str, Any] = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "citeAs": "cr:citeAs",
    "column": "cr:column",
    "conformsTo": "dct:conformsTo",
    "cr": "http://mlcommons.org/croissant/",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "dct": "http://purl.org/dc/terms/",
    "examples": {"@id": "cr:examples", "@type": "@json"},
    "extract": "cr:extract",
    "field": "cr:field",
    "fileObject": "cr:fileObject",
    "fileProperty": "cr:fileProperty",
    "fileSet": "cr:fileSet",
    "format": "cr:format",
    "includes": "cr:includes",
    "isLiveDataset": "cr:isLiveDataset",
    "jsonPath": "cr:jsonPath",
    "key": "cr:key",
    "md5": "cr:md5",
    "parentField": "cr:parentField",
    "path": "cr:path",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "recordSet": "cr:recordSet",
    "references": "cr:references",
    "regex": "cr:regex",
    "repeated": "cr:repeated",
    "replace": "cr:replace",
    "sc": "https://schema.org/",
    "separator": "cr:separator",
    "source": "cr:source",
    "subField": "cr:subField",
    "transform": "cr:transform",
}
"""Context of the specification."""


def render_croissant(facts: TrainingFacts) -> dict[str, Any]:
    """Render the metadata."""
    statement = facts.statement
    licenses = sorted({license for source in facts.sources for license in source.licenses})
    name = statement.model.name or facts.run.rstrip("/").rpartition("/")[2]
    data: dict[str, Any] = {
        "@context": CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": CONFORMS_TO,
        "name": f"training-data-of-{name}",
        "description": _describe(facts),
        "version": f"0.0.0+{facts.plan[:16]}",
        "identifier": facts.plan,
        "distribution": [entry for source in facts.sources for entry in _distribution(source)],
    }
    if statement.provider.name:
        data["creator"] = {"@type": "sc:Organization", "name": statement.provider.name}
    if licenses:
        data["license"] = licenses
    if facts.newest:
        data["dateModified"] = facts.newest
    languages = sorted(
        {name for source in facts.sources if source.languages for name in source.languages.tokens}
    )
    if languages:
        data["inLanguage"] = languages
    return data


def _describe(facts: TrainingFacts) -> str:
    sources = "; ".join(
        f"{source.title}: {source.served_tokens:,} tokens"
        + (f" ({source.statement.description})" if source.statement.description else "")
        for source in facts.sources
    )
    proof = f"plan {facts.plan}" + (f", commitment {facts.commitment}" if facts.commitment else "")
    return f"Tokens that the weights have seen, by source: {sources}. {proof}."


def _distribution(source: SourceFacts) -> list[dict[str, Any]]:
    """Describe a source's manifest, and its shards; a lost dataset has neither."""
    account = source.account
    if account is None:
        return []
    shards_url = account.view.url if account.view else source.url
    where = storage.join(shards_url, manifests.NAME)
    try:
        digest = hashlib.sha256(storage.read(where)).hexdigest()
    except UserError:
        return []
    return [
        {
            "@type": "cr:FileObject",
            "@id": f"{source.name}/manifest",
            "name": f"{source.name}/manifest",
            "description": f"Manifest of the dataset {source.dataset}.",
            "contentUrl": where,
            "encodingFormat": "application/json",
            "sha256": digest,
        },
        {
            "@type": "cr:FileSet",
            "@id": f"{source.name}/shards",
            "name": f"{source.name}/shards",
            "description": f"{account.base.tokens:,} tokens of {source.title}.",
            "containedIn": {"@id": f"{source.name}/manifest"},
            "encodingFormat": _media_type(account.base.format),
            "includes": "shards/*",
        },
    ]


def _media_type(format: str) -> str:
    return "application/vnd.apache.arrow.file" if format == "arrow" else "application/octet-stream"
