"""`pytest --record`: adds the result and the versions of this run to docs/compatibility.json."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path

import pytest

from deploy.release.compatibility import record_tests
from tests.integration import postgres

ROOT = Path(__file__).parents[1]
# The tests that run PostgreSQL.
_POSTGRES = (
    "tests/integration/test_poolers.py",
    "tests/integration/test_standby.py",
    "tests/scheduler/test_documents.py",
)


class Recorder:
    """Counts the tests of a session, and records them at its end."""

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self._passed: list[str] = []
        self._num_failed = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._num_failed += 1
        elif report.when == "call" and report.passed:
            self._passed.append(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        has_postgres = any(test.startswith(_POSTGRES) for test in self._passed)
        versions = versions_here(has_postgres=has_postgres) | {"tests": ", ".join(self._names)}
        record_tests(versions, num_passed=len(self._passed), num_failed=self._num_failed)


def versions_here(*, has_postgres: bool) -> dict[str, str | None]:
    """Return the versions of what tests run with; of PostgreSQL only if they used it."""
    import torch

    torch_version, _, _ = importlib.metadata.version("torch").partition("+")
    return {
        "python": platform.python_version(),
        "torch": torch_version,
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
        "postgres": postgres.version() if has_postgres else None,
        "machine": platform.machine(),
    }
