"""/openapi.json describes what the router serves: every route, query parameter and field with an effect."""

from __future__ import annotations

import inspect
from typing import Any

import httpx2
import pytest
from starlette.routing import Route

from midstream.model.folder import ModelFolder
from router.protocols.fields import TABLES
from router.protocols.openai.openapi import document
from tests.router.conftest import Part

# Pages and their data, and aliases of documented paths.
UNLISTED = (
    "/",
    "/docs",
    "/version",
    "/static/",
    "/dashboard",
    "/v1/score",
    "/v1/rerank",
    "/v2/rerank",
    "/v2/models/{model}/versions/",
    "/v1/messages/{",
)


@pytest.fixture(scope="module")
def paths(folder: ModelFolder) -> dict[str, Any]:
    return document(folder)["paths"]  # type: ignore[no-any-return]


async def test_every_route_and_query_parameter_is_described(router: Part, paths: dict[str, Any]) -> None:
    app: Any = router.pages
    num_found = 0
    for route in app.routes:
        assert isinstance(route, Route)
        path = route.path.replace(":path", "")
        if path == "/" or path.startswith(UNLISTED[1:]):
            continue
        variables = inspect.getclosurevars(route.endpoint).nonlocals
        for method in (route.methods or set()) - {"HEAD"}:
            if "endpoint" not in variables and path.startswith("/v1/"):
                continue  # the handler that rejects unsupported methods
            described = paths[path][method.lower()].get("parameters", ())
            known = {item["name"] for item in described if item["in"] == "query"}
            if variables.get("parameters") is not None:
                assert known == set(variables["parameters"]), path
                num_found += len(known)
    assert num_found > 10


def test_the_parameters_of_lists_of_models_are_described(paths: dict[str, Any]) -> None:
    described = [item["name"] for item in paths["/v1/models"]["get"]["parameters"]]
    assert described == ["anthropic-version", "limit", "after_id", "before_id", "lifecycle"]


def test_every_operation_is_in_a_group_and_every_field_is_described(folder: ModelFolder) -> None:
    described = document(folder)
    groups = {tag["name"] for tag in described["tags"]}
    operations = [operation for of in described["paths"].values() for operation in of.values()]
    assert {tag for operation in operations for tag in operation["tags"]} == groups
    bodies = [media for it in operations if "requestBody" in it for media in it["requestBody"]["content"].values()]
    assert len(bodies) > 10
    for media in bodies:
        assert set(media["example"]) <= media["schema"]["properties"].keys()
        fields = media["schema"]["properties"].items()
        assert [name for name, field in fields if not field["description"]] == []


@pytest.mark.parametrize("path", TABLES)
async def test_values_beyond_the_described_bounds_are_refused(router: Part, paths: dict[str, Any], path: str) -> None:
    media = paths[path]["post"]["requestBody"]["content"]["application/json"]
    assert router.http is not None
    headers = {"anthropic-version": "2023-06-01"}
    accepted = []
    async with httpx2.AsyncClient(
        base_url=f"http://127.0.0.1:{router.http.port}", headers=headers, timeout=240
    ) as client:
        for name, field in media["schema"]["properties"].items():
            for value in beyond(field.get("anyOf", [field])[0]):
                # A request that is accepted waits, since no worker runs.
                body = {"timeout_ms": 2000} if "timeout_ms" in media["schema"]["properties"] else {}
                answer = await client.post(path, json={**body, **media["example"], name: value})
                error = answer.json()["error"]
                if answer.status_code != 400 or name not in (error.get("param") or error["message"]):
                    accepted.append((name, value, answer.status_code, answer.text[:200]))
    assert accepted == []


def beyond(schema: dict[str, Any]) -> list[Any]:
    """Return the values next to the bounds of a number, a string or a list that are outside of them."""
    step = 1 if schema.get("type") == "integer" else 0.001
    found: list[Any] = []
    if "minimum" in schema:
        found.append(schema["minimum"] - step)
    if "exclusiveMinimum" in schema:
        found.append(schema["exclusiveMinimum"])
    if "maximum" in schema:
        found.append(schema["maximum"] + step if schema["maximum"] < 1e30 else schema["maximum"] * 2)
    if "maxLength" in schema:
        found.append("x" * (schema["maxLength"] + 1))
    if schema.get("minLength"):
        found.append("")
    if "maxItems" in schema:
        item = schema["items"].get("anyOf", [schema["items"]])[0]
        found.append(["x" if item.get("type") == "string" else 1] * (schema["maxItems"] + 1))
    if schema.get("minItems"):
        found.append([])
    return found


@pytest.mark.parametrize("path", TABLES)
def test_every_field_with_an_effect_is_described(path: str, paths: dict[str, Any]) -> None:
    schema = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    works = {name for name, (status, _) in TABLES[path].items() if status == "works" and "." not in name}
    assert works <= schema["properties"].keys()
