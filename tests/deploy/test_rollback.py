"""A rollback, by `helm rollback` or by `kubectl apply -k` with the old tags, applies the old objects over the new ones.

Both are rendered: nothing that Kubernetes refuses to change differs, nothing of the new revision is left but unused
settings, and while pods of both run, Services and policies select both.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from midstream import __version__
from tests.deploy.rendering import OVERLAYS, ROOT, Manifest, render
from tests.deploy.test_chart import CHART, VALUES, helm

NEW = "9.8.7"
# What `kubectl apply` cannot change, by kind.
IMMUTABLE = {
    "Deployment": ("selector",),
    "StatefulSet": ("selector", "serviceName", "volumeClaimTemplates"),
    "Job": ("selector", "template"),
    "PersistentVolumeClaim": ("accessModes", "storageClassName", "volumeName", "selector", "volumeMode"),
    "Service": ("clusterIP", "type"),
    "RoleBinding": ("roleRef",),
}
Objects = dict[tuple[str, str], Manifest]


def keyed(objects: list[Manifest]) -> Objects:
    return {(item["kind"], item["metadata"]["name"]): item for item in objects if item}


def check_rollback(old: Objects, new: Objects) -> None:
    assert images(old) != images(new)
    # Settings are in ConfigMaps named by their contents, so that pods of both revisions find theirs. kubectl leaves the
    # new one behind, and helm deletes it.
    for only, others in ((old, new), (new, old)):
        assert {kind for kind, name in only.keys() - others.keys()} <= {"ConfigMap"}
    for key in old.keys() & new.keys():
        for field in IMMUTABLE.get(key[0], ()):
            assert before(old[key], field) == before(new[key], field), (key, field)
    for name, revision in (("old", old), ("new", new)):
        maps = {name for kind, name in revision if kind == "ConfigMap"}
        assert set(config_maps(revision)) <= maps, name
    for selecting, selected in ((old, new), (new, old)):
        for key, item in selecting.items():
            if key[0] == "Service" and (selector := item["spec"].get("selector")):
                assert num_selected(selector, selected) == num_selected(selector, selecting) > 0, key
            if key[0] in ("NetworkPolicy", "PodDisruptionBudget"):
                spec = item["spec"]
                labels = spec["podSelector" if key[0] == "NetworkPolicy" else "selector"].get("matchLabels", {})
                assert num_selected(labels, selected) == num_selected(labels, selecting) > 0, key


def before(item: Manifest, field: str) -> object:
    return item.get(field) if field == "roleRef" else item["spec"].get(field)


def pods(objects: Objects) -> Iterator[Manifest]:
    for (kind, _), item in objects.items():
        if kind in ("Deployment", "StatefulSet"):
            yield item["spec"]["template"]
        elif kind == "LeaderWorkerSet":
            templates = item["spec"]["leaderWorkerTemplate"]
            yield from (templates[name] for name in ("leaderTemplate", "workerTemplate") if name in templates)


def images(objects: Objects) -> set[str]:
    return {container["image"] for pod in pods(objects) for container in pod["spec"]["containers"]}


def config_maps(objects: Objects) -> Iterator[str]:
    for pod in pods(objects):
        for container in pod["spec"]["containers"]:
            yield from (it["configMapRef"]["name"] for it in container.get("envFrom", ()) if "configMapRef" in it)


def num_selected(selector: dict[str, str], objects: Objects) -> int:
    return sum(selector.items() <= pod["metadata"]["labels"].items() for pod in pods(objects))


@pytest.mark.parametrize("values", VALUES)
def test_helm_rolls_back_to_the_earlier_revision(values: str, tmp_path: Path) -> None:
    """The new revision is that of a later chart, with a changed setting."""
    later = tmp_path / "midstream"
    shutil.copytree(CHART, later)
    for path in (later / "Chart.yaml", *(later / "files").iterdir()):
        path.write_text(path.read_text().replace(__version__, NEW))

    def rendered(chart: Path, *flags: str) -> Objects:
        words = ("template", "midstream", str(chart), "-n", "n", "-f", str(CHART / "ci" / f"{values}.yaml"), *flags)
        made = helm(*words)
        assert made.returncode == 0, made.stderr
        return keyed(list(yaml.safe_load_all(made.stdout)))

    old = rendered(CHART, "--set-string", "images.tag=old")
    new = rendered(later, "--set-string", "images.tag=new", "--set-string", "settings.MIDSTREAM_MAX_QUEUE_SIZE=77")
    assert old.keys() ^ new.keys()  # the changed setting
    check_rollback(old, new)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubectl_rolls_back_to_the_earlier_tags(overlay: str, tmp_path: Path) -> None:
    """The new revision has other tags and a changed setting."""
    old = keyed(render(overlay).objects)
    names = {image.rpartition("/")[2].partition(":")[0] for image in images(old)}
    changed = {
        "resources": [os.path.relpath(ROOT / "deploy" / "k8s" / "overlays" / overlay, tmp_path)],
        "images": [{"name": name, "newTag": NEW} for name in sorted(names)],
        "namespace": "midstream",
        "configMapGenerator": [{"name": "midstream", "behavior": "merge", "literals": ["MIDSTREAM_MAX_QUEUE_SIZE=77"]}],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(changed), encoding="utf-8")
    made = subprocess.run(["kubectl", "kustomize", str(tmp_path)], check=True, capture_output=True, text=True).stdout
    new = keyed(list(yaml.safe_load_all(made)))
    assert {image.rpartition(":")[2].removesuffix("-cuda") for image in images(new)} == {NEW}
    check_rollback(old, new)
