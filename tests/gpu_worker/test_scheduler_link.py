"""The worker's connection to its scheduler."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from gpu_worker.kv.kept_blocks import KeptBlocks
from gpu_worker.scheduler_link.link import SchedulerLink, Stopped
from midstream.telemetry import Metrics
from protos import worker_pb2


def test_a_link_that_fails_ends_the_worker() -> None:
    """Otherwise the process would keep running without a scheduler and would not be restarted."""
    kept = KeptBlocks(np.zeros(4, dtype=np.uint64))
    broken = cast("Any", None)  # a registration that cannot be serialized
    link = SchedulerLink("tcp://127.0.0.1:1", broken, Metrics(), worker_pb2.MemoryUsage, cast("Any", None), kept)
    link.start()
    stopped = link.inbox.get(timeout=20)
    link.join()
    assert isinstance(stopped, Stopped)
    assert stopped.exit_code == 1
    assert "the link to the scheduler failed" in stopped.reason
