"""Alerts, the dashboard and autoscalers use only metrics that exist, and every alert is documented."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from tests.deploy.rendering import ROOT

MONITORING = ROOT / "deploy" / "k8s" / "monitoring"
DASHBOARDS = ("dashboard.json", "tenants.json")
SERVICES = ("router", "scheduler", "gpu_worker", "detokenizer")


def load(name: str) -> Any:
    text = (MONITORING / name).read_text(encoding="utf-8")
    return json.loads(text) if name.endswith(".json") else yaml.safe_load(text)


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in rules() if "alert" in rule]


def rules() -> list[dict[str, Any]]:
    return [rule for group in load("alerts.yaml")["groups"] for rule in group["rules"]]


def panels(dashboard: str) -> list[dict[str, Any]]:
    return list(load(dashboard)["panels"])


def panel_expressions(dashboard: str) -> list[str]:
    return [target["expr"] for panel in panels(dashboard) for target in panel.get("targets", [])]


def expressions() -> Iterator[str]:
    yield from (rule["expr"] for rule in rules())
    for dashboard in DASHBOARDS:
        yield from panel_expressions(dashboard)
    adapter = load("adapter-rules.yaml")
    yield from (
        rule[query] for rule in adapter["rules"] + adapter["externalRules"] for query in ("seriesQuery", "metricsQuery")
    )
    keda = (ROOT / "deploy" / "k8s" / "components" / "keda" / "scaled-objects.yaml").read_text(encoding="utf-8")
    yield from (
        trigger["metadata"]["query"] for item in yaml.safe_load_all(keda) for trigger in item["spec"]["triggers"]
    )


def test_every_metric_is_one_of_ours() -> None:
    source = "".join(
        file.read_text(encoding="utf-8") for service in SERVICES for file in (ROOT / service).rglob("*.py")
    )
    wanted = {
        re.sub(r"_(total|bucket|count)$", "", name)
        for expression in expressions()
        for name in re.findall(r"\bmidstream:(\w+)", expression)
    }
    assert len(wanted) > 20
    assert {name for name in wanted if f'"{name}"' not in source} == set()


def test_rates_are_those_of_counters() -> None:
    used = {name for text in expressions() for name in re.findall(r"(?:rate|increase)\(([\w:]+)", text)}
    assert {name for name in used if not name.endswith(("_total", "_bucket", "_sum", "_count"))} == set()
    assert len(used) > 20


def test_every_alert_is_explained() -> None:
    names = [rule["alert"] for rule in alerts()]
    manual = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    assert re.findall(r"^### (Midstream\w+)$", manual, re.MULTILINE) == names
    for rule in alerts():
        assert rule["annotations"].keys() == {"summary", "runbook_url"}
        assert rule["annotations"]["runbook_url"] == f"https://midstream.example/operations/#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("warning", "critical")


def test_alerts_tell_namespaces_apart() -> None:
    """An aggregate over all namespaces hides the one in which something is wrong."""
    for rule in rules():
        aggregates = re.findall(r"\b(?:sum|min|max|count|avg)\b( by \([^)]*\))?", rule["expr"])
        assert all("namespace" in by for by in aggregates), rule["expr"]
    for rule in alerts():
        assert "$labels.namespace" in rule["annotations"]["summary"], rule["alert"]


@pytest.mark.parametrize("dashboard", DASHBOARDS)
def test_panels_show_the_selected_namespaces(dashboard: str) -> None:
    (variable,) = (it for it in load(dashboard)["templating"]["list"] if it["name"] == "namespace")
    assert variable["query"]["query"] == 'label_values(up{job="midstream"}, namespace)'
    for expression in panel_expressions(dashboard):
        names = re.findall(r"\b(?:midstream:\w+|up|process_\w+)\b", expression)
        assert len(names) == expression.count('namespace=~"$namespace"') > 0, expression


@pytest.mark.parametrize("dashboard", DASHBOARDS)
def test_panels_do_not_overlap(dashboard: str) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels(dashboard):
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in panels(dashboard)}) == len(panels(dashboard))
    assert all(panel["description"] for panel in panels(dashboard) if panel["type"] != "row")
