"""The Helm chart deploys the same objects as kustomize, and each value changes the setting that it is named after."""

from __future__ import annotations

import copy
import json
import re
import runpy
import shutil
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from midstream import __version__
from midstream.config import KNOWN_SETTINGS
from tests.deploy.rendering import ROOT, Manifest, container_of, render

CHART = ROOT / "deploy" / "helm" / "midstream"
HELM = shutil.which("helm") or str(ROOT / ".venv-manifests" / "bin" / "helm")
REGISTRY = "images.registry=registry.example/team"
VALUES = sorted(path.stem for path in (CHART / "ci").glob("*.yaml"))


def helm(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([HELM, *words], capture_output=True, text=True, check=False)


def objects_of(text: str) -> dict[tuple[str, str], Manifest]:
    """Return objects by kind and name; names are without that of the release, which is `midstream`."""
    objects = [item for item in yaml.safe_load_all(text) if item]
    found = {(item["kind"], item["metadata"]["name"].removeprefix("midstream-")): item for item in objects}
    assert len(found) == len(objects)
    return found


_RELEASE_LABELS = (
    "app.kubernetes.io/instance",
    "app.kubernetes.io/managed-by",
    "app.kubernetes.io/version",
    "helm.sh/chart",
)


def without_release(item: Manifest) -> Manifest:
    """Return an object without what names the release `midstream`, and without the hash of its settings."""
    text = yaml.safe_dump(item)
    text = "".join(line for line in text.splitlines(keepends=True) if not line.strip().startswith(_RELEASE_LABELS))
    # Images have these names too, after the registry or before a tag.
    text = re.sub(r"(?<=[ /])(?<!team/)midstream-(?!gpu-worker)([a-z-]+)(?=$|:50)", r"\1", text, flags=re.MULTILINE)
    text = re.sub(r"midstream-[0-9a-z]{10}$", "midstream-HASH", text, flags=re.MULTILINE)
    plain: Manifest = yaml.safe_load(text)
    # The overlays label what they select, and the chart labels everything.
    labels = plain["metadata"].pop("labels", {})
    labels.pop("app.kubernetes.io/name", None)
    plain["metadata"] |= {"labels": labels} if labels else {}
    if plain["kind"] == "NetworkPolicy" and plain["spec"]["podSelector"] == {
        "matchLabels": {"app.kubernetes.io/name": "midstream"}
    }:
        plain["spec"]["podSelector"] = {}  # the overlays have a namespace of their own
    if plain["kind"] == "ScaledObject":
        for trigger in plain["spec"]["triggers"]:
            query = trigger["metadata"]["query"]
            trigger["metadata"]["query"] = re.sub(r',pod=~"midstream-[^"]*"', "", query)
    return plain


def chart(values: str, *flags: str) -> dict[tuple[str, str], Manifest]:
    made = helm(
        "template", "midstream", str(CHART), "-n", "midstream", "-f", str(CHART / "ci" / f"{values}.yaml"), *flags
    )
    assert made.returncode == 0, made.stderr
    return objects_of(made.stdout)


def test_there_are_eight_examples() -> None:
    assert VALUES == ["api-keys", "cpu", "gpu", "ha", "hpa-workers", "keda", "roles", "secure"]


@pytest.mark.parametrize("values", VALUES)
def test_the_chart_lints(values: str) -> None:
    linted = helm("lint", "--strict", str(CHART), "-f", str(CHART / "ci" / f"{values}.yaml"))
    assert linted.returncode == 0, linted.stdout + linted.stderr


def test_its_files_equal_the_output_of_kustomize(tmp_path: Path) -> None:
    runpy.run_path(str(CHART.parent / "generate.py"))["generate"](tmp_path)
    made = {path.name: path.read_text() for path in tmp_path.iterdir()}
    committed = {path.name: path.read_text() for path in (CHART / "files").iterdir()}
    assert made == committed, "run python deploy/helm/generate.py"


@pytest.mark.parametrize(
    ("overlay", "flags"),
    [
        ("cpu", ()),
        ("gpu", ("--set", "accelerator=gpu")),
        ("api-keys", ("--set", "auth.existingSecret=router-tokens")),
        ("secure", ("--set", "secure.enabled=true")),
        ("hpa-workers", ("--set", "autoscaling.kind=hpa-workers")),
        ("keda", ("--set", "autoscaling.kind=keda")),
        ("roles", ("--set", "roles.enabled=true")),
        ("roles-keda", ("--set", "roles.enabled=true,autoscaling.kind=keda")),
    ],
)
def test_without_other_values_it_is_the_overlay(overlay: str, flags: tuple[str, ...]) -> None:
    ours = chart("cpu", *flags)
    theirs = {(item["kind"], item["metadata"]["name"]): item for item in copy.deepcopy(render(overlay).objects)}
    del theirs["Namespace", "midstream"]  # the namespace already exists
    for item in theirs.values():
        if item["kind"] == "Deployment":  # an overlay of one's own names the registry
            (container,) = item["spec"]["template"]["spec"]["containers"]
            container["image"] = f"registry.example/team/{container['image']}"
    plain = [without_release(item) for item in ours.values()]
    assert {(item["kind"], item["metadata"]["name"]): item for item in plain} == {
        (kind, re.sub(r"^midstream-[0-9a-z]{10}$", "midstream-HASH", name)): without_release(item)
        for (kind, name), item in theirs.items()
    }


def test_values_change_the_corresponding_settings() -> None:
    objects = chart("gpu")
    worker, router = objects["Deployment", "worker"], objects["Deployment", "router"]
    pod = worker["spec"]["template"]
    container = container_of(pod)
    assert worker["spec"]["replicas"] == 4
    assert container["image"] == "registry.example/team/midstream-gpu-worker:1.2.3-cuda"
    assert container_of(router["spec"]["template"])["image"] == "registry.example/team/midstream-router:1.2.3"
    assert pod["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    assert pod["spec"]["nodeSelector"] == {"gpu": "h200"}
    assert container["resources"]["requests"] == {"cpu": "8", "memory": "16Gi"}
    claims = [
        volume["persistentVolumeClaim"]["claimName"] for volume in pod["spec"]["volumes"] if "models" in volume["name"]
    ]
    assert claims == ["shared-models"]
    assert objects["HorizontalPodAutoscaler", "router"]["spec"]["minReplicas"] == 3
    journal = objects["PersistentVolumeClaim", "scheduler-journal"]["spec"]
    assert (journal["resources"]["requests"]["storage"], journal["storageClassName"]) == ("50Gi", "fast")
    assert objects["HTTPRoute", "router"]["spec"]["parentRefs"] == [{"name": "public", "namespace": "gateways"}]


def test_prefill_and_decode_workers_have_their_own_values() -> None:
    objects = chart("roles", "--set", "secure.enabled=true")
    prefill, decode = (objects["Deployment", name] for name in ("worker", "worker-decode"))
    assert (prefill["spec"]["replicas"], decode["spec"]["replicas"]) == (2, 4)
    assert container_of(decode["spec"]["template"])["resources"]["requests"]["cpu"] == "4"
    assert decode["spec"]["template"]["spec"]["volumes"] == prefill["spec"]["template"]["spec"]["volumes"]
    refused = helm("template", "midstream", str(CHART), "--set", f"{REGISTRY},roles.enabled=true,accelerator=gpu")
    assert "roles: needs accelerator cpu" in refused.stderr


def test_replicas_of_autoscaled_workers_are_a_minimum() -> None:
    objects = chart("hpa-workers")
    spec = objects["HorizontalPodAutoscaler", "worker"]["spec"]
    assert (spec["minReplicas"], spec["maxReplicas"]) == (3, 12)
    assert "replicas" not in objects["Deployment", "worker"]["spec"]
    unset = chart("hpa-workers", "--set", "replicas.worker=null,replicas.router=null")
    assert unset["HorizontalPodAutoscaler", "worker"]["spec"]["minReplicas"] == 2
    none = chart("keda", "--set", "replicas.worker=0")
    assert none["ScaledObject", "worker"]["spec"]["minReplicaCount"] == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("replicas.worker=0", "replicas.worker: only KEDA scales to 0"),
        ("roles.enabled=true", "roles: prefill and decode workers are autoscaled with autoscaling.kind keda"),
    ],
)
def test_what_prometheus_adapter_cannot_scale_is_rejected(flags: str, words: str) -> None:
    made = helm("template", "midstream", str(CHART), "--set", f"{REGISTRY},autoscaling.kind=hpa-workers,{flags}")
    assert made.returncode != 0
    assert words in made.stderr


