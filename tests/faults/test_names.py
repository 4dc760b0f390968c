"""The address behind the name of a component changes while its old address does not answer: everything follows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.named_processes import ROOT, environment


@pytest.fixture(scope="module")
def unshare(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the start of a command that may replace /etc/hosts for itself."""
    command = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
    hosts = tmp_path_factory.mktemp("attempt") / "hosts"
    hosts.touch()
    try:
        result = subprocess.run(
            [*command, "mount", "--bind", str(hosts), "/etc/hosts"], capture_output=True, check=False, timeout=240
        )
    except OSError:
        result = None
    if result is None or result.returncode:
        pytest.skip("this machine allows no mount namespaces, so the addresses of names cannot be changed")
    return command


@pytest.mark.parametrize("prefix", ["", "dns:///"])
def test_streams_continue_when_the_address_behind_a_name_changes(
    unshare: list[str], tmp_path: Path, prefix: str
) -> None:
    program = [sys.executable, "-P", "-m", "tests.faults.name_scenarios", "--folder", str(tmp_path), "--prefix", prefix]
    result = subprocess.run(
        [*unshare, *program], cwd=ROOT, env=environment(), capture_output=True, text=True, check=False, timeout=550
    )
    assert result.returncode == 0, result.stdout + result.stderr
