"""The configurations in deploy/proxies are valid. Those of Envoy and of a Gateway are only checked, not run."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from tests.proxies.proxy import CONFIGURATIONS, IS_REQUIRED, PROGRAMS, ROOT, Program, placed

ROUTERS = ("127.0.0.1:50061", "127.0.0.1:50062")
URLS = ("http://127.0.0.1:8061", "http://127.0.0.1:8062")
ENVOY_PYTHON = ROOT / ".venv-proxies" / "bin" / "python"


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_the_program_accepts_its_configuration(program: Program, tmp_path: Path) -> None:
    file = tmp_path / program.file
    file.write_text(placed(program, program.configuration(), (50060, 8060), ROUTERS, URLS, tmp_path))
    checked = subprocess.run(program.check_command(file), capture_output=True, text=True, timeout=240, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    # nginx and HAProxy report settings that they ignore as warnings.
    assert "[warn]" not in checked.stderr
    assert "[WARNING]" not in checked.stderr


def check_with_schema(file: Path) -> subprocess.CompletedProcess[str]:
    command = [str(ENVOY_PYTHON), str(Path(__file__).with_name("envoy_schema.py")), str(file)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_envoys_configuration_follows_its_schema(tmp_path: Path) -> None:
    if not ENVOY_PYTHON.exists():
        (pytest.fail if IS_REQUIRED else pytest.skip)("xds-protos is not installed; make test-proxies installs it")
    file = CONFIGURATIONS / "envoy.yaml"
    checked = check_with_schema(file)
    assert checked.stdout == "2 2\n", checked.stderr
    wrong = tmp_path / "envoy.yaml"
    wrong.write_text(file.read_text().replace("stream_idle_timeout", "stream_timeout"))
    assert 'no field named "stream_timeout"' in check_with_schema(wrong).stderr


def test_the_routes_of_a_gateway_lead_to_the_ports_of_the_routers_service() -> None:
    service = next(
        document
        for document in yaml.safe_load_all((ROOT / "deploy/k8s/base/router.yaml").read_text())
        if document["kind"] == "Service"
    )
    ports = {port["name"]: port["port"] for port in service["spec"]["ports"]}
    routes = list(yaml.safe_load_all((CONFIGURATIONS / "gateway-api.yaml").read_text()))
    backends = {route["kind"]: route["spec"]["rules"][0]["backendRefs"] for route in routes}
    assert backends == {
        "GRPCRoute": [{"name": service["metadata"]["name"], "port": ports["grpc"]}],
        "HTTPRoute": [{"name": service["metadata"]["name"], "port": ports["http"]}],
    }
