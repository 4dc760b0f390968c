"""A real Prometheus under load: every expression in the shipped alerts, dashboard and autoscalers is valid and returns
data. Run by `make e2e-containers`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from tests.deploy.e2e.cluster import Cluster
from tests.deploy.e2e.load import stream
from tests.deploy.e2e.prometheus import MONITORING, Prometheus, Target, panel_expressions
from tests.deploy.rendering import render

pytestmark = pytest.mark.timeout(300)

# Only the left sides of an alert's comparisons are queried: while no alert fires, the comparisons return no sample, but
# their left sides must.
_COMPARISON = re.compile(r" (>|<|==) [\d.]+")
_WITHOUT_SAMPLES = ("MidstreamAbsent", "MidstreamSchedulerAbsent")
_Samples = dict[tuple[tuple[str, str], ...], float]


def alert_expressions() -> Iterator[str]:
    for group in yaml.safe_load((MONITORING / "alerts.yaml").read_text(encoding="utf-8"))["groups"]:
        for rule in group["rules"]:
            if rule.get("alert") not in _WITHOUT_SAMPLES:
                expression, num_comparisons = _COMPARISON.subn("", rule["expr"])
                assert bool(num_comparisons) == ("alert" in rule), rule["expr"]
                yield expression


def dashboard_expressions() -> Iterator[str]:
    for title, expression in panel_expressions():
        if title == "tenants: Requests":  # the clients of this test are anonymous, in this panel and those after it
            return
        yield expression


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
    targets = [Target(cluster.metrics_address(pod), part, pod) for part, pods in cluster.pods.items() for pod in pods]
    with Prometheus(targets, tmp_path) as prometheus:

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