def settings_of(objects: dict[tuple[str, str], Manifest]) -> str:
    """Return the name of the ConfigMap that all components read."""
    (found,) = (name for kind, name in objects if kind == "ConfigMap" and re.fullmatch(r"[0-9a-f]{10}", name))
    return found


def test_a_changed_setting_rolls_out() -> None:
    before = settings_of(chart("cpu"))
    objects = chart(
        "cpu", "--set-string", "settings.MIDSTREAM_MAX_QUEUE_SIZE=7", "--set-string", "model.path=/models/x"
    )
    after = settings_of(objects)
    assert before != after
    data = objects["ConfigMap", after]["data"]
    assert (data["MIDSTREAM_MAX_QUEUE_SIZE"], data["MIDSTREAM_MODEL"]) == ("7", "/models/x")
    assert data["MIDSTREAM_SCHEDULERS"] == "dns:///midstream-scheduler:50052"
    for part in ("router", "scheduler", "detokenizer", "worker"):
        container = container_of(objects["Deployment", part]["spec"]["template"])
        assert container["envFrom"][0] == {"configMapRef": {"name": f"midstream-{after}"}}


def test_all_objects_are_in_the_namespace_of_the_release() -> None:
    objects = chart("keda", "--namespace", "elsewhere")
    assert {item["metadata"]["namespace"] for item in objects.values()} == {"elsewhere"}
    (trigger,) = objects["ScaledObject", "router"]["spec"]["triggers"]
    assert 'namespace="elsewhere"' in trigger["metadata"]["query"]
    assert trigger["metadata"]["serverAddress"] == "http://prometheus.observability.svc:9090"
    assert not [name for kind, name in objects if kind == "HorizontalPodAutoscaler"]
    assert objects["Ingress", "router"]["spec"]["tls"] == [{"hosts": ["llm.example"], "secretName": "llm-tls"}]
    (scrape,) = yaml.safe_load(objects["ConfigMap", "prometheus"]["data"]["scrape.yaml"])["scrape_configs"]
    assert scrape["kubernetes_sd_configs"][0]["namespaces"] == {"names": ["elsewhere"]}


