from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.deploy.e2e.cluster import Cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    with Cluster() as running:
        yield running
