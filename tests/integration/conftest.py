from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

import pytest

from tests.integration.service import Service, stub_of

if TYPE_CHECKING:
    from protos.service_pb2_grpc import MidstreamAsyncStub as Stub


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Two routers, three detokenizers, two workers: what every test here shares."""
    flags = ("--routers", "2", "--detokenizers", "3", "--workers", "2")
    service = Service.start(tmp_path_factory.mktemp("service"), *flags)
    yield service
    service.stop()


@pytest.fixture
async def stub(service: Service) -> AsyncIterator[Stub]:
    async with stub_of(service.routers()[0]) as stub:
        yield stub
