from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from midstream.client import AsyncClient
from tests.faults.processes import Processes, running_processes
from tests.proxies.proxy import IS_REQUIRED, PROGRAMS, Program, Proxy, running

# Steps that a worker computes at its own rate while the file `hold` exists.
NUM_HELD_STEPS = 60
# Requests wait as long as a test wants, for a worker that is slow and for one that is not there.
FLAGS = ("--worker-progress-timeout-ms", "600000", "--no-worker-timeout-s", "3600")


@pytest.fixture(scope="package")
def hold_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a path; while there is a file, workers are slow after NUM_HELD_STEPS."""
    return tmp_path_factory.mktemp("hold") / "hold"


@pytest.fixture
def hold(hold_path: Path) -> Iterator[Callable[[], None]]:
    """Let workers be slow after NUM_HELD_STEPS; return the function that ends this."""
    hold_path.touch()
    yield hold_path.unlink
    hold_path.unlink(missing_ok=True)


@pytest.fixture(scope="package")
def shared(tmp_path_factory: pytest.TempPathFactory, hold_path: Path) -> Iterator[Processes]:
    """Start two of each component, with fake workers; keep-alives suit the limits in test_waiting_streams.py."""
    workers = ("--hold", str(hold_path), "--hold-after", str(NUM_HELD_STEPS))
    routers = () if IS_REQUIRED else ("--keepalive-interval-s", "1")
    folder = tmp_path_factory.mktemp("processes")
    with running_processes(folder, *FLAGS, worker_flags=workers, router_flags=routers) as processes:
        yield processes


@pytest.fixture
async def processes(shared: Processes) -> Processes:
    """Return the service with all processes running and idle; restart those that an earlier test killed."""
    async with AsyncClient(shared.routers) as client:
        await shared.make_whole(client)
    return shared


@pytest.fixture(params=PROGRAMS, ids=lambda program: program.name)
def program(request: pytest.FixtureRequest) -> Program:
    """Return a proxy's program; the test is skipped if it is not installed."""
    program: Program = request.param
    program.path()
    return program


@pytest.fixture
async def proxy(program: Program, processes: Processes, tmp_path: Path) -> AsyncIterator[Proxy]:
    """Run a proxy as it is deployed, in front of both routers."""
    text = program.configuration()
    async with running(program, tmp_path, processes.routers, processes.urls, text) as proxy:
        yield proxy
