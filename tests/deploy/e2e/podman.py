"""Call podman with a separate configuration, so that the configuration of the machine is not changed."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

_ENVIRONMENT = os.environ | {"CONTAINERS_CONF": str(Path(__file__).parent / "containers.conf")}


class PodmanError(Exception):
    """A podman command failed; the message contains its output."""


def podman(*arguments: str, stdin: str | None = None, check: bool = True, timeout_s: float = 120.0) -> str:
    """Run `podman ARGUMENTS`; return its output."""
    result = subprocess.run(
        ["podman", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        env=_ENVIRONMENT,
        timeout=timeout_s,
        check=False,
    )
    if check and result.returncode != 0:
        raise PodmanError(f"podman {' '.join(arguments)}: {result.stderr.strip() or result.stdout.strip()}")
    return result.stdout.strip()


def logs(container: str) -> str:
    """Return the stdout and stderr of a container."""
    result = subprocess.run(
        ["podman", "logs", container], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return result.stdout


def popen(*arguments: str) -> subprocess.Popen[str]:
    """Start `podman ARGUMENTS` with its output on a pipe."""
    return subprocess.Popen(
        ["podman", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=_ENVIRONMENT,
    )


def pod_address(pod: str, network: str) -> str:
    """Return the IP address of a pod in a network."""
    infra = podman("pod", "inspect", pod, "--format", "{{.InfraContainerID}}")
    networks = json.loads(podman("inspect", infra, "--format", "{{json .NetworkSettings.Networks}}"))
    return str(networks[network]["IPAddress"])
