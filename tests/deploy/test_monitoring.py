"""Alerts, the dashboard and autoscalers use only metrics that exist, and every alert is documented."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import yaml  # type: ignore[import-untyped]

from tests.deploy.rendering import ROOT

MONITORING = ROOT / "deploy" / "k8s" / "monitoring"
SERVICES = ("router", "scheduler", "gpu_worker", "detokenizer")


def load(name: str) -> Any:
    text = (MONITORING / name).read_text(encoding="utf-8")
    return json.loads(text) if name.endswith(".json") else yaml.safe_load(text)


def alerts() -> list[dict[str, Any]]:
    return [rule for group in load("alerts.yaml")["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    return list(load("dashboard.json")["panels"])


def expressions() -> Iterator[str]:
    yield from (rule["expr"] for rule in alerts())
    yield from (target["expr"] for panel in panels() for target in panel.get("targets", []))
    rules = load("adapter-rules.yaml")
    yield from (
        rule[query] for rule in rules["rules"] + rules["externalRules"] for query in ("seriesQuery", "metricsQuery")
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
        re.sub(r"_(total|bucket)$", "", name)
        for expression in expressions()
        for name in re.findall(r"midstream:(\w+)", expression)
    }
    assert len(wanted) > 20
    assert {name for name in wanted if f'"{name}"' not in source} == set()


def test_every_alert_is_explained() -> None:
    names = [rule["alert"] for rule in alerts()]
    manual = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    assert re.findall(r"^### (Midstream\w+)$", manual, re.MULTILINE) == names
    assert all(rule["annotations"]["summary"] and rule["labels"]["severity"] for rule in alerts())


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in panels()}) == len(panels())
    assert all(panel["description"] for panel in panels() if panel["type"] != "row")
