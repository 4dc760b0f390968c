from __future__ import annotations

import os

import pytest

# Triton's kernels run in its interpreter here. It reads this when it is first imported, by whichever package that is.
os.environ["TRITON_INTERPRET"] = "1"

_REAL_PROCESSES = "tests/integration/"
_SERVICE = "service"  # the fixture of tests/integration
# Files that take more than 20 s, longest first.
_LONG = (
    "tests/simulation/test_simulation.py",
    "tests/faults/test_kill_at_every_step.py",
    "tests/gpu_worker/test_embedded_model.py",
    "tests/gpu_worker/test_mixture.py",
    "tests/scheduler/test_core_machine.py",
    "tests/faults/test_service_faults.py",
    "tests/scheduler/test_simulation.py",
    "tests/faults/test_worker_faults.py",
    "tests/integration/test_parallel_service.py",
    "tests/gpu_worker/test_worker_process.py",
    "tests/faults/test_guarded_service.py",
    "tests/router/test_streams_end_to_end.py",
    "tests/gpu_worker/test_beams.py",
    "tests/gpu_worker/test_embedded_requests.py",
    "tests/kernels/test_sanitized.py",
    "tests/faults/test_network.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast tests first: whole services start only when their parts work. Over several processes, long files first."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        items.sort(key=lambda item: item.nodeid.startswith(_REAL_PROCESSES))
        return
    # A file stays in one process, and so does all that shares the service. Long ones that are handed out last would be
    # waited for by idle processes.
    groups = {item: _group_of(item) for item in items}
    ranks = {name: rank for rank, name in enumerate((_SERVICE, *_LONG))}
    items.sort(key=lambda item: ranks.get(groups[item], len(ranks)))
    for item, group in groups.items():
        item.add_marker(pytest.mark.xdist_group(group))


def _group_of(item: pytest.Item) -> str:
    is_shared = isinstance(item, pytest.Function) and _SERVICE in item.fixturenames
    return _SERVICE if is_shared else item.nodeid.partition("::")[0]
