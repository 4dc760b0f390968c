"""Each alert fires where something is wrong and nowhere else: promtool evaluates the rules on made-up samples."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from tests.deploy.rendering import ROOT

RULES = ROOT / "deploy" / "k8s" / "monitoring" / "alerts.yaml"
ALERTS: dict[str, dict[str, Any]] = {
    rule["alert"]: rule
    for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
    if "alert" in rule
}
# Three days and a few hours of samples that are ten minutes apart, for the longest windows.
_LONG = 3 * 24 * 6 + 20
_Series = dict[str, str]


@dataclass(frozen=True)
class Case:
    """Samples by name and labels without the namespace, in promtool's notation.

    Attributes:
        wrong: Samples with which the alert fires.
        fine: Samples of a service in which nothing is wrong.
        summary: The alert's, for the namespace `one`.
        minute: When the alert fires.
        interval: Time between samples.
        labels: Its labels in addition to severity and namespace.
    """

    wrong: _Series
    fine: _Series
    summary: str
    minute: int = 30
    interval: str = "1m"
    labels: tuple[tuple[str, str], ...] = ()


def constant(value: float, length: int = 60) -> str:
    return f"{value}x{length}"


def growing(by: float, length: int = 60) -> str:
    return f"0+{by}x{length}"


def ended(per_minute: float, errors: float, length: int = 60) -> _Series:
    """Requests that end per minute, and those of them that end in an error."""
    name = "midstream:request_success_total"
    return {
        f'{name}{{part="router",finished_reason="stop"}}': growing(per_minute - errors, length),
        f'{name}{{part="router",finished_reason="error"}}': growing(errors, length),
    }


def histogram(name: str, bounds: dict[str, float], labels: str = 'part="router"', length: int = 60) -> _Series:
    """Observations per minute up to each bound."""
    total = max(bounds.values())
    buckets = {f'{name}_bucket{{{labels},le="{bound}"}}': growing(rate, length) for bound, rate in bounds.items()}
    return buckets | {
        f'{name}_bucket{{{labels},le="+Inf"}}': growing(total, length),
        f"{name}_count{{{labels}}}": growing(total, length),
    }


def first_tokens(slow_percent: float, length: int = 60) -> _Series:
    return histogram("midstream:time_to_first_token_seconds", {"5.0": 100 - slow_percent, "10.0": 100}, length=length)


UP = 'up{job="midstream",part="router",pod="p"}'
GROUPS = 'midstream:num_worker_groups{pod="p"}'
CASES = {
    # The namespace had a process an hour ago.
    "MidstreamAbsent": Case(
        {UP: "1x20 stale"},
        {UP: constant(1, 100)},
        "Prometheus has no process of Midstream in one to scrape.",
        minute=78,
    ),
    "MidstreamSchedulerAbsent": Case(
        {UP: constant(1)}, {UP: constant(1), GROUPS: constant(1)}, "In one, no scheduler exports metrics."
    ),
    "MidstreamPartDown": Case(
        {UP: constant(0)},
        {UP: constant(1)},
        "router p in one does not respond.",
        labels=(("job", "midstream"), ("part", "router"), ("pod", "p")),
    ),
    "MidstreamErrorBudgetBurns": Case(
        ended(100, 2, 90),
        ended(100, 0.5, 90),
        "In one, 2% of requests end in an error, which uses up the error budget within days.",
        minute=80,
    ),
    "MidstreamErrorBudgetUsed": Case(
        ended(1000, 2, _LONG),
        ended(1000, 0.5, _LONG),
        "In one, 0.2% of requests of three days ended in an error: more than the objective.",
        minute=10 * _LONG,
        interval="10m",
    ),
    "MidstreamFirstTokenBudgetBurns": Case(
        first_tokens(20, 90),
        first_tokens(5, 90),
        "In one, 20% of first outputs take longer than 5 s, which uses up their budget within days.",
        minute=80,
    ),
    "MidstreamFirstTokenBudgetUsed": Case(
        first_tokens(2, _LONG),
        first_tokens(0.5, _LONG),
        "In one, 2% of first outputs of three days took longer than 5 s: more than the objective.",
        minute=10 * _LONG,
        interval="10m",
    ),
    "MidstreamTokensSlow": Case(
        histogram("midstream:inter_token_latency_seconds", {"0.5": 1, "1.0": 2}),
        histogram("midstream:inter_token_latency_seconds", {"0.25": 2, "0.5": 2, "1.0": 2}),
        "In one, the 95th percentile of the time between tokens is 950ms.",
    ),
    "MidstreamQueueGrows": Case(
        {'midstream:num_requests_waiting{pod="p"}': constant(201)},
        {'midstream:num_requests_waiting{pod="p"}': constant(200)},
        "In one, 201 requests are waiting for a worker.",
    ),
    "MidstreamKvCacheFull": Case(
        {'midstream:kv_cache_usage_perc{pod="p"}': constant(0.96)},
        {'midstream:kv_cache_usage_perc{pod="p"}': constant(0.95)},
        "In one, KV cache use is 96%.",
    ),
    # A request that waits for its grammar is queued again, which is no preemption.
    "MidstreamPreempts": Case(
        {'midstream:num_preemptions_total{pod="p"}': growing(120)},
        {
            'midstream:num_preemptions_total{pod="p"}': growing(60),
            'midstream:num_postponements_total{pod="p"}': growing(6000),
        },
        "In one, 2 requests per second are paused for lack of KV blocks.",
    ),
    "MidstreamSchedulerLost": Case(
        {'midstream:num_connected_schedulers{pod="p"}': constant(0)},
        {'midstream:num_connected_schedulers{pod="p"}': constant(1)},
        "Detokenizer p in one is not connected to a scheduler.",
        labels=(("pod", "p"),),
    ),
    "MidstreamDetokenizersLost": Case(
        {'midstream:num_live_detokenizers{pod="p"}': constant(0)},
        {'midstream:num_live_detokenizers{pod="p"}': constant(1)},
        "Router p in one is not connected to a detokenizer.",
        labels=(("pod", "p"),),
    ),
    # The active scheduler of two has the workers.
    "MidstreamNoWorker": Case(
        {GROUPS: constant(0), 'midstream:num_worker_groups{pod="standby"}': constant(0)},
        {GROUPS: constant(1), 'midstream:num_worker_groups{pod="standby"}': constant(0)},
        "In one, no worker is registered, so no tokens are generated.",
    ),
    "MidstreamWorkersDie": Case(
        {'midstream:num_worker_deaths_total{pod="p"}': growing(1)},
        {'midstream:num_worker_deaths_total{pod="p"}': "0x20 3x40"},
        "In one, 10 worker groups were lost within ten minutes.",
    ),
    "MidstreamWorkerHeldOff": Case(
        {'midstream:num_worker_groups_held_off{pod="p"}': constant(2)},
        {'midstream:num_worker_groups_held_off{pod="p"}': constant(0)},
        "In one, 2 worker groups return wrong results or die early, and are held off.",
    ),
    "MidstreamWorkerWrong": Case(
        {'midstream:num_wrong_workers_total{pod="p"}': "0x20 3x40"},
        {'midstream:num_wrong_workers_total{pod="p"}': constant(3)},
        "In one, the results of 3 workers differ from those of others. Find out which tokens are unproved.",
    ),
    "MidstreamJournalLost": Case(
        {'midstream:journal_losses_total{pod="p"}': "0x25 1x40"},
        {'midstream:journal_losses_total{pod="p"}': constant(0)},
        "In one, the journal was deleted or truncated while in use, and was rewritten.",
    ),
    "MidstreamRequestQuarantined": Case(
        {'midstream:num_quarantined_total{pod="p"}': "0x25 9x40"},
        {'midstream:num_quarantined_total{pod="p"}': constant(9)},
        "In one, 9 requests were ended because workers died while running them.",
    ),
    "MidstreamStepsSlow": Case(
        histogram("midstream:worker_step_seconds", {"2.5": 1, "5.0": 2}, 'pod="p"'),
        histogram("midstream:worker_step_seconds", {"1.0": 2, "2.5": 2}, 'pod="p"'),
        "Steps of worker p in one take 4.75s.",
        labels=(("pod", "p"),),
    ),
    "MidstreamBlocksUnaccounted": Case(
        {'midstream:kv_conservation_violations_total{pod="p"}': constant(1)},
        {'midstream:kv_conservation_violations_total{pod="p"}': constant(0)},
        "In one, the counts of free, cached and held KV blocks were inconsistent 1 times. This is a bug.",
    ),
    "MidstreamJournalDamaged": Case(
        {'midstream:journal_damaged_records_total{pod="p"}': constant(2)},
        {'midstream:journal_damaged_records_total{pod="p"}': constant(0)},
        "In one, the scheduler found 2 damaged records when it read the journal.",
    ),
    "MidstreamConnectionsRefused": Case(
        {'midstream:num_refused_connections_total{pod="p"}': growing(60)},
        {'midstream:num_refused_connections_total{pod="p"}': growing(6)},
        "In one, 1 connections per second to the worker port are rejected.",
    ),
}


def in_namespace(series: _Series, namespace: str) -> list[dict[str, str]]:
    return [
        {"series": name.replace("{", f'{{namespace="{namespace}",'), "values": values}
        for name, values in series.items()
    ]


def check(
    tmp_path: Path, name: str, series: list[dict[str, str]], alerts: list[dict[str, Any]], minute: int = 0
) -> None:
    """Check which alerts of this name fire at a minute, by default that of its case."""
    case = CASES[name]
    minute = minute or case.minute
    test = {
        "interval": case.interval,
        "input_series": series,
        "alert_rule_test": [{"eval_time": f"{minute}m", "alertname": name, "exp_alerts": alerts}],
    }
    file = tmp_path / f"{name}.yaml"
    # Otherwise, promtool evaluates the groups in random order, so alerts may see the series recorded the time before.
    order = [group["name"] for group in yaml.safe_load(RULES.read_text())["groups"]]
    rules = {"rule_files": [str(RULES)], "group_eval_order": order, "evaluation_interval": case.interval}
    file.write_text(yaml.safe_dump({**rules, "tests": [test]}))
    result = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def expected(name: str) -> dict[str, Any]:
    rule, case = ALERTS[name], CASES[name]
    return {
        "exp_labels": rule["labels"] | {"namespace": "one"} | dict(case.labels),
        "exp_annotations": {"summary": case.summary, "runbook_url": rule["annotations"]["runbook_url"]},
    }


def test_every_alert_has_a_case() -> None:
    assert list(CASES) == list(ALERTS)


@pytest.mark.parametrize("name", CASES)
def test_it_fires_in_the_one_of_two_namespaces_in_which_something_is_wrong(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    series = [*in_namespace(case.wrong, "one"), *in_namespace(case.fine, "two")]
    check(tmp_path, name, series, [expected(name)])


@pytest.mark.parametrize("name", CASES)
def test_it_does_not_fire_where_nothing_is_wrong(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    series = [*in_namespace(case.fine, "one"), *in_namespace(case.fine, "two")]
    check(tmp_path, name, series, [])


@pytest.mark.parametrize("name", CASES)
def test_without_any_series_only_their_absence_is_reported(name: str, tmp_path: Path) -> None:
    rule = ALERTS[name]
    alerts = []
    if name == "MidstreamAbsent":
        summary = "Prometheus has no process of Midstream to scrape."
        annotations = {"summary": summary, "runbook_url": rule["annotations"]["runbook_url"]}
        alerts = [{"exp_labels": rule["labels"] | {"job": "midstream"}, "exp_annotations": annotations}]
    check(tmp_path, name, [], alerts)


def test_requests_that_all_fail_are_noticed(tmp_path: Path) -> None:
    """There is no series of successful requests then."""
    name = 'midstream:request_success_total{part="router",finished_reason="error"}'
    alert = expected("MidstreamErrorBudgetBurns")
    alert["exp_annotations"]["summary"] = alert["exp_annotations"]["summary"].replace("2%", "100%")
    check(tmp_path, "MidstreamErrorBudgetBurns", in_namespace({name: growing(1, 90)}, "one"), [alert])


def test_a_short_burst_of_errors_does_not_use_up_the_budget(tmp_path: Path) -> None:
    """Half of five minutes fails after hours without an error: less than 1.44% of the hour."""
    name = 'midstream:request_success_total{part="router",finished_reason='
    series = {f'{name}"stop"}}': growing(100, 600), f'{name}"error"}}': "0x400 20 40x200"}
    check(tmp_path, "MidstreamErrorBudgetBurns", in_namespace(series, "one"), [], minute=402)
