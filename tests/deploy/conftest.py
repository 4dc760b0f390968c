from __future__ import annotations

import shutil

import pytest

from tests.deploy.rendering import OVERLAYS, ROOT, Rendered, render

HAS_KUBECTL = shutil.which("kubectl") is not None
# The tests in these files require kubectl, which may not be installed.
collect_ignore = [] if HAS_KUBECTL else ["test_manifests.py", "test_network_policies.py", "test_services.py"]
HAS_HELM = shutil.which("helm") is not None or (ROOT / ".venv-manifests" / "bin" / "helm").exists()
if not (HAS_KUBECTL and HAS_HELM):
    collect_ignore += ["test_chart.py", "test_rollback.py"]

HAS_PROMTOOL = shutil.which("promtool") is not None
if not HAS_PROMTOOL:
    collect_ignore.append("test_alerts.py")


def pytest_report_header() -> list[str]:
    missing = {
        "kubectl is not installed, so Kubernetes manifests are not tested": not HAS_KUBECTL,
        "helm is not installed (make check-manifests installs it), so the chart is not tested": not HAS_HELM,
        "promtool is not installed (Debian: prometheus), so alerts are not tested": not HAS_PROMTOOL,
    }
    return [line for line, is_missing in missing.items() if is_missing]


@pytest.fixture(params=OVERLAYS)
def rendered(request: pytest.FixtureRequest) -> Rendered:
    return render(request.param)