@pytest.mark.parametrize("is_secure", ["true", "false"])
def test_a_pod_monitor_sets_the_labels_of_the_scrape_configuration(is_secure: str) -> None:
    objects = chart("cpu", "--set", f"podMonitor.enabled=true,secure.enabled={is_secure}")
    (scrape,) = yaml.safe_load(objects["ConfigMap", "prometheus"]["data"]["scrape.yaml"])["scrape_configs"]
    spec = objects["PodMonitor", "midstream"]["spec"]
    router = objects["Deployment", "router"]["spec"]["template"]["metadata"]
    assert router["labels"][spec["jobLabel"]] == scrape["job_name"]
    (endpoint,) = spec["podMetricsEndpoints"]
    ours = {item["targetLabel"]: item["sourceLabels"] for item in endpoint["relabelings"]}
    theirs = {
        item["target_label"]: item["source_labels"] for item in scrape["relabel_configs"] if "target_label" in item
    }
    # The operator itself sets `namespace` and `pod`.
    assert ours == {name: theirs[name] for name in ("part", *(["__scheme__"] if is_secure == "true" else []))}


@pytest.mark.parametrize(
    "flags",
    [
        "acelerator=cpu",
        "accelerator=tpu",
        "settings.MAX_QUEUE_SIZE=7",
        "settings.MIDSTREAM_MAX_QUEUE_SIZ=7",
        "settings.MIDSTREAM_MAX_QUEUE_SIZE=many",
        "settings.MIDSTREAM_LOG_LEVEL=loud",
        "settings.MIDSTREAM_TLS=maybe",
        "replicas.worker=-1",
    ],
)
def test_an_unknown_value_is_rejected(flags: str) -> None:
    made = helm("template", "midstream", str(CHART), "--set", REGISTRY, "--set-string", flags)
    assert made.returncode != 0
    assert "values don't meet the specifications of the schema" in made.stderr


def test_without_a_registry_it_says_how_to_build_and_push_the_images() -> None:
    made = helm("template", "midstream", str(CHART))
    assert made.returncode != 0
    assert "images.registry is not set" in made.stderr
    assert "make images && make push REGISTRY=registry.example/team" in made.stderr


def router_of(objects: dict[tuple[str, str], Manifest]) -> Manifest:
    return dict(objects["Deployment", "router"]["spec"]["template"]["spec"])


def env_of(pod: Manifest) -> dict[str, str]:
    (container,) = pod["containers"]
    return {item["name"]: item["value"] for item in container["env"] if "value" in item}


