"""A real Prometheus under load: every expression in the shipped alerts, dashboard and autoscalers is valid and returns
data. Run by `make e2e-containers`.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from tests.deploy.e2e.cluster import Cluster
from tests.deploy.e2e.load import stream
from tests.deploy.e2e.prometheus import MONITORING, Prometheus
from tests.deploy.rendering import render

pytestmark = pytest.mark.timeout(300)

# Only the left side of an alert's comparison is queried: while no alert fires, the comparison itself returns no sample,
# but its left side must.
_COMPARISON = re.compile(r" (>|<|==) [\d.]+$")
_Samples = dict[tuple[tuple[str, str], ...], float]


def alert_expressions() -> Iterator[str]:
    for group in yaml.safe_load((MONITORING / "alerts.yaml").read_text(encoding="utf-8"))["groups"]:
        for rule in group["rules"]:
            expression, num_comparisons = _COMPARISON.subn("", rule["expr"])
            assert num_comparisons == 1, rule["expr"]
            yield expression


def dashboard_expressions() -> Iterator[str]:
    dashboard = json.loads((MONITORING / "dashboard.json").read_text(encoding="utf-8"))
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            # The range is longer than the loads of this test take on a busy machine; within a shorter range, no request
            # might end.
            yield target["expr"].replace("$__rate_interval", "5m")


def autoscaler_expressions() -> Iterator[str]:
    for rule in yaml.safe_load((MONITORING / "adapter-rules.yaml").read_text(encoding="utf-8"))["rules"]:
        query = rule["metricsQuery"].replace("<<.Series>>", rule["seriesQuery"].partition("{")[0])
        matchers = 'namespace="midstream",pod=~".+"'
        yield query.replace("<<.LabelMatchers>>", matchers).replace("<<.GroupBy>>", "pod")
    for scaled in render("keda").all("ScaledObject"):
        for trigger in scaled["spec"]["triggers"]:
            yield trigger["metadata"]["query"]


def test_every_expression_has_data_under_load(cluster: Cluster, tmp_path: Path) -> None:
    expressions = [*alert_expressions(), *dashboard_expressions(), *autoscaler_expressions()]
    answers: dict[str, _Samples] = {}
    num_relaying: _Samples = {}
    with Prometheus(cluster, tmp_path) as prometheus:

        def ask() -> None:
            answers.update({expression: prometheus.query(expression) for expression in expressions})
            num_relaying.update(prometheus.query('up{part="router"}'))

        # Rates of finished requests require some requests that finished a few scrapes ago and some that finished later.
        for _ in range(2):
            stream(8, 8)
        stream(32, 96, [(0.6, ask)])
        rules = prometheus.rules()
    assert [expression for expression, samples in answers.items() if not samples] == []
    unclear = {expression for expression, samples in answers.items() if any(map(math.isnan, samples.values()))}
    assert unclear == set()
    assert [rule["name"] for rule in rules if rule["health"] != "ok"] == []
    assert [rule["name"] for rule in rules if rule["state"] == "firing"] == []
    # The autoscalers read the metrics of each pod separately.
    relayed = next(iter(autoscaler_expressions()))
    assert {dict(labels)["pod"] for labels in answers[relayed]} == {dict(labels)["pod"] for labels in num_relaying}


def test_alerts_fire() -> None:
    result = subprocess.run(
        ["promtool", "test", "rules", str(Path(__file__).parent / "alerts.test.yaml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    tested = re.findall(r"alertname: (\w+)", (Path(__file__).parent / "alerts.test.yaml").read_text(encoding="utf-8"))
    groups = yaml.safe_load((MONITORING / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    assert tested == [rule["alert"] for group in groups for rule in group["rules"]]
