"""The worker's connection to its scheduler."""

from __future__ import annotations

import itertools
from typing import Any, cast

import numpy as np
import pytest

from gpu_worker.kv.kept_blocks import KeptBlocks
from gpu_worker.kv.tiers import StoreChanges
from gpu_worker.scheduler_link import link as link_module
from gpu_worker.scheduler_link.link import EpochStarted, SchedulerLink, Stopped
from midstream.errors import ConfigError
from midstream.telemetry import Metrics
from protos import worker_pb2
from tests.gpu_worker.scripted_scheduler import ScriptedScheduler
from tests.ports import free_ports


def link_to(address: str, register: Any, tiers: Any = None) -> SchedulerLink:
    kept = KeptBlocks(np.zeros(4, dtype=np.uint64))
    return SchedulerLink(address, register, Metrics(), worker_pb2.MemoryUsage, cast("Any", None), kept, tiers=tiers)


def test_a_link_that_fails_ends_the_worker() -> None:
    """Otherwise the process would keep running without a scheduler and would not be restarted."""
    link = link_to("tcp://127.0.0.1:1", None)  # this registration cannot be serialized
    link.start()
    stopped = link.inbox.get(timeout=20)
    link.join()
    assert isinstance(stopped, Stopped)
    assert stopped.exit_code == 1
    assert "the link to the scheduler failed" in stopped.reason


def test_a_worker_follows_the_active_scheduler() -> None:
    """First only the second scheduler listens. Then only the first does; then both do, but the first is silent."""
    first_port, second_port = free_ports(2)
    second = ScriptedScheduler(second_port)
    link = link_to(f"one-of:tcp://localhost:{first_port}|tcp://127.0.0.1:{second_port}", worker_pb2.Register())
    link.start()
    second.register(epoch=1)
    assert isinstance(link.inbox.get(timeout=30), EpochStarted)
    second.close()
    first = ScriptedScheduler(first_port)
    first.register(epoch=2)
    assert isinstance(link.inbox.get(timeout=30), EpochStarted)
    second = ScriptedScheduler(second_port)
    first.send(epoch_ended=worker_pb2.EpochEnded(epoch=2))
    second.register(epoch=3)
    assert isinstance(link.inbox.get(timeout=30), EpochStarted)
    link.leave()
    assert isinstance(link.inbox.get(timeout=30), Stopped)
    link.join()
    first.close()
    second.close()


@pytest.mark.parametrize("target", ["tcp://b", "tcp://:1", "tcp://[::1]:1"])
def test_an_address_after_one_of_has_a_host_and_a_port(target: str) -> None:
    with pytest.raises(ConfigError, match="is not tcp://host:port"):
        link_to(f"one-of:tcp://a:1|{target}", worker_pb2.Register())


class _Tiers:
    """Tiers that hold many blocks, one of which is removed after the registration."""

    def hashes(self) -> set[int]:
        return set(range(10))

    def changes(self) -> StoreChanges:
        return StoreChanges((), (9,))


def test_a_worker_reports_many_stored_blocks_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "MAX_HASHES_PER_MESSAGE", 4)
    scheduler = ScriptedScheduler()
    link = link_to(scheduler.address, worker_pb2.Register(), _Tiers())
    link.start()
    parts = [list(scheduler.register(epoch=1).stored_hashes)]
    parts += [list(scheduler.receive("heartbeat").stored_hashes) for _ in range(3)]
    link.leave()
    link.join()
    scheduler.close()
    assert [len(part) for part in parts] == [4, 4, 1, 0]
    assert sorted(itertools.chain(*parts)) == list(range(9))
