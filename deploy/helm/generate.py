"""Writes the chart's files from the kustomize bases, so that both deploy the same: `python deploy/helm/generate.py`.

The chart's template reads files/ACCELERATOR-JOURNAL[-secure].yaml and changes what the values name. A test compares the
committed files with what this writes. Needs kubectl and PyYAML.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml  # type: ignore[import-untyped]

HERE = Path(__file__).resolve().parent
KUSTOMIZE = HERE.parent / "k8s"
FILES = HERE / "midstream" / "files"


def generate(target: Path) -> None:
    """Write all files into `target`."""
    monitoring: list[dict[str, object]] = []
    for accelerator, journal, is_secure in itertools.product(("cpu", "gpu"), ("sqlite", "postgres"), (False, True)):
        components = ["ha"] * (journal == "postgres") + ["secure"] * is_secure
        objects, monitoring = [], []
        for item in render(f"overlays/{accelerator}", components):
            if item["kind"] == "ConfigMap" and item["metadata"]["name"] in ("grafana-dashboard", "prometheus"):
                monitoring.append(item)
            elif item["kind"] != "Namespace":  # a release is installed into one that exists
                objects.append(item)
        write(target / f"{accelerator}-{journal}{'-secure' if is_secure else ''}.yaml", objects)
    write(target / "monitoring.yaml", monitoring)
    policy = KUSTOMIZE / "overlays" / "roles" / "transfer-policy.yaml"
    write(target / "roles.yaml", list(yaml.safe_load_all(policy.read_text(encoding="utf-8"))))
    scaled = KUSTOMIZE / "components" / "keda" / "scaled-objects.yaml"
    write(target / "keda.yaml", list(yaml.safe_load_all(scaled.read_text(encoding="utf-8"))))
    apart = [item for item in render("overlays/roles", ["keda-roles"]) if item["kind"] == "ScaledObject"]
    write(target / "keda-roles.yaml", apart)


def render(overlay: str, components: list[str]) -> list[dict[str, object]]:
    """Return what kustomize makes of an overlay with components."""
    with tempfile.TemporaryDirectory() as folder:
        where = {
            name: os.path.relpath(KUSTOMIZE / name, folder)
            for name in (overlay, *(f"components/{it}" for it in components))
        }
        first, *others = where.values()
        text = yaml.safe_dump({"resources": [first], "components": others})
        Path(folder, "kustomization.yaml").write_text(text, encoding="utf-8")
        command = ["kubectl", "kustomize", "--load-restrictor", "LoadRestrictionsNone", folder]
        made = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return list(yaml.safe_load_all(made))


def write(path: Path, objects: list[dict[str, object]]) -> None:
    """Write objects as documents."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump_all(objects, sort_keys=True, width=10_000)
    path.write_text(f"# Made by deploy/helm/generate.py.\n---\n{text}", encoding="utf-8")


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else FILES)
