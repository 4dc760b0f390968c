"""Routers report their clients' quota usage, and count the usage that other routers report."""

from __future__ import annotations

import pytest

from midstream.chunk import Chunk
from midstream.errors import OverloadedError
from midstream.telemetry import Metrics
from protos import status_pb2
from router.authentication import Caller, Quota
from router.pipeline.quotas import Quotas
from router.pipeline.usage_reports import UsageReports, UsageSeen


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def report_of(router_id: str, quotas: Quotas | UsageReports) -> status_pb2.RouterStatus:
    """Return the status that a router would send now."""
    usage = quotas.usage() if isinstance(quotas, Quotas) else quotas.own()
    return status_pb2.RouterStatus.FromString(
        status_pb2.RouterStatus(router_id=router_id, usage=usage).SerializeToString()
    )


def caller(**quota: int) -> Caller:
    return Caller("alice", is_authenticated=True, quota=Quota(**quota))


def test_each_use_is_seen_once_however_often_and_late_it_is_reported() -> None:
    clock = Clock()
    sender, receiver = UsageReports(clock), UsageReports(clock)
    sender.count("alice", num_requests=1, num_running=1)
    first = report_of("a", sender)
    assert list(receiver.learn([first])) == [("alice", UsageSeen(1000, 1, 0))]
    assert receiver.num_running_elsewhere("alice") == 1
    clock.now = 1015
    sender.count("alice", num_tokens=7, num_running=0)
    assert list(receiver.learn([])) == []  # the scheduler did not respond
    assert list(receiver.learn([report_of("a", sender)])) == [("alice", UsageSeen(1015, 0, 7))]
    assert list(receiver.learn([first])) == []  # the same report, through another scheduler
    assert list(receiver.learn([report_of("a", sender)])) == []
    assert list(receiver.seen("alice")) == [UsageSeen(1000, 1, 0), UsageSeen(1015, 0, 7)]


def test_a_report_contains_the_last_minute() -> None:
    clock = Clock()
    sender, receiver = UsageReports(clock), UsageReports(clock)
    for clock.now in (1000, 1030, 1061):
        sender.count("alice", num_tokens=1, num_running=0)
    assert list(receiver.learn([report_of("a", sender)])) == [("alice", UsageSeen(1061, 0, 2))]
    clock.now = 1200
    assert sender.own() == []
    assert list(receiver.learn([report_of("a", sender)])) == []
    assert list(receiver.seen("alice")) == []


def test_a_restarted_router_counts_from_zero() -> None:
    clock, receiver = Clock(), UsageReports(Clock())
    for _ in range(2):
        restarted = UsageReports(clock)
        restarted.count("alice", num_tokens=5, num_running=0)
        assert list(receiver.learn([report_of("a", restarted)])) == [("alice", UsageSeen(1000, 0, 5))]


def test_a_quota_holds_for_all_routers_together() -> None:
    clock = Clock()
    first, second = Quotas(Metrics(), clock), Quotas(Metrics(), clock)
    alice = caller(tokens_per_minute=60, max_concurrent=2)
    running = [first.admit(alice), first.admit(alice)]
    second.learn([report_of("first", first)])
    with pytest.raises(OverloadedError, match="max_concurrent"):
        second.admit(alice)
    running[0].charge_output("a", Chunk(0, 0, [1] * 60))
    running[0].release()
    second.learn([report_of("first", first)])
    with pytest.raises(OverloadedError, match="tokens_per_minute") as refused:
        second.admit(alice)
    assert refused.value.retry_after_ms == 1000
    clock.now += 1
    second.admit(alice).charge_output("b", Chunk(0, 0, [1]))


def test_a_client_that_is_new_at_a_router_has_what_it_left_at_others() -> None:
    clock = Clock()
    first, second = Quotas(Metrics(), clock), Quotas(Metrics(), clock)
    alice = caller(tokens_per_minute=60)
    first.admit(alice).charge_output("a", Chunk(0, 0, [1] * 90))
    second.learn([report_of("first", first)])
    clock.now += 10
    # 90 tokens were used, and 10 have been restored since.
    assert second.headers(alice)["x-ratelimit-reset-tokens"] == "80.000s"


def test_a_client_that_has_lost_its_quota_does_not_stay_running() -> None:
    clock = Clock()
    quotas = Quotas(Metrics(), clock)
    first = quotas.admit(caller(max_concurrent=2))
    quotas.admit(caller()).release()
    first.release()
    clock.now += 100
    assert quotas.usage() == []
