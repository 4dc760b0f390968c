"""Manifests match the code: ports, probes, settings and addresses."""

from __future__ import annotations

import pytest
import yaml  # type: ignore[import-untyped]

from midstream.config import DetokenizerConfig, RouterConfig, SchedulerConfig, WorkerConfig, parse_config
from midstream.config.service import GrpcServiceConfig, ServiceConfig
from tests.deploy.rendering import ROOT, Manifest, Rendered, container_of, ports_of, render

CONFIGS: dict[str, type[ServiceConfig]] = {
    "router": RouterConfig,
    "scheduler": SchedulerConfig,
    "detokenizer": DetokenizerConfig,
    "worker": WorkerConfig,
}
KNOWN = frozenset(name for config in CONFIGS.values() for name in config.__dataclass_fields__)
# Stand-ins for environment variables that Kubernetes sets from fields of the pod (the downward API).
FIELD_VALUES = {"metadata.name": "part-0", "requests.cpu": "1", "status.podIP": "10.0.0.7"}


def environment(rendered: Rendered, part: str) -> dict[str, str]:
    """Return the environment variables of a component's container, Secrets excluded."""
    variables = rendered.config()
    for item in container_of(rendered.pods()[part])["env"]:
        source = item.get("valueFrom", {})
        field = source.get("fieldRef", {}).get("fieldPath") or source.get("resourceFieldRef", {}).get("resource")
        variables[item["name"]] = FIELD_VALUES[field] if field else item["value"]
    return variables


def config_of(rendered: Rendered, part: str) -> ServiceConfig:
    return parse_config(CONFIGS[part], [], environment(rendered, part), program=part, known=KNOWN)


@pytest.mark.parametrize("part", CONFIGS)
def test_every_setting_is_known_and_parses(rendered: Rendered, part: str) -> None:
    config = config_of(rendered, part)
    assert config.host == "0.0.0.0"
    assert config.name == "part-0"


def test_prefill_and_decode_workers_have_their_roles() -> None:
    rendered = render("roles")
    prefill, decode = (
        parse_config(WorkerConfig, [], environment(rendered, part), program=part, known=KNOWN)
        for part in ("worker", "worker-decode")
    )
    assert (prefill.role, decode.role) == ("prefill", "decode")
    assert (prefill.kv_transfer_host, prefill.kv_transfer_port) == (
        "10.0.0.7",
        ports_of(rendered.pods()["worker"])["kv"],
    )


def test_components_listen_on_the_declared_ports(rendered: Rendered) -> None:
    expected = {
        "router": {"grpc"},
        "scheduler": {"grpc", "zmq", "frames"},
        "detokenizer": {"grpc", "frames"},
        "worker": set[str](),
    }
    for part, pod in rendered.pods().items():
        config, ports = config_of(rendered, part), ports_of(pod)
        assert set(ports) == expected[part] | {"http"}
        assert ports["http"] == config.http_port
        if isinstance(config, RouterConfig | SchedulerConfig | DetokenizerConfig):
            assert ports["grpc"] == config.port
        if isinstance(config, SchedulerConfig | DetokenizerConfig):
            assert ports["frames"] == config.frames_port
        if isinstance(config, SchedulerConfig):
            assert ports["zmq"] == config.worker_port
        annotations = pod["metadata"]["annotations"]
        assert annotations["prometheus.io/port"] == str(config.http_port)


def test_components_connect_to_services_that_exist(rendered: Rendered) -> None:
    router, detokenizer = config_of(rendered, "router"), config_of(rendered, "detokenizer")
    worker = config_of(rendered, "worker")
    assert isinstance(router, RouterConfig)
    assert isinstance(detokenizer, DetokenizerConfig)
    assert isinstance(worker, WorkerConfig)
    one_of = "one-of:" if rendered.overlay == "ha" else ""  # both schedulers are ready, and one of them is active
    dialled = {
        router.schedulers.removeprefix(f"{one_of}dns:///"): "grpc",
        router.detokenizers.removeprefix("dns:///"): "grpc",
        detokenizer.schedulers.removeprefix(f"{one_of}dns:///"): "grpc",
        worker.scheduler.removeprefix(f"{one_of}tcp://"): "zmq",
    }
    for address, port_name in dialled.items():
        name, _, port = address.rpartition(":")
        service = rendered.get("Service", name)
        assert {"name": port_name, "port": int(port)}.items() <= port_named(service, port_name).items()
    # Clients use all addresses of a name in turn, and resolve the name again when the addresses change.
    assert router.schedulers.startswith(f"{one_of}dns:///")
    assert router.detokenizers.startswith("dns:///")
    assert detokenizer.schedulers.startswith(f"{one_of}dns:///")


