from __future__ import annotations

import dataclasses
from unittest.mock import Mock

from midstream.clock import SteadyClock
from protos import status_pb2
from scheduler.core.block_manager import BlockManager
from scheduler.core.events import AbortRequested, Attached, Detached
from scheduler.core.prefix_cache import PrefixCache
from scheduler.edge.feed import FeedHub
from scheduler.edge.metrics import SchedulerCollector
from scheduler.edge.status import CellStatusReport
from tests.scheduler.harness import MS, Harness


def report(harness: Harness, clock: list[float] | None = None) -> CellStatusReport:
    hub = FeedHub(7, lambda _: None, lambda _: None, SteadyClock())
    hub.connect("detokenizer-0", lambda: None)
    now = clock or [0.0]
    return CellStatusReport(harness.core, hub, "cell", lambda: now[0])


def ask(answers: CellStatusReport, harness: Harness, router: str = "", max_map_cells: int = 0) -> status_pb2.CellStatus:
    request = status_pb2.GetCellStatusRequest(max_map_cells=max_map_cells)
    request.router.router_id = router
    return answers.answer(request, harness.now_ns)


def test_occupancy_counts_each_block_by_its_holder() -> None:
    blocks = BlockManager(7, PrefixCache())
    first, second, third, fourth = blocks.allocate(4, 0)  # blocks 0 to 3
    blocks.share([first], 0)
    blocks.prefix_cache.publish(fourth, 11)
    blocks.release([fourth], 0)
    assert blocks.occupancy(1) == ([0, 1, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 0, 0, 0])
    assert blocks.occupancy(3) == ([2, 0, 0], [1, 0, 0], [0, 1, 0])
    assert (blocks.num_held, blocks.num_cached) == (3, 1)
    blocks.release([third, second, first, first], 0)
    assert blocks.occupancy(4) == ([0, 0], [0, 0], [1, 0])


def test_each_request_is_counted_once_where_it_is() -> None:
    harness = Harness(max_num_tokens=8, enable_chunked_context=True)
    harness.add_group(max_batch_size=2)
    harness.submit("generating", [1, 2])
    harness.turn()
    harness.finish_step()
    harness.submit("in context", list(range(40)))
    harness.submit("queued", [3])
    harness.turn()
    counts = ask(report(harness), harness).requests
    assert (counts.num_generation, counts.num_context, counts.num_queued, counts.num_paused) == (1, 1, 1, 0)
    harness.kill("g")
    harness.turn()
    counts = ask(report(harness), harness).requests
    assert (counts.num_generation, counts.num_context, counts.num_queued, counts.num_paused) == (0, 0, 1, 2)


def test_a_group_reports_its_state() -> None:
    harness = Harness(pipeline_depth=1)
    harness.add_group(num_blocks=10, max_batch_size=4, role="decode", tier_store="host", stored_hashes=(1, 2, 3))
    harness.submit("a", [1, 2, 3, 4, 5])
    harness.turn()
    harness.now_ns += 1500 * MS
    (group,) = ask(report(harness), harness, max_map_cells=4).groups
    assert (group.num_sequences, group.max_num_sequences, group.num_steps_in_flight) == (1, 4, 1)
    assert (group.silent_ms, group.stalled_ms, group.num_steps) == (1500, 1500, 0)
    assert (group.num_blocks, group.num_held_blocks, group.num_cached_blocks) == (10, 2, 0)
    assert (group.role, group.num_stored_blocks) == ("decode", 3)
    assert (group.block_map.blocks_per_cell, list(group.block_map.held)) == (3, [2, 0, 0, 0])
    harness.finish_step()
    (group,) = ask(report(harness), harness).groups
    assert (group.silent_ms, group.num_steps) == (0, 1)
    assert not group.HasField("block_map")


def test_routers_learn_of_each_other_while_they_report() -> None:
    harness, clock = Harness(), [0.0]
    answers = report(harness, clock)

    def known(router: str) -> list[str]:
        return [item.router_id for item in ask(answers, harness, router).routers]

    assert known("one") == ["one"]
    clock[0] = 3.0
    assert known("two") == ["one", "two"]
    clock[0] = 6.0
    assert known("two") == ["two"]
    assert known("x" * 129) == ["two"]
    for number in range(300):
        known(f"router-{number}")
    assert len(known("last")) == 256


def test_counters_are_reported() -> None:
    harness = Harness()
    harness.add_group()
    harness.submit("a", [1, 2, 3], max_tokens=4)
    harness.run()
    status = ask(report(harness), harness)
    assert dict(status.counts.num_finished_by_reason) == {"length": 1}
    assert (status.counts.num_prompt_tokens, status.counts.num_generated_tokens) == (3, 4)
    assert sum(status.time_to_first_token.counts) == 1
    assert len(status.time_to_first_token.counts) == len(status.time_to_first_token.bounds_ms) + 1
    assert [item.detokenizer_id for item in status.detokenizers] == ["detokenizer-0"]
    assert (status.cell, status.scheduler_epoch, status.is_draining) == ("cell", 7, False)


def test_a_group_in_backoff_reports_how_long_and_why() -> None:
    harness = Harness(pipeline_depth=1)
    harness.add_group()
    harness.submit("a", [1, 2])
    harness.turn()
    harness.handle(dataclasses.replace(harness.groups["g"].run(harness.now_ns), token_ids=[]))
    harness.add_group()
    status = ask(report(harness), harness)
    (group,) = status.groups
    assert (group.num_faults, group.held_off_ms, status.counts.num_worker_faults) == (1, 1000, 1)
    assert group.last_fault == "wrong result: 0 tokens, but 1 were requested"
    families = SchedulerCollector(harness.core, Mock(), Mock(), Mock()).collect()
    (held_off,) = [family for family in families if family.name.endswith("num_worker_groups_held_off")]
    assert held_off.samples[0].value == 1


def test_detached_requests_that_nobody_reads_are_reported() -> None:
    harness = Harness()
    harness.add_group(num_blocks=512)
    answers = report(harness)
    for request_id, client in (("a", "alice"), ("b", "alice"), ("c", "bob"), ("d", "")):
        harness.submit(request_id, 3, 100, client_id=client, is_detached=True)
    harness.submit("e", 3, 100, client_id="bob")

    def unread() -> dict[str, list[str]]:
        return {item.client: list(item.request_ids) for item in ask(answers, harness).detached}

    assert unread() == {"alice": ["a", "b"], "bob": ["c"]}
    harness.handle(Attached(harness.now_ns, "a"))
    harness.handle(Attached(harness.now_ns, "c"))
    assert unread() == {"alice": ["b"]}
    harness.handle(Detached(harness.now_ns, "a"))
    harness.handle(AbortRequested(harness.now_ns, "b"))
    assert unread() == {"alice": ["a"]}
    harness.handle(AbortRequested(harness.now_ns, "a"))
    assert unread() == {}
