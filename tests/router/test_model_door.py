"""Which calls name their model in the body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from midstream.model.folder import open_model_folder
from router.protocols.model_door import BY_BODY
from router.protocols.openai.openapi import document


def properties(schema: Mapping[str, Any], pages: Mapping[str, Any]) -> set[str]:
    """Return the names of a schema's properties; the document has only references within itself."""
    if "$ref" in schema:
        target: Any = pages
        for part in schema["$ref"].removeprefix("#/").split("/"):
            target = target[part]
        return properties(target, pages)
    parts = [*schema.get("allOf", ()), *schema.get("oneOf", ()), *schema.get("anyOf", ())]
    return set(schema.get("properties", ())).union(*(properties(part, pages) for part in parts))


def test_the_model_of_every_documented_body_is_read() -> None:
    pages = document(open_model_folder("smollm2"))
    named = {
        path
        for path, operations in pages["paths"].items()
        for kind, body in operations.get("post", {}).get("requestBody", {}).get("content", {}).items()
        if kind == "application/json" and "model" in properties(body["schema"], pages)
    }
    assert named
    assert named <= BY_BODY
