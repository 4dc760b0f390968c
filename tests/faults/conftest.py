from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from midstream.client import AsyncClient
from tests.faults.limited_service import LimitedService, running_limited
from tests.faults.processes import Processes, running_processes

FLAGS = ("--worker-timeout-ms", "1500", "--heartbeat-interval-ms", "100", "--no-worker-timeout-s", "2")


@pytest.fixture(scope="package")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with running_processes(tmp_path_factory.mktemp("processes"), *FLAGS) as processes:
        yield processes


@pytest.fixture
async def client(shared: Processes) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(shared.routers) as client:
        yield client


@pytest.fixture
async def processes(shared: Processes, client: AsyncClient) -> Processes:
    """Return the service with all processes running and idle; restart those that an earlier test killed."""
    shared.worker_flags = ()
    await shared.make_whole(client)
    return shared


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LimitedService]:
    """Run all components as processes, with low limits."""
    with running_limited(tmp_path_factory.mktemp("limited")) as limited:
        yield limited
