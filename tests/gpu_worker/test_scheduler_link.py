"""The worker's connection to its scheduler."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch
import zmq

from gpu_worker.batch.step import StepOutput
from gpu_worker.kv.kept_blocks import KeptBlocks
from gpu_worker.kv.tiers import StoreChanges
from gpu_worker.kv.transfer import Fetched
from gpu_worker.models.images import EncodedImage
from gpu_worker.scheduler_link import link as link_module
from gpu_worker.scheduler_link.link import EpochStarted, SchedulerLink, Stopped, WaitingStep
from midstream.errors import ConfigError, InvalidArgumentError
from midstream.telemetry import Metrics
from protos import worker_pb2
from tests.gpu_worker.scripted_scheduler import ScriptedScheduler
from tests.ports import free_ports


def link_to(address: str, register: Any, tiers: Any = None, **parts: Any) -> SchedulerLink:
    kept = KeptBlocks(np.zeros(4, dtype=np.uint64))
    parts = {"adapters": None, "tiers": tiers, **parts}
    return SchedulerLink(address, register, Metrics(), worker_pb2.MemoryUsage, kept=kept, **parts)


def test_a_link_that_fails_ends_the_worker() -> None:
    """Otherwise the process would keep running without a scheduler and would not be restarted."""
    link = link_to("tcp://127.0.0.1:1", None)  # this registration cannot be serialized
    link.start()
    stopped = link.inbox.get(timeout=240)
    link.join()
    assert isinstance(stopped, Stopped)
    assert stopped.exit_code == 1
    assert "the link to the scheduler failed" in stopped.reason


def test_a_worker_follows_the_active_scheduler() -> None:
    """First, only the second scheduler listens, and then only the first. Finally both listen, but the first does not
    reply.
    """
    first_port, second_port = free_ports(2)
    second = ScriptedScheduler(second_port)
    link = link_to(f"one-of:tcp://localhost:{first_port}|tcp://127.0.0.1:{second_port}", worker_pb2.Register())
    link.start()
    second.register(epoch=1)
    assert isinstance(link.inbox.get(timeout=240), EpochStarted)
    second.close()
    first = ScriptedScheduler(first_port)
    first.register(epoch=2)
    assert isinstance(link.inbox.get(timeout=240), EpochStarted)
    second = ScriptedScheduler(second_port)
    first.send(epoch_ended=worker_pb2.EpochEnded(epoch=2))
    second.register(epoch=3)
    assert isinstance(link.inbox.get(timeout=240), EpochStarted)
    link.leave()
    assert isinstance(link.inbox.get(timeout=240), Stopped)
    link.join()
    first.close()
    second.close()


@pytest.mark.parametrize("target", ["tcp://b", "tcp://:1", "tcp://[::1]:1"])
def test_an_address_after_one_of_has_a_host_and_a_port(target: str) -> None:
    with pytest.raises(ConfigError, match="is not tcp://host:port"):
        link_to(f"one-of:tcp://a:1|{target}", worker_pb2.Register())


class _Tiers:
    """Tiers with ten blocks, one of which is removed after the registration."""

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


class _Adapters:
    """A cache that cannot read any adapter."""

    def load(self, path: str) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_exception(InvalidArgumentError("is not an adapter", field=path))
        return future


class _Images:
    def encode(self, data: bytes) -> EncodedImage:
        return EncodedImage(torch.zeros(1, 4), "")

    def close(self) -> None:
        """Do nothing."""


class _Fetcher:
    """Finds no block."""

    def __init__(self) -> None:
        self._reports: list[Fetched] = []
        self.on_report: Callable[[], None] = lambda: None

    def begin_epoch(self, epoch: int) -> None:
        self._reports.clear()

    def fetch(self, epoch: int, hashes: list[int], *source: str) -> None:
        self._reports.append(Fetched(epoch, (), tuple(hashes)))
        self.on_report()

    def reports(self) -> list[Fetched]:
        reports, self._reports = self._reports, []
        return reports


# The kind of each of the worker's messages, and the message from the scheduler that it answers, if any.
_CALLS: dict[str, dict[str, Any]] = {
    "heartbeat": {},
    "step_result": {"step_batch": worker_pb2.StepBatch(epoch=1, step_id=1)},
    "lora_result": {"load_lora": worker_pb2.LoadLoraAdapter(epoch=1, name="a")},
    "image_encoded": {"encode_image": worker_pb2.EncodeImage(epoch=1, id=1)},
    "blocks_fetched": {"fetch_blocks": worker_pb2.FetchBlocks(epoch=1, hashes=[7])},
}


@pytest.mark.parametrize("kind", _CALLS)
def test_an_epoch_ends_with_the_first_message_that_cannot_be_sent(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the scheduler would wait for the message. The connection stays open, as when the socket's queue is
    full.
    """
    send, refused = zmq.Socket.send, list[str]()

    def send_or_refuse(dealer: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        if dealer.type == zmq.DEALER and not refused:
            sent = worker_pb2.WorkerMessage.FromString(frame).WhichOneof("message")
            if sent == kind:
                refused.append(kind)
                raise zmq.Again
        return send(dealer, frame, *args, **kwargs)

    monkeypatch.setattr(zmq.Socket, "send", send_or_refuse)
    scheduler = ScriptedScheduler()
    link = link_to(scheduler.address, worker_pb2.Register(), adapters=_Adapters(), images=_Images(), fetcher=_Fetcher())
    link.start()
    scheduler.register(epoch=1)
    assert isinstance(link.inbox.get(timeout=240), EpochStarted)
    if _CALLS[kind]:
        scheduler.send(**_CALLS[kind])
    if kind == "step_result":
        work = link.inbox.get(timeout=240)
        assert isinstance(work, WaitingStep)
        link.send_result(work.step, StepOutput(np.zeros(0, dtype=np.int32), (), (), 0.0), 0.0)
    scheduler.register(epoch=2)
    assert isinstance(link.inbox.get(timeout=240), EpochStarted)
    link.leave()
    assert isinstance(link.inbox.get(timeout=240), Stopped)
    link.join()
    scheduler.close()
    assert refused == [kind]
