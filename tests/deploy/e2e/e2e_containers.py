"""Streams that a client container reads continue unchanged while processes die, join and leave: `make
e2e-containers`.
"""

from __future__ import annotations

import time
import urllib.request

import pytest

from tests.deploy.e2e.cluster import Cluster, container_name
from tests.deploy.e2e.load import Output, stream
from tests.deploy.e2e.podman import podman

pytestmark = pytest.mark.timeout(900)

NUM_REQUESTS = 32
MAX_TOKENS = 256


def metric(cluster: Cluster, pod: str, name: str) -> float:
    """Return the sum of a pod's samples of a metric."""
    with urllib.request.urlopen(f"http://{cluster.metrics_address(pod)}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    values = [
        line.rpartition(" ")[2] for line in lines if line.startswith((f"midstream:{name} ", f"midstream:{name}{{"))
    ]
    assert values, f"{pod} has no metric {name}"
    return sum(map(float, values))


def await_metric(cluster: Cluster, pod: str, name: str, value: float, timeout_s: float) -> float:
    """Wait until a metric has the given value; return the seconds that this took."""
    started = time.monotonic()
    while (found := metric(cluster, pod, name)) != value:
        if time.monotonic() - started > timeout_s:
            raise AssertionError(
                f"{name} of {pod} is {found}, not {value}; its log ends with\n{cluster.logs(pod)[-2000:]}"
            )
        time.sleep(0.1)
    return time.monotonic() - started


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> list[Output]:
    # A worker is ready when its model is loaded, but usable only after it has registered with the scheduler.
    await_metric(cluster, cluster.pods["scheduler"][0], "num_worker_groups", 2, 30)
    for router in cluster.pods["router"]:
        await_metric(cluster, router, "num_live_detokenizers", 2, 30)
    return stream(NUM_REQUESTS, MAX_TOKENS)


def test_every_replica_has_its_share(cluster: Cluster, undisturbed: list[Output]) -> None:
    assert {part: len(pods) for part, pods in cluster.pods.items()} == {
        "router": 2,
        "scheduler": 1,
        "detokenizer": 2,
        "worker": 2,
    }
    assert [len(output.get("token_ids", output)) for output in undisturbed] == [MAX_TOKENS] * NUM_REQUESTS
    for part, name in (
        ("router", "relayed_tokens_total"),
        ("detokenizer", "detokenized_tokens_total"),
        ("worker", "worker_tokens_total"),
    ):
        for pod in cluster.pods[part]:
            assert metric(cluster, pod, name) > 0.1 * NUM_REQUESTS * MAX_TOKENS


def test_images_keep_to_their_limits(cluster: Cluster) -> None:
    for part, pods in cluster.pods.items():
        container = container_name(pods[0])
        image = podman("inspect", container, "--format", "{{.ImageName}}")
        size = int(podman("image", "inspect", image, "--format", "{{.Size}}"))
        assert size < (400e6 if part != "worker" else 2e9), f"{image} has {size / 1e6:.0f} MB"
        assert podman("exec", container, "id", "-u") == "65532"
        packages = podman("exec", container, "sh", "-c", "ls /opt/midstream/lib/*/site-packages").split()
        assert ("torch" in packages) == (part == "worker")
        assert podman("exec", container, "sh", "-c", "command -v gcc g++ pip || :") == ""


def test_nothing_is_lost_while_components_die_and_scale(cluster: Cluster, undisturbed: list[Output]) -> None:
    outputs = stream(
        NUM_REQUESTS,
        MAX_TOKENS,
        [
            (0.10, lambda: cluster.kill(cluster.pods["detokenizer"][0])),
            (0.20, lambda: cluster.scale("detokenizer", 4)),
            (0.35, lambda: cluster.kill(cluster.pods["worker"][0])),
            (0.50, lambda: cluster.scale("detokenizer", 1)),
            (0.65, lambda: cluster.kill(cluster.pods["router"][1])),
            (0.75, lambda: cluster.scale("worker", 1)),
        ],
    )
    assert [output.get("error") for output in outputs] == [None] * NUM_REQUESTS
    for key in ("token_ids", "text", "finish_reason"):
        assert [output[key] for output in outputs] == [output[key] for output in undisturbed]
    assert metric(cluster, cluster.pods["scheduler"][0], "num_worker_deaths_total") >= 1
    # Check that no request, block or stream has leaked.
    scheduler = cluster.pods["scheduler"][0]
    await_metric(cluster, scheduler, "num_requests_running", 0, 10)
    await_metric(cluster, scheduler, "kv_cache_usage_perc", 0, 10)
    await_metric(cluster, cluster.pods["detokenizer"][0], "num_attached_streams", 0, 10)
    cluster.scale("worker", 2)
    cluster.scale("detokenizer", 2)
    cluster.await_ready()


def test_routers_notice_detokenizers_within_5_s(cluster: Cluster) -> None:
    cluster.scale("detokenizer", 3)
    for router in cluster.pods["router"]:
        await_metric(cluster, router, "num_live_detokenizers", 3, 5)
    cluster.scale("detokenizer", 2)
    for router in cluster.pods["router"]:
        await_metric(cluster, router, "num_live_detokenizers", 2, 5)
