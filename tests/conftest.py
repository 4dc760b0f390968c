from __future__ import annotations

import fcntl
import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

# Run Triton kernels in the interpreter. Triton reads this variable when any package first imports it.
os.environ["TRITON_INTERPRET"] = "1"
# Tests run in parallel, so the threads of a worker would wait for threads that are not scheduled.
os.environ.setdefault("MIDSTREAM_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long an example takes depends on what else the machine runs.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

_INTEGRATION = "tests/integration/"
# Files whose tests share the service started in tests/integration/conftest.py.
_SERVICE = "the service"
_SHARING = (
    "adapters",
    "command",
    "apis",
    "apis_fuzz",
    "examples",
    "executor",
    "feature_apis",
    "features",
    "http_examples",
    "mixture",
    "pressure",
    "roles",
    "shadow_runs",
    "service",
    "tracing",
)
# Files whose tests share the processes started in tests/faults/conftest.py.
_PROCESSES = "the processes"
_FAULTS = ("service_faults", "worker_faults", "idempotent_calls", "batches", "suspensions", "out_of_memory")
# Files whose tests share the processes started in tests/proxies/conftest.py.
_PROXIED = "the service behind proxies"
# With ALL_PROXY_TESTS, streams wait for 20 minutes, beside the other tests.
_PROXIES = ("apis", "router_kills", *(() if "ALL_PROXY_TESTS" in os.environ else ("waiting_streams",)))
# Files that take 20 s or longer, longest first.
_LONG = (
    "tests/simulation/test_simulation.py",
    "tests/faults/test_kill_at_every_step.py",
    "tests/gpu_worker/test_embedded_model.py",
    "tests/gpu_worker/test_mixture.py",
    "tests/integration/test_audit.py",
    "tests/gpu_worker/test_parallel_ranks.py",
    "tests/scheduler/test_core_machine.py",
    "tests/scheduler/test_simulation.py",
    "tests/integration/test_parallel_service.py",
    "tests/gpu_worker/test_worker_process.py",
    "tests/faults/test_guarded_service.py",
    "tests/router/test_streams_end_to_end.py",
    "tests/gpu_worker/test_beams.py",
    "tests/gpu_worker/test_embedded_requests.py",
    "tests/kernels/test_sanitized.py",
    "tests/faults/test_network.py",
    "tests/benchmarks/test_gpu_benchmark.py",
    "tests/integration/test_roles.py",
    "tests/integration/test_journal.py",
    "tests/integration/test_kv_tiers.py",
    "tests/integration/test_backup.py",
    "tests/integration/test_kinds.py",
    "tests/kernels/test_native_decoder.py",
    "tests/gpu_worker/test_families.py",
    "tests/integration/test_transformers_model.py",
    "tests/seeds/test_executor_examples.py",
    "tests/integration/test_serve.py",
    "tests/integration/test_working_folder.py",
    "tests/router/test_standing_parts.py",
    "tests/kernels/test_triton_compiles.py",
)
_GROUPS = (
    {f"{_INTEGRATION}test_{name}.py": _SERVICE for name in _SHARING}
    | {f"tests/faults/test_{name}.py": _PROCESSES for name in _FAULTS}
    | {f"tests/proxies/test_{name}.py": _PROXIED for name in _PROXIES}
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run fast tests first, so that whole services start only if their components work; with several processes, run
    long files first.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        items.sort(key=lambda item: item.nodeid.startswith(_INTEGRATION))
        return
    # Without this, idle processes would wait for long tests that are assigned last.
    ranks = {name: rank for rank, name in enumerate((_SERVICE, _PROCESSES, _PROXIED, *_LONG))}
    # A group runs in the order of its list: the fault tests begin with the one that needs a new journal.
    order = {file: place for place, file in enumerate(_GROUPS)}

    def place_of(item: pytest.Item) -> tuple[int, int]:
        return ranks.get(_group_of(item.nodeid), len(ranks)), order.get(item.nodeid.partition("::")[0], 0)

    items.sort(key=place_of)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[None]:
    """Let the first of several processes collect alone: after an installation it compiles thousands of modules, which
    the other processes would otherwise compile at the same time.

    Hardly any of the millions of objects that are created meanwhile are garbage, so collection is disabled.
    """
    gc.disable()
    try:
        with Path(__file__).open() as lock:
            if "PYTEST_XDIST_WORKER" in os.environ:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    fcntl.flock(lock, fcntl.LOCK_SH)
            return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Exempt all modules from garbage collection: each collection would walk millions of objects."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    """List failures again at the end, after all long reports."""
    yield
    for outcome in ("failed", "error"):
        for report in terminalreporter.getreports(outcome):
            seconds = f"{report.when}, {getattr(report, 'duration', 0.0):.1f} s"
            crash = getattr(report.longrepr, "reprcrash", None)
            message = crash.message if crash else str(report.longrepr or "")
            message = message.partition("\n")[0][:200]
            terminalreporter.write_line(f"{outcome.upper()} {report.nodeid} ({seconds}): {message}")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --record."""
    parser.addoption("--record", action="store_true", help="add this run to docs/compatibility.json")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """End processes that faulthandler_timeout does not end, and record the run if that was asked for."""
    if config.getoption("--record") and "PYTEST_XDIST_WORKER" not in os.environ:
        from tests.recorder import Recorder

        config.pluginmanager.register(Recorder(config.args))
    limit_s = float(config.getini("faulthandler_timeout"))
    if limit_s and config.pluginmanager.hasplugin("dsession"):
        config.pluginmanager.register(StalledProcesses(limit_s + 60))


class StalledProcesses:
    """Aborts the test processes, which makes them print their tracebacks, if no test has begun or ended for `limit_s`
    seconds.

    This covers processes that are suspended or hang between two tests, where faulthandler_timeout does not apply.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._running: set[str] = set()
        self._latest = time.monotonic()
        self._ended = threading.Event()

    def pytest_sessionstart(self) -> None:
        threading.Thread(target=self._watch, daemon=True).start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running.add(nodeid)
        self._latest = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._running.discard(nodeid)
        self._latest = time.monotonic()

    def pytest_sessionfinish(self) -> None:
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(5):
            if time.monotonic() - self._latest < self._limit_s:
                continue
            print(f"\nno test has ended for {self._limit_s:.0f} s; running: {sorted(self._running)}", flush=True)
            for process in psutil.Process().children():
                print(process, flush=True)
                process.send_signal(signal.SIGABRT)
                process.resume()
            self._latest = time.monotonic()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """Return the scheduler that distributes groups of tests."""
    return GroupScheduling(config, log)


class GroupScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Keeps the tests of a file in one process, since they share services and models; likewise all files that share a
    service.

    A test that ends its process, for example because it hangs, counts as failed; by default, xdist would run it again
    and again.
    """

    def schedule(self) -> None:
        """Assign at least two files to each replacement process, which starts its last test only when it is told to
        end.
        """
        super().schedule()
        for node in self.nodes:
            self._reschedule(node)

    def remove_node(self, node: WorkerController) -> str | None:
        """Reassign the remaining tests of a process; return the test that ended it."""
        units: list[dict[str, bool]] = list(self.assigned_work[node].values())
        crashed = next(((unit, test) for unit in units for test, is_done in unit.items() if not is_done), None)
        if crashed is not None:
            unit, test = crashed
            unit[test] = True
        super().remove_node(node)
        return crashed and crashed[1]

    def _split_scope(self, nodeid: str) -> str:
        return _group_of(nodeid)


def _group_of(nodeid: str) -> str:
    file = nodeid.partition("::")[0]
    return _GROUPS.get(file, file)