def test_keys_need_neither_tls_nor_curve() -> None:
    objects = chart("api-keys")
    router = router_of(objects)
    assert (
        env_of(router).items()
        >= {
            "MIDSTREAM_AUTH": "token",
            "MIDSTREAM_AUTH_TOKENS": "/etc/midstream/tokens/tokens",
            "MIDSTREAM_ANONYMOUS_ROLES": "observe",  # /metrics
        }.items()
    )
    (volume,) = (volume for volume in router["volumes"] if volume["name"] == "tokens")
    assert volume["secret"]["secretName"] == "api-keys"
    everything = yaml.safe_dump_all(list(objects.values()))
    assert "MIDSTREAM_TLS" not in everything
    assert "CURVE" not in everything


def test_metrics_can_need_a_key_too() -> None:
    assert env_of(router_of(chart("gpu")))["MIDSTREAM_ANONYMOUS_ROLES"] == ""
    refused = helm("template", "midstream", str(CHART), "--set", f"{REGISTRY},auth.anonymousRoles=admin")
    assert "anonymousRoles" in refused.stderr


def test_the_secret_of_the_secure_components_can_be_another() -> None:
    router = router_of(chart("secure", "--set", "auth.existingSecret=other"))
    (volume,) = (volume for volume in router["volumes"] if volume["name"] == "tokens")
    assert volume["secret"]["secretName"] == "other"
    assert env_of(router)["MIDSTREAM_TLS"] == "true"


@pytest.mark.parametrize("reach", ["ingress.enabled=true", "httpRoute.enabled=true,httpRoute.gateway=public"])
def test_clients_outside_the_cluster_need_a_key(reach: str) -> None:
    made = helm("template", "midstream", str(CHART), "--set", f"{REGISTRY},{reach}")
    assert made.returncode != 0
    assert "clients outside the cluster would need no API key: set auth.existingSecret" in made.stderr
    for allowed in (
        "auth.existingSecret=keys",
        "secure.enabled=true",
        "auth.allowUnauthenticated=true",
        "settings.MIDSTREAM_AUTH=mtls",
    ):
        assert helm("template", "midstream", str(CHART), "--set", f"{REGISTRY},{reach},{allowed}").returncode == 0


def test_the_notes_say_how_to_push_images_and_send_a_key(tmp_path: Path) -> None:
    """Without a cluster, helm shows no notes, so they are rendered as if they were an object."""
    copied = shutil.copytree(CHART, tmp_path / "midstream")
    notes_file = copied / "templates" / "NOTES.txt"
    (copied / "templates" / "notes.yaml").write_text(f"notes: |\n{textwrap.indent(notes_file.read_text(), '  ')}")
    flags = ("--set", f"{REGISTRY},images.tag=1.2.3,auth.existingSecret=keys", "--show-only", "templates/notes.yaml")
    notes = yaml.safe_load(helm("template", "m", str(copied), *flags).stdout)["notes"]
    assert "registry.example/team/midstream-router:1.2.3 and so on" in notes
    assert "make push REGISTRY=registry.example/team " in notes
    assert '-H "Authorization: Bearer $MIDSTREAM_API_KEY"' in notes
    assert "Clients need no API key" not in notes


def test_runbooks_are_where_the_documentation_is_published() -> None:
    objects = chart("cpu", "--set", "monitoring.runbooks=https://wiki.example/midstream/")
    alerts = objects["ConfigMap", "prometheus"]["data"]["alerts.yaml"]
    assert "runbook_url: https://wiki.example/midstream/operations/#midstreampartdown" in alerts
    assert "midstream.example" not in alerts


def test_two_releases_in_one_namespace_share_nothing() -> None:
    """Each has its own objects, and selects and reaches only its own pods."""

    def rendered(release: str) -> list[Manifest]:
        flags = ("-f", str(CHART / "ci" / "keda.yaml"), "--namespace", "n", "--set", "podMonitor.enabled=true")
        made = helm("template", release, str(CHART), *flags)
        assert made.returncode == 0, made.stderr
        return [item for item in yaml.safe_load_all(made.stdout) if item]

    one, other = rendered("one"), rendered("other")
    names = [{(item["kind"], item["metadata"]["name"]) for item in objects} for objects in (one, other)]
    assert len(names[0]) == len(names[1]) == len(one)
    assert not names[0] & names[1]
    assert "one-midstream" not in yaml.safe_dump_all(other)
    own = {name for _, name in names[0]}
    for item in one:
        assert item["metadata"]["name"].startswith("one-midstream")
        for selector in selectors_in(item.get("spec", {})):
            assert selector.get("app.kubernetes.io/instance") == "one", (item["kind"], item["metadata"]["name"])
        for name in references_in(item.get("spec", {})):
            assert name in own, (item["kind"], item["metadata"]["name"])
    (settings,) = (item["data"] for item in one if "MIDSTREAM_SCHEDULERS" in item.get("data", {}))
    assert settings["MIDSTREAM_SCHEDULERS"] == "dns:///one-midstream-scheduler:50052"
    assert settings["MIDSTREAM_DETOKENIZERS"] == "dns:///one-midstream-detokenizer:50054"
    assert settings["MIDSTREAM_SCHEDULER"] == "tcp://one-midstream-scheduler:50053"
    queries = [
        trigger["metadata"]["query"]
        for item in one
        if item["kind"] == "ScaledObject"
        for trigger in item["spec"]["triggers"]
    ]
    assert queries
    assert all('pod=~"one-midstream-(router|scheduler|detokenizer|worker)-.*"' in query for query in queries)


