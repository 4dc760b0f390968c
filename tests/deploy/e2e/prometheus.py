"""A local Prometheus that scrapes a service and evaluates the alert rules."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml  # type: ignore[import-untyped]

from tests.deploy.rendering import ROOT

MONITORING = ROOT / "deploy" / "k8s" / "monitoring"
_START_TIMEOUT_S = 30.0
# The range is longer than the loads of the tests take on a busy machine; within a shorter range, no request might end.
_VARIABLES = {
    "$__rate_interval": "5m",
    "$__range_s": "300",
    "$__range": "5m",
    "$namespace": ".*",
    "$client": ".*",
}


def panel_expressions() -> Iterator[tuple[str, str]]:
    """Yield the name of the dashboard and of the panel, and the query, of all queries of the dashboards."""
    for name in ("dashboard", "tenants"):
        for panel in json.loads((MONITORING / f"{name}.json").read_text(encoding="utf-8"))["panels"]:
            for target in panel.get("targets", []):
                expression = target["expr"]
                for variable, value in _VARIABLES.items():
                    expression = expression.replace(variable, value)
                yield f"{name}: {panel['title']}", expression


@dataclass(frozen=True)
class Target:
    """A process to scrape, with its labels."""

    address: str
    part: str
    pod: str


class Prometheus:
    """A context manager that runs `prometheus`."""

    def __init__(self, processes: Sequence[Target], folder: Path) -> None:
        self._folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._address = f"127.0.0.1:{probe.getsockname()[1]}"
        # These are the labels that scrape.yaml sets in a Kubernetes cluster.
        targets = [
            {"targets": [it.address], "labels": {"part": it.part, "pod": it.pod, "namespace": "midstream"}}
            for it in processes
        ]
        self.num_targets = len(targets)
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(MONITORING / "alerts.yaml")],
            "scrape_configs": [{"job_name": "midstream", "static_configs": targets}],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")

    def __enter__(self) -> Self:
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={self._folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={self._folder / 'data'}",
                    f"--web.listen-address={self._address}",
                ],
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + _START_TIMEOUT_S
        while self._num_up() < self.num_targets:
            if time.monotonic() > deadline or self._process.poll() is not None:
                self._process.kill()
                raise TimeoutError((self._folder / "log").read_text(encoding="utf-8")[-3000:])
            time.sleep(0.2)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait(30)

    def query(self, expression: str) -> dict[tuple[tuple[str, str], ...], float]:
        """Return the samples of an instant query, as a map from labels to value.

        Raises:
            ValueError: The expression is invalid.
        """
        result = self._get("query", query=expression)["result"]
        return {tuple(sorted(sample["metric"].items())): float(sample["value"][1]) for sample in result}

    def rules(self) -> list[dict[str, Any]]:
        """Return the alert rules with their health and state."""
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def _get(self, path: str, **parameters: str) -> dict[str, Any]:
        url = f"http://{self._address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                data: dict[str, Any] = json.load(answer)["data"]
                return data
        except urllib.error.HTTPError as error:
            raise ValueError(f"{parameters}: {error.read().decode()}") from error

    def _num_up(self) -> float:
        try:
            with urllib.request.urlopen(f"http://{self._address}/-/ready", timeout=10):
                return sum(self.query('up{job="midstream"}').values())
        except (urllib.error.URLError, OSError):
            return 0.0
