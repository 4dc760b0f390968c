"""Generate a load from a client container, and run actions at given points."""

from __future__ import annotations

import json
import subprocess
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.deploy.e2e.cluster import SERVICES
from tests.deploy.e2e.podman import podman, popen
from tests.deploy.rendering import container_of, ports_of, render

_PROGRAM = Path(__file__).parent / "client.py"
CLIENT = "midstream-e2e-client"

Output = dict[str, Any]
# An action, which runs once this fraction of all tokens has arrived.
Event = tuple[float, Callable[[], object]]


def stream(num_requests: int, max_tokens: int, events: Sequence[Event] = ()) -> list[Output]:
    """Stream `num_requests` concurrent requests from a container, and meanwhile run `events` in order.

    Returns:
        One entry per request, in the form that client.py prints.
    """
    waiting = list(events)
    outputs: list[Output] | None = None
    with _start(num_requests, max_tokens) as client:
        assert client.stdout is not None
        assert client.stderr is not None
        try:
            for line in client.stdout:
                message = json.loads(line)
                outputs = message.get("outputs")
                while waiting and message.get("num_tokens", 0) >= waiting[0][0] * num_requests * max_tokens:
                    waiting.pop(0)[1]()
            assert client.wait(30) == 0, client.stderr.read()
        finally:
            podman("rm", "--force", "--time", "0", CLIENT, check=False)
    assert outputs is not None
    assert not waiting, "the load ended before all events had run"
    return outputs


def _start(num_requests: int, max_tokens: int) -> subprocess.Popen[str]:
    router = render("cpu").pods()["router"]
    image, port = container_of(router)["image"], ports_of(router)["grpc"]
    flags = ["--rm", "--name", CLIENT, "--read-only", "--network", SERVICES, "--volume", f"{_PROGRAM}:/client.py:ro"]
    arguments = ["router", str(port), uuid.uuid4().hex[:8], str(num_requests), str(max_tokens)]
    return popen("run", *flags, "--entrypoint", "python", f"localhost/{image}", "/client.py", *arguments)
