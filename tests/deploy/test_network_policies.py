"""The connections that the NetworkPolicies allow, evaluated as a network plug-in would."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from tests.deploy.rendering import Manifest, Rendered, labels_match, ports_of, render


class Peer(NamedTuple):
    """A pod, or a peer outside the cluster."""

    name: str
    labels: dict[str, str]
    namespace: dict[str, str]


def selects(policy: Manifest, pod: Peer, direction: str) -> bool:
    spec = policy["spec"]
    return (
        pod.namespace.get("kubernetes.io/metadata.name") == "midstream"
        and direction in spec["policyTypes"]
        and labels_match(spec["podSelector"], pod.labels)
    )


def rule_admits(rule: Manifest, side: str, other: Peer, port: int) -> bool:
    if "ports" in rule and port not in [item["port"] for item in rule["ports"]]:
        return False
    return side not in rule or any(is_peer(item, other) for item in rule[side])


def is_peer(selector: Manifest, other: Peer) -> bool:
    if "namespaceSelector" in selector:
        in_namespace = labels_match(selector["namespaceSelector"], other.namespace)
    else:
        in_namespace = other.namespace.get("kubernetes.io/metadata.name") == "midstream"
    return in_namespace and labels_match(selector.get("podSelector", {}), other.labels)


def may_reach(policies: list[Manifest], source: Peer, target: Peer, port: int) -> bool:
    def allowed(pod: Peer, other: Peer, direction: str, side: str) -> bool:
        binding = [policy for policy in policies if selects(policy, pod, direction)]
        rules = (rule for policy in binding for rule in policy["spec"].get(direction.lower(), []))
        return not binding or any(rule_admits(rule, side, other, port) for rule in rules)

    return allowed(source, target, "Egress", "to") and allowed(target, source, "Ingress", "from")


def peers(rendered: Rendered) -> dict[str, Peer]:
    ours = {"kubernetes.io/metadata.name": "midstream"}
    found = {part: Peer(part, pod["metadata"]["labels"], ours) for part, pod in rendered.pods().items()}
    outside = {
        "monitoring": Peer("monitoring", {}, {"kubernetes.io/metadata.name": "monitoring"}),
        "client": Peer("client", {}, {"kubernetes.io/metadata.name": "app", "midstream/client": "true"}),
        "stranger": Peer("stranger", {}, {"kubernetes.io/metadata.name": "other"}),
        "stranger beside": Peer("stranger beside", {}, ours),
    }
    return found | outside


# Source, target, port.
ALLOWED = {
    ("router", "scheduler", 50052),
    ("router", "detokenizer", 50054),
    ("detokenizer", "scheduler", 50052),
    ("detokenizer", "scheduler", 50055),
    ("router", "scheduler", 50055),
    ("router", "detokenizer", 50055),
    ("worker", "scheduler", 50053),
    *(("monitoring", part, 8000) for part in ("router", "scheduler", "detokenizer", "worker")),
    *(("client", "router", port) for port in (50051, 8000)),
}


def test_network_policies_permit_only_required_connections(rendered: Rendered) -> None:
    policies, everyone = rendered.all("NetworkPolicy"), peers(rendered)
    ports = {part: set(ports_of(pod).values()) | {22} for part, pod in rendered.pods().items()}
    reached = {
        (source, target, port)
        for source, target in product(everyone, ports)
        for port in ports[target]
        if source != target and may_reach(policies, everyone[source], everyone[target], port)
    }
    assert reached == ALLOWED


def test_decode_workers_alone_reach_the_blocks_of_prefill_workers() -> None:
    rendered = render("roles")
    policies, everyone = rendered.all("NetworkPolicy"), peers(rendered)
    reached = {
        (source, target)
        for source, target in product(everyone, rendered.pods())
        if may_reach(policies, everyone[source], everyone[target], 50056)
    }
    assert reached == {("worker-decode", "worker")}
    for name in ("worker", "worker-decode"):
        assert may_reach(policies, everyone[name], everyone["scheduler"], 50053)


def test_the_endpoint_picker_reads_only_the_load_of_routers() -> None:
    rendered = render("inference-gateway")
    policies, everyone = rendered.all("NetworkPolicy"), peers(rendered)
    picker = Peer("picker", {"inferencepool": "midstream-epp"}, everyone["router"].namespace)
    reached = {part for part in rendered.pods() if may_reach(policies, picker, everyone[part], 8000)}
    assert reached == {"router"}
    assert may_reach(policies, everyone["client"], picker, 9002)
    assert not may_reach(policies, everyone["stranger"], picker, 9002)


def test_ranks_of_a_worker_group_reach_each_other(rendered: Rendered) -> None:
    worker = peers(rendered)["worker"]
    assert may_reach(rendered.all("NetworkPolicy"), worker, worker, 29500) == (rendered.overlay == "multinode")


def test_spans_go_to_the_collector(rendered: Rendered) -> None:
    policies, everyone = rendered.all("NetworkPolicy"), peers(rendered)
    for part in rendered.pods():
        assert may_reach(policies, everyone[part], everyone["monitoring"], 4317)
        assert not may_reach(policies, everyone[part], everyone["stranger"], 4317)


def test_names_are_resolved_only_by_the_cluster(rendered: Rendered) -> None:
    system = {"kubernetes.io/metadata.name": "kube-system"}
    dns, other = Peer("dns", {"k8s-app": "kube-dns"}, system), Peer("other", {"k8s-app": "other"}, system)
    policies, everyone = rendered.all("NetworkPolicy"), peers(rendered)
    for part in rendered.pods():
        assert may_reach(policies, everyone[part], dns, 53)
        assert not may_reach(policies, everyone[part], other, 53)
