"""Manifests are consistent: every referenced object exists, and every pod follows the security rules."""

from __future__ import annotations

import pytest
import yaml  # type: ignore[import-untyped]

from midstream import __version__
from tests.deploy.rendering import Manifest, Rendered, container_of, labels_match, render

# Objects that the platform provides; see docs/operations.md.
OUTSIDE = {("PersistentVolumeClaim", "models"), ("Secret", "journal")} | {
    ("Secret", name)
    for name in (
        *("tls-router", "tls-scheduler", "tls-detokenizer", "router-tokens"),
        *("curve-scheduler", "curve-workers", "curve-worker"),
    )
}


def references(pod: Manifest) -> set[tuple[str, str]]:
    """Return the kind and name of every object that a pod requires, excluding optional objects."""
    spec = pod["spec"]
    found = {("ServiceAccount", spec["serviceAccountName"])}
    for volume in spec["volumes"]:
        if "persistentVolumeClaim" in volume:
            found.add(("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]))
        if "secret" in volume:
            found.add(("Secret", volume["secret"]["secretName"]))
    for source in container_of(pod)["envFrom"]:
        kind, reference = ("ConfigMap", "configMapRef") if "configMapRef" in source else ("Secret", "secretRef")
        if not source[reference].get("optional"):
            found.add((kind, source[reference]["name"]))
    return found


def test_objects_that_pods_refer_to_exist(rendered: Rendered) -> None:
    existing = {(item["kind"], item["metadata"]["name"]) for item in rendered.objects}
    assert set(rendered.pods()) == {"router", "scheduler", "detokenizer", "worker"}
    for pod in rendered.pods().values():
        assert references(pod) <= existing | OUTSIDE
        mounted = {mount["name"] for mount in container_of(pod)["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["spec"]["volumes"]}
    assert {item["metadata"].get("namespace") for item in rendered.objects if item["kind"] != "Namespace"} == {
        "midstream"
    }


def test_pods_are_restricted(rendered: Rendered) -> None:
    (namespace,) = rendered.all("Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    for pod in rendered.pods().values():
        spec, container = pod["spec"], container_of(pod)
        assert spec["automountServiceAccountToken"] is False
        # Otherwise Kubernetes would set environment variables for a Service named `x`, which could be mistaken for
        # settings.
        assert spec["enableServiceLinks"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] == 65532
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
        assert "memory" in container["resources"]["limits"]
        assert all("sizeLimit" in volume["emptyDir"] for volume in spec["volumes"] if "emptyDir" in volume)


def test_service_accounts_have_no_rights(rendered: Rendered) -> None:
    assert not {item["kind"] for item in rendered.objects} & {
        "Role",
        "ClusterRole",
        "RoleBinding",
        "ClusterRoleBinding",
    }
    assert all(item["automountServiceAccountToken"] is False for item in rendered.all("ServiceAccount"))


def test_deployments_select_their_own_pods(rendered: Rendered) -> None:
    for deployment in rendered.all("Deployment"):
        selector = deployment["spec"]["selector"]
        for other in rendered.all("Deployment"):
            assert labels_match(selector, other["spec"]["template"]["metadata"]["labels"]) == (other is deployment)


def test_each_part_may_lose_one_pod_at_a_time(rendered: Rendered) -> None:
    assert rendered.names("PodDisruptionBudget") == set(rendered.pods())
    for budget in rendered.all("PodDisruptionBudget"):
        assert budget["spec"]["maxUnavailable"] == 1
        for part, pod in rendered.pods().items():
            chosen = labels_match(budget["spec"]["selector"], pod["metadata"]["labels"])
            assert chosen == (part == budget["metadata"]["name"])


def test_rolling_updates_keep_the_required_replicas(rendered: Rendered) -> None:
    for part in ("router", "detokenizer"):
        strategy = rendered.get("Deployment", part)["spec"]["strategy"]
        assert strategy["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    scheduler = rendered.get("Deployment", "scheduler")["spec"]["strategy"]
    # Two schedulers may run at the same time only if the journal fences the older one.
    if rendered.overlay != "ha":
        assert scheduler == {"type": "Recreate"}
    else:
        # A third pod might not fit on any node. When one pod is replaced, the other takes over immediately.
        assert scheduler["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}


@pytest.mark.parametrize("overlay", ["cpu", "gpu", "ha", "multinode"])
def test_autoscalers_have_their_target_and_metric(overlay: str) -> None:
    rendered = render(overlay)
    rules = rendered.get("ConfigMap", "prometheus")["data"]["adapter-rules.yaml"]
    assert rendered.names("HorizontalPodAutoscaler") == {"router", "detokenizer"}
    for autoscaler in rendered.all("HorizontalPodAutoscaler"):
        spec = autoscaler["spec"]
        deployment = rendered.get("Deployment", spec["scaleTargetRef"]["name"])
        # With a fixed number of replicas in the manifest, each `apply` would undo the decision of the autoscaler.
        assert "replicas" not in deployment["spec"]
        (metric,) = spec["metrics"]
        assert f"as: {metric['pods']['metric']['name']}\n" in rules
        assert spec["minReplicas"] >= 2
        check_behaviour(spec["behavior"])


def test_keda_replaces_the_autoscaler() -> None:
    rendered = render("keda")
    assert rendered.names("HorizontalPodAutoscaler") == set()
    assert rendered.names("ScaledObject") == {"router", "detokenizer", "worker"}
    for scaled in rendered.all("ScaledObject"):
        assert "replicas" not in rendered.get("Deployment", scaled["spec"]["scaleTargetRef"]["name"])["spec"]
        check_behaviour(scaled["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"])


def test_workers_can_be_autoscaled_without_keda() -> None:
    rendered = render("hpa-workers")
    assert rendered.names("HorizontalPodAutoscaler") == {"router", "detokenizer", "worker"}
    spec = rendered.get("HorizontalPodAutoscaler", "worker")["spec"]
    assert "replicas" not in rendered.get("Deployment", spec["scaleTargetRef"]["name"])["spec"]
    check_behaviour(spec["behavior"])
    rules = yaml.safe_load(rendered.get("ConfigMap", "prometheus")["data"]["adapter-rules.yaml"])["externalRules"]
    assert {metric["external"]["metric"]["name"] for metric in spec["metrics"]} == {
        rule["name"]["as"] for rule in rules
    }
    # The number of requests is divided among the workers; a wait has its target whatever their number is.
    scaled = {item["metadata"]["name"]: item["spec"] for item in render("keda").all("ScaledObject")}["worker"]
    load, wait = (int(trigger["metadata"]["threshold"]) for trigger in scaled["triggers"])
    assert [trigger.get("metricType", "AverageValue") for trigger in scaled["triggers"]] == ["AverageValue", "Value"]
    assert [metric["external"]["target"] for metric in spec["metrics"]] == [
        {"type": "AverageValue", "averageValue": load},
        {"type": "Value", "value": wait},
    ]
    assert (spec["minReplicas"], spec["maxReplicas"]) == (scaled["minReplicaCount"], scaled["maxReplicaCount"])


def check_behaviour(behaviour: Manifest) -> None:
    """Check that the autoscaler scales up immediately, and scales down slowly, one pod at a time."""
    assert behaviour["scaleUp"]["stabilizationWindowSeconds"] == 0
    assert behaviour["scaleDown"]["stabilizationWindowSeconds"] >= 300
    assert [policy["value"] for policy in behaviour["scaleDown"]["policies"]] == [1]


def test_a_worker_group_is_the_worker_on_several_nodes() -> None:
    alone, group = render("gpu").pods()["worker"], render("multinode").pods()["worker"]
    for key in ("securityContext", "serviceAccountName", "tolerations", "terminationGracePeriodSeconds"):
        assert group["spec"][key] == alone["spec"][key]
    one, each = container_of(alone), container_of(group)
    for key in ("image", "ports", "startupProbe", "readinessProbe", "livenessProbe", "resources", "securityContext"):
        assert each[key] == one[key]
    variables = {item["name"]: item.get("value") for item in each["env"]}
    # These are the names through which torch.distributed finds its process group.
    assert variables["WORLD_SIZE"] == "$(LWS_GROUP_SIZE)"
    assert variables["RANK"] == "$(LWS_WORKER_INDEX)"
    assert variables["MASTER_ADDR"] == "$(LWS_LEADER_ADDRESS)"
    assert "worker" not in render("multinode").names("Deployment")


def test_prefill_and_decode_workers_differ_only_in_their_role() -> None:
    alone, rendered = render("cpu").get("Deployment", "worker"), render("roles")
    for name, role in (("worker", "prefill"), ("worker-decode", "decode")):
        label, given = {"midstream/role": role}, rendered.get("Deployment", name)
        made, pod = given["spec"], given["spec"]["template"]
        assert made["selector"]["matchLabels"] == alone["spec"]["selector"]["matchLabels"] | label
        assert rendered.get("PodDisruptionBudget", name)["spec"]["selector"] == made["selector"]
        assert pod["metadata"]["labels"] == alone["spec"]["template"]["metadata"]["labels"] | label
        mine, theirs = container_of(pod), container_of(alone["spec"]["template"])
        assert {**pod["spec"], "containers": []} == {**alone["spec"]["template"]["spec"], "containers": []}
        assert mine["env"][: len(theirs["env"])] == theirs["env"]
        assert {**mine, "env": [], "ports": []} == {**theirs, "env": [], "ports": []}


def test_with_roles_keda_scales_prefill_workers_by_waiting_prompts_and_decode_workers_by_running_requests() -> None:
    rendered = render("roles-keda")
    queries = {}
    for name in ("worker", "worker-decode"):
        scaled = rendered.get("ScaledObject", name)["spec"]
        assert scaled["scaleTargetRef"]["name"] == name
        assert name in rendered.names("Deployment")
        check_behaviour(scaled["advanced"]["horizontalPodAutoscalerConfig"]["behavior"])
        queries[name] = [trigger["metadata"]["query"] for trigger in scaled["triggers"]]
    tokens, wait = queries["worker"]
    assert "midstream:num_prompt_tokens_waiting{" in tokens
    assert "midstream:first_token_wait_seconds{" in wait
    (running,) = queries["worker-decode"]
    assert "midstream:num_requests_running{" in running


def test_an_inference_service_is_the_router() -> None:
    deployment, rendered = render("cpu").get("Deployment", "router"), render("kserve")
    service = rendered.get("InferenceService", "midstream")
    assert service["metadata"]["annotations"] == {"serving.kserve.io/deploymentMode": "Standard"}
    predictor, pod = service["spec"]["predictor"], deployment["spec"]["template"]
    # These are the labels by which Services, policies and budgets select routers.
    assert {key: predictor[key] for key in ("labels", "annotations")} == pod["metadata"]
    assert predictor["deploymentStrategy"]["rollingUpdate"] == deployment["spec"]["strategy"]["rollingUpdate"]
    assert {key: value for key, value in predictor.items() if key in pod["spec"]} == {
        **pod["spec"],
        "containers": predictor["containers"],
    }
    mine, theirs = container_of({"spec": predictor}), container_of(pod)
    assert mine["ports"][0]["name"] == "http"  # the port that KServe's Service forwards to
    by_name = {port["name"]: port for port in mine["ports"]}
    assert by_name == {port["name"]: port for port in theirs["ports"]}
    assert {**mine, "ports": []} == {**theirs, "name": "kserve-container", "ports": []}
    assert "router" not in rendered.names("Deployment") | rendered.names("HorizontalPodAutoscaler")


def test_an_inference_pool_holds_the_routers() -> None:
    rendered = render("inference-gateway")
    pool = rendered.get("InferencePool", "midstream")["spec"]
    chosen = [
        part for part, pod in rendered.pods().items() if labels_match(pool["selector"], pod["metadata"]["labels"])
    ]
    assert chosen == ["router"]
    ports = [port["containerPort"] for port in container_of(rendered.pods()["router"])["ports"]]
    assert [port["number"] in ports for port in pool["targetPorts"]] == [True]
    (rule,) = rendered.get("HTTPRoute", "midstream")["spec"]["rules"]
    assert rule["backendRefs"] == [
        {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "midstream"}
    ]


def test_images_are_of_this_version(rendered: Rendered) -> None:
    names = {"router": "router", "scheduler": "scheduler", "detokenizer": "detokenizer", "worker": "gpu-worker"}
    for part, pod in rendered.pods().items():
        suffix = "-cuda" if part == "worker" and rendered.overlay in ("gpu", "multinode") else ""
        assert container_of(pod)["image"] == f"midstream-{names[part]}:{__version__}{suffix}"
