from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.example_package import install
from tests.integration.collector import Collector
from tests.integration.holding import Hold
from tests.integration.service import Service, stub_of

if TYPE_CHECKING:
    from protos.service_pb2_grpc import MidstreamAsyncStub as Stub

EXAMPLE_POST_PROCESSOR = Path(__file__).parents[1] / "gpu_worker" / "example_post_processor"


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.stop()


@pytest.fixture(scope="session")
def hold(tmp_path_factory: pytest.TempPathFactory) -> Hold:
    """Return the object with which a test pauses a worker of the shared service."""
    return Hold(tmp_path_factory.mktemp("hold"))


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory, collector: Collector, hold: Hold) -> Iterator[Service]:
    """Start two routers, two detokenizers and two workers, which all tests in this folder share."""
    flags = ("--routers", "2", "--detokenizers", "2", "--workers", "2")
    site = install(EXAMPLE_POST_PROCESSOR, tmp_path_factory.mktemp("package"))
    path = os.pathsep.join([str(site), hold.settings["PYTHONPATH"]])
    # Trace only requests whose client sends a traceparent header.
    tracing = {"MIDSTREAM_OTLP_ENDPOINT": collector.endpoint, "MIDSTREAM_TRACE_RATIO": "0"}
    settings = {"MIDSTREAM_LOG_LEVEL": "debug", "MIDSTREAM_ADAPTER_ROOT": tempfile.gettempdir()}
    # The machine that runs the tests may stall for some seconds.
    settings["MIDSTREAM_WORKER_TIMEOUT_MS"] = "30000"
    settings = hold.settings | tracing | settings | {"PYTHONPATH": path}
    service = Service.start(tmp_path_factory.mktemp("service"), *flags, **settings)
    yield service
    service.stop()


@pytest.fixture
async def stub(service: Service) -> AsyncIterator[Stub]:
    async with stub_of(service.routers()[0]) as stub:
        yield stub