def selectors_in(part: object) -> Iterator[dict[str, str]]:
    """Yield the labels by which part of an object labels or selects Midstream's pods."""
    if isinstance(part, list):
        for item in part:
            yield from selectors_in(item)
    elif isinstance(part, dict):
        for key, value in part.items():
            is_ours = isinstance(value, dict) and not value.keys().isdisjoint(
                ("app.kubernetes.io/component", "app.kubernetes.io/name", "midstream/role")
            )
            if is_ours and key in ("matchLabels", "labels", "selector"):
                yield value
            else:
                yield from selectors_in(value)


def references_in(part: object) -> Iterator[str]:
    """Yield the names of a release's other objects to which part of an object refers."""
    if isinstance(part, list):
        for item in part:
            yield from references_in(item)
    elif isinstance(part, dict):
        for key, value in part.items():
            if key in ("serviceAccountName", "claimName"):
                yield value
            elif key in ("scaleTargetRef", "configMapRef") or key == "service":
                yield value["name"]
            else:
                yield from references_in(value)


def test_a_release_that_is_named_after_the_chart_does_not_repeat_it() -> None:
    made = helm("template", "my-midstream-2", str(CHART), "--set", REGISTRY)
    names = [item["metadata"]["name"] for item in yaml.safe_load_all(made.stdout) if item]
    assert "my-midstream-2-router" in names
    assert all(name.startswith("my-midstream-2-") for name in names)


def test_objects_have_the_labels_that_helm_recommends() -> None:
    for item in chart("cpu", "--set", "podMonitor.enabled=true,podMonitor.labels.release=prometheus").values():
        labels = item["metadata"]["labels"]
        assert labels["app.kubernetes.io/name"] == labels["app.kubernetes.io/instance"] == "midstream"
        assert labels["app.kubernetes.io/managed-by"] == "Helm"
        assert labels["helm.sh/chart"] == f"midstream-{__version__}"
        assert labels["app.kubernetes.io/version"] == __version__


def test_the_schema_of_settings_is_generated() -> None:
    committed = (CHART / "values.schema.json").read_text(encoding="utf-8")
    assert committed == runpy.run_path(str(CHART.parent / "generate.py"))["schema"](), "run deploy/helm/generate.py"
    properties = json.loads(committed)["properties"]["settings"]["properties"]
    known = {f"MIDSTREAM_{name.upper()}" for name in KNOWN_SETTINGS - {"home", "token_file", "api_key"}}
    assert properties.keys() == known


def test_the_readme_lists_every_value() -> None:
    readme = (CHART / "README.md").read_text(encoding="utf-8")
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    assert [name for name in values if f"`{name}" not in readme and name != "servedModelName"] == []


def test_the_example_job_fills_the_claim_that_the_overlay_serves() -> None:
    path = ROOT / "deploy" / "k8s" / "examples" / "fill-models.yaml"
    claim, job, policy = yaml.safe_load_all(path.read_text(encoding="utf-8"))
    pod = job["spec"]["template"]
    container = container_of(pod)
    served = render("gpu")
    volumes = served.pods()["worker"]["spec"]["volumes"]
    claims = {volume["persistentVolumeClaim"]["claimName"] for volume in volumes if volume["name"] == "models"}
    assert claims == {claim["metadata"]["name"]}
    assert container["command"][-1] == served.config()["MIDSTREAM_MODEL"]
    assert policy["spec"]["podSelector"]["matchLabels"] == pod["metadata"]["labels"]
    assert pod["spec"]["securityContext"]["runAsUser"] == 65532  # that of the workers, who read the files
