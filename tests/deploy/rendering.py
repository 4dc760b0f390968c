"""The overlays as rendered by kubectl."""

from __future__ import annotations

import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[2]
OVERLAYS = ("cpu", "gpu", "ha", "multinode", "keda", "secure")
Manifest = dict[str, Any]


class Rendered:
    """The objects of one overlay, with further components, by kind and name."""

    def __init__(self, overlay: str, *components: str) -> None:
        self.overlay = overlay
        with tempfile.TemporaryDirectory() as folder:
            base = os.path.relpath(ROOT / "deploy" / "k8s", folder)
            names = {
                "resources": [f"{base}/overlays/{overlay}"],
                "components": [f"{base}/components/{component}" for component in components],
            }
            Path(folder, "kustomization.yaml").write_text(yaml.safe_dump(names), encoding="utf-8")
            text = subprocess.run(["kubectl", "kustomize", folder], check=True, capture_output=True, text=True).stdout
        self.objects: list[Manifest] = list(yaml.safe_load_all(text))

    def all(self, kind: str) -> list[Manifest]:
        return [item for item in self.objects if item["kind"] == kind]

    def get(self, kind: str, name: str) -> Manifest:
        (found,) = (item for item in self.all(kind) if item["metadata"]["name"] == name)
        return found

    def names(self, kind: str) -> set[str]:
        return {item["metadata"]["name"] for item in self.all(kind)}

    def config(self) -> dict[str, str]:
        """Return the ConfigMap that every component reads."""
        (found,) = (item for item in self.all("ConfigMap") if item["metadata"]["name"].startswith("midstream-"))
        return dict(found["data"])

    def pods(self) -> dict[str, Manifest]:
        """Return a map from components to pod templates."""
        pods = {item["metadata"]["name"]: item["spec"]["template"] for item in self.all("Deployment")}
        for item in self.all("LeaderWorkerSet"):
            pods[item["metadata"]["name"]] = item["spec"]["leaderWorkerTemplate"]["workerTemplate"]
        return pods


render = cache(Rendered)


def container_of(pod: Manifest) -> Manifest:
    (container,) = pod["spec"]["containers"]
    return dict(container)


def ports_of(pod: Manifest) -> dict[str, int]:
    """Return a map from the names of a container's ports to their numbers."""
    return {port["name"]: port["containerPort"] for port in container_of(pod)["ports"]}


def labels_match(selector: Manifest, labels: dict[str, str]) -> bool:
    """Return whether a label selector without expressions matches `labels`; an empty selector matches everything."""
    assert set(selector) <= {"matchLabels"}, selector
    wanted: dict[str, str] = selector.get("matchLabels", {})
    return wanted.items() <= labels.items()
