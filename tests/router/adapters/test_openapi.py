"""/openapi.json describes what the router serves: every route, query parameter and field with an effect."""

from __future__ import annotations

import inspect
from typing import Any

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


@pytest.mark.parametrize("path", TABLES)
def test_every_field_with_an_effect_is_described(path: str, paths: dict[str, Any]) -> None:
    schema = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    works = {name for name, (status, _) in TABLES[path].items() if status == "works" and "." not in name}
    assert works <= schema["properties"].keys()
