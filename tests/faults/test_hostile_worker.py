"""No matter what a worker sends, the requests of the healthy worker complete correctly and the scheduler survives."""

from __future__ import annotations

import pytest

from protos import worker_pb2
from tests.faults.hostile_worker import run


@pytest.mark.timeout(240)
async def test_a_thousand_changed_messages_harm_no_request_of_the_healthy_worker() -> None:
    outcome = await run(1_000, seed=1)
    assert outcome.problems == []
    assert outcome.num_mutated >= 1_000
    assert outcome.num_own > 20
    assert outcome.num_faults > 50
    # Messages of every kind must have been mutated, and most fields of the most important ones.
    for part in worker_pb2.WorkerMessage.DESCRIPTOR.fields:
        assert any(path.startswith(f".{part.name}") for path in outcome.paths), part.name