def port_named(service: Manifest, name: str) -> Manifest:
    (found,) = (port for port in service["spec"]["ports"] if port["name"] == name)
    return dict(found)


def test_services_are_headless_and_reach_their_pods(rendered: Rendered) -> None:
    assert rendered.names("Service") == {"router", "scheduler", "detokenizer"}
    for service in rendered.all("Service"):
        pod = rendered.pods()[service["metadata"]["name"]]
        assert service["spec"]["clusterIP"] == "None"
        selected = [
            part
            for part, other in rendered.pods().items()
            if service["spec"]["selector"].items() <= other["metadata"]["labels"].items()
        ]
        assert selected == [service["metadata"]["name"]]
        assert {port["targetPort"]: port["port"] for port in service["spec"]["ports"]} == ports_of(pod)


def action_of(probe: Manifest) -> Manifest:
    return {kind: probe[kind] for kind in ("grpc", "httpGet", "exec", "tcpSocket") if kind in probe}


def test_probes_use_endpoints_that_exist(rendered: Rendered) -> None:
    for part, pod in rendered.pods().items():
        container = container_of(pod)
        for name in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = container[name]
            if part == "scheduler" and rendered.overlay in ("ha", "secure"):
                # A standby scheduler is alive and ready but does not serve gRPC.
                path = "/ready" if name == "readinessProbe" else "/live"
                assert action_of(probe) == {"httpGet": {"path": path, "port": "http"}}
            elif part == "router" and name != "readinessProbe":
                # A router without a scheduler or a worker is alive but not ready.
                scheme = {"scheme": "HTTPS"} if rendered.overlay == "secure" else {}
                assert action_of(probe) == {"httpGet": {"path": "/live", "port": "http", **scheme}}
            elif part == "router" and rendered.overlay == "secure":
                assert action_of(probe) == {"httpGet": {"path": "/health", "port": "http", "scheme": "HTTPS"}}
            elif part == "worker" or rendered.overlay == "secure":  # gRPC probes do not support TLS
                assert action_of(probe) == {"httpGet": {"path": "/health", "port": "http"}}
            else:
                assert action_of(probe) == {"grpc": {"port": ports_of(pod)["grpc"]}}
        startup = container["startupProbe"]
        assert startup["periodSeconds"] * startup["failureThreshold"] >= (1200 if part == "worker" else 120)


def test_grace_outlasts_the_longest_drain(rendered: Rendered) -> None:
    for part, pod in rendered.pods().items():
        pause = container_of(pod).get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        assert pod["spec"]["terminationGracePeriodSeconds"] > pause + config_of(rendered, part).drain_timeout_s
        # Clients and routers need time to stop connecting to a pod that is terminating.
        assert (pause >= 5) == (part in ("router", "detokenizer"))


def test_overlays_differ_in_device_journal_and_replicas() -> None:
    cpu, gpu = config_of(render("cpu"), "worker"), config_of(render("gpu"), "worker")
    assert isinstance(cpu, WorkerConfig)
    assert isinstance(gpu, WorkerConfig)
    assert (cpu.device, cpu.model, cpu.num_threads) == ("cpu", "/models/smollm2", 1)
    assert (gpu.device, gpu.model) == ("cuda", "/models/main")
    for overlay in ("gpu", "multinode"):
        assert container_of(render(overlay).pods()["worker"])["resources"]["limits"]["nvidia.com/gpu"] == "1"
    ha = config_of(render("ha"), "scheduler")
    assert isinstance(ha, SchedulerConfig)
    assert ha.journal == "postgres"
    assert render("ha").get("Deployment", "scheduler")["spec"]["replicas"] == 2
    assert render("cpu").get("Deployment", "scheduler")["spec"]["replicas"] == 1


