"""Run the Deployments of the `cpu` overlay as real containers, without a Kubernetes cluster.

1. kubectl renders the overlay. `podman play kube` starts its Deployments, ConfigMap and volume claim unchanged, except
   where podman 4 behaves differently: it would publish container ports on the host, and runs probes through systemd.
2. The rest of Kubernetes is emulated here: a pod whose readiness probe succeeds gets its Service's name in the
   network's DNS, so that a headless Service's name resolves to all its pods. Podman itself restarts containers that
   exit.
3. A Deployment is scaled up by adding Deployments of one replica from the same template, and scaled down by stopping
   pods with their own grace period.
"""

from __future__ import annotations

import copy
import os
import signal
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from types import TracebackType
from typing import Self

import grpc
import yaml  # type: ignore[import-untyped]
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.deploy.e2e.podman import logs, pod_address, podman
from tests.deploy.rendering import Manifest, container_of, ports_of, render

# Pods start on the first network. Once they are ready, they join the second, in which the names of their Services
# resolve.
NETWORK, SERVICES = "midstream-e2e", "midstream-e2e-services"
_READY_TIMEOUT_S = 120.0
_POLL_S = 0.2


class Cluster:
    """Starts everything on entry and removes it on exit. `pods` maps each component to the names of its running
    pods.
    """

    def __init__(self) -> None:
        self._rendered = render("cpu")
        self._templates = self._rendered.pods()
        # The manifests set the number of scheduler and worker replicas; routers and detokenizers run the minimum of
        # their autoscalers.
        scalers = self._rendered.all("HorizontalPodAutoscaler")
        self._min_replicas = {item["metadata"]["name"]: item["spec"]["minReplicas"] for item in scalers}
        self._num_added = 0
        self._named: set[str] = set()
        self.pods: dict[str, list[str]] = {}

    def __enter__(self) -> Self:
        self._remove_everything()
        podman("network", "create", NETWORK)
        podman("network", "create", SERVICES)
        try:
            self._start()
        except BaseException:
            self._remove_everything()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove_everything()

    def kill(self, pod: str) -> None:
        """Send SIGKILL to the process in a pod. Podman then restarts it, which it would not do after `podman kill`."""
        os.kill(int(podman("inspect", container_name(pod), "--format", "{{.State.Pid}}")), signal.SIGKILL)

    def scale(self, part: str, replicas: int) -> None:
        """Change the number of pods of a component; return when new pods are ready and old pods have stopped."""
        pods = self.pods[part]
        self.pods[part], leaving = pods[:replicas], pods[replicas:]
        with ThreadPoolExecutor() as threads:
            list(threads.map(self._stop, leaving))
        added = range(self._num_added, self._num_added + replicas - len(self.pods[part]))
        self._num_added = added.stop
        deployments = [copy.deepcopy(self._rendered.get("Deployment", part)) for _ in added]
        for index, deployment in zip(added, deployments, strict=True):
            deployment["metadata"]["name"] = f"{part}-{index}"
        if added:
            self._play([self._config_map(), *(_for_podman(deployment, 1) for deployment in deployments)])
        for index in added:
            self.pods[part].append(f"{part}-{index}-pod-0")
            self._await_ready(part, self.pods[part][-1])

    def address(self, pod: str) -> str:
        """Return the IP address of a pod."""
        return pod_address(pod, NETWORK)

    def part_of(self, pod: str) -> str:
        return next(part for part, pods in self.pods.items() if pod in pods)

    def metrics_address(self, pod: str) -> str:
        """Return the address of a pod that Prometheus scrapes."""
        return f"{self.address(pod)}:{ports_of(self._templates[self.part_of(pod)])['http']}"

    def logs(self, pod: str) -> str:
        return logs(container_name(pod))

    def await_ready(self) -> None:
        """Wait until every pod is ready."""
        for part, pods in self.pods.items():
            for pod in pods:
                self._await_ready(part, pod)

    def _start(self) -> None:
        deployments = []
        for deployment in self._rendered.all("Deployment"):
            name = deployment["metadata"]["name"]
            replicas = deployment["spec"].get("replicas") or self._min_replicas[name]
            deployments.append(_for_podman(deployment, replicas))
            self.pods[name] = [f"{name}-pod-{index}" for index in range(replicas)]
        claims = [_owned_claim(claim) for claim in self._rendered.all("PersistentVolumeClaim")]
        self._play([self._config_map(), *claims, *deployments])
        self.await_ready()

    def _play(self, objects: list[Manifest]) -> None:
        podman("play", "kube", "--network", NETWORK, "-", stdin=yaml.safe_dump_all(objects))

    def _config_map(self) -> Manifest:
        return next(
            item for item in self._rendered.all("ConfigMap") if item["metadata"]["name"].startswith("midstream-")
        )

    def _await_ready(self, part: str, pod: str) -> None:
        container = container_of(self._templates[part])
        deadline = time.monotonic() + _READY_TIMEOUT_S
        while not probe_succeeds(container, self.address(pod)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{pod} is not ready; its log ends with\n{self.logs(pod)[-3000:]}")
            time.sleep(_POLL_S)
        if pod not in self._named:
            self._named.add(pod)
            infra = podman("pod", "inspect", pod, "--format", "{{.InfraContainerID}}")
            podman("network", "connect", "--alias", part, SERVICES, infra)

    def _stop(self, pod: str) -> None:
        grace = self._templates[pod.split("-")[0]]["spec"]["terminationGracePeriodSeconds"]
        podman("pod", "stop", "--time", str(grace), pod, timeout_s=grace + 60)
        podman("pod", "rm", "--force", pod)

    def _remove_everything(self) -> None:
        pods = podman("pod", "ps", "--filter", f"network={NETWORK}", "--format", "{{.Name}}", check=False).split()
        if pods:
            podman("pod", "rm", "--force", "--time", "0", *pods)
        for claim in self._rendered.names("PersistentVolumeClaim"):
            podman("volume", "rm", "--force", claim, check=False)
        podman("network", "rm", "--force", NETWORK, SERVICES, check=False)


def container_name(pod: str) -> str:
    """Return podman's name for the only container of a pod."""
    return f"{pod}-{pod.split('-')[0]}"


def probe_succeeds(container: Manifest, address: str) -> bool:
    """Run the readiness probe of a container as the kubelet does."""
    probe = container["readinessProbe"]
    if "grpc" in probe:
        with grpc.insecure_channel(f"{address}:{probe['grpc']['port']}") as channel:
            try:
                answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=1)
            except grpc.RpcError:
                return False
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
    (port,) = (item["containerPort"] for item in container["ports"] if item["name"] == probe["httpGet"]["port"])
    try:
        with urllib.request.urlopen(f"http://{address}:{port}{probe['httpGet']['path']}", timeout=1) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _for_podman(deployment: Manifest, replicas: int) -> Manifest:
    deployment = copy.deepcopy(deployment)
    deployment["spec"]["replicas"] = replicas
    for container in deployment["spec"]["template"]["spec"]["containers"]:
        container["image"] = _newest(container["image"].partition(":")[0])
        for key in ("ports", "startupProbe", "readinessProbe", "livenessProbe"):
            del container[key]
    return deployment


@cache
def _newest(name: str) -> str:
    """Return the image that was built last; each build has its own tag."""
    listed = podman("image", "ls", "--sort", "created", "--format", "{{.Repository}}:{{.Tag}}", f"localhost/{name}")
    if not listed:
        raise LookupError(f"there is no image localhost/{name}: run make images")
    return listed.split()[0]


def _owned_claim(claim: Manifest) -> Manifest:
    """Make the pod's user the owner of the volume, as fsGroup does in Kubernetes."""
    claim = copy.deepcopy(claim)
    claim["metadata"]["annotations"] = {"volume.podman.io/uid": "65532", "volume.podman.io/gid": "65532"}
    return claim