def test_every_link_is_secured() -> None:
    rendered = render("secure")
    for part in ("router", "scheduler", "detokenizer"):
        config = config_of(rendered, part)
        assert isinstance(config, GrpcServiceConfig)
        assert config.tls
        files = {config.tls_cert, config.tls_key, config.tls_ca}
        assert files == {f"/etc/midstream/tls/{name}" for name in ("tls.crt", "tls.key", "ca.crt")}
        # Services accept only certificates from the same authority; clients of a router send tokens instead.
        assert config.tls_require_client_cert == (part != "router")
        # Each internal port lists the certificate names that it accepts, which are defined in certificates.yaml.
        names = {"scheduler": ["router", "detokenizer"], "detokenizer": ["router"], "router": []}[part]
        listed = [getattr(config, f"{name}_names") for name in names]
        assert listed == [f"spiffe://midstream/{name}" for name in names]
    file = ROOT / "deploy/k8s/components/secure/certificates.yaml"
    uris = {item["spec"]["secretName"]: item["spec"]["uris"] for item in yaml.safe_load_all(file.read_text())}
    assert uris == {f"tls-{part}": [f"spiffe://midstream/{part}"] for part in ("router", "scheduler", "detokenizer")}
    # Gateways and meshes use TLS only for ports that declare it. Only routers serve metrics over TLS.
    for part, https in (("router", {"grpc", "http"}), ("scheduler", {"grpc"}), ("detokenizer", {"grpc"})):
        ports = rendered.get("Service", part)["spec"]["ports"]
        assert {port["name"] for port in ports if port.get("appProtocol") == "https"} == https
        assert {port["name"] for port in ports if port.get("appProtocol") == "kubernetes.io/h2c"} == set()
    router, scheduler = config_of(rendered, "router"), config_of(rendered, "scheduler")
    worker = config_of(rendered, "worker")
    assert isinstance(router, RouterConfig)
    assert isinstance(scheduler, SchedulerConfig)
    assert isinstance(worker, WorkerConfig)
    assert (router.auth, router.anonymous_roles) == ("token", "observe")
    assert (scheduler.curve, worker.curve) == (True, True)
    named = [router.auth_tokens, scheduler.curve_secret_key, worker.curve_secret_key, worker.curve_server_key]
    for part, pod in rendered.pods().items():
        mounts = [item["mountPath"] for item in container_of(pod)["volumeMounts"]]
        for path in environment(rendered, part).values():
            if path.startswith("/etc/midstream"):
                assert any(path == mount or path.startswith(mount + "/") for mount in mounts)
    assert all(path.startswith("/etc/midstream/") for path in named)


@pytest.mark.parametrize("overlay", ["gpu", "ha", "keda", "multinode", "roles"])
def test_the_component_secures_the_workers_of_other_overlays(overlay: str) -> None:
    secured, rendered = render("secure").pods()["worker"], render(overlay, "secure")
    keys = [item for item in secured["spec"]["volumes"] if "secret" in item]
    mounts = [item for item in container_of(secured)["volumeMounts"] if item["name"] == "curve"]
    variables = [item for item in container_of(secured)["env"] if item["name"].startswith("MIDSTREAM_CURVE")]
    assert (len(keys), len(mounts), len(variables)) == (1, 1, 3)
    workers = {name: pod for name, pod in rendered.pods().items() if name.startswith("worker")}
    assert len(workers) == (2 if overlay == "roles" else 1)
    for pod in workers.values():
        container = container_of(pod)
        assert [item for item in pod["spec"]["volumes"] if "secret" in item] == keys
        assert [item for item in container["volumeMounts"] if item["name"] == "curve"] == mounts
        assert [item for item in container["env"] if item["name"].startswith("MIDSTREAM_CURVE")] == variables
