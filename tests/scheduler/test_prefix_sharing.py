from __future__ import annotations

from dataclasses import replace

import pytest

from protos import generation_pb2, stats_pb2
from scheduler.core.effects import KvChanged
from scheduler.core.events import AbortRequested
from scheduler.core.prefix_cache import BlocksRemoved, BlocksStored, BlocksUpdated, CacheCleared, KvChange, PrefixCache
from scheduler.core.request import FinishReason
from scheduler.core.request_spec import RetentionRange
from scheduler.core.steps import kv_stats
from scheduler.wire.requests import spec_from_proto
from scheduler.wire.stats import kv_event_proto
from tests.scheduler.harness import LIMITS, Harness

PREFIX = list(range(100, 116))  # 4 blocks


def changes(harness: Harness) -> list[KvChange]:
    return [change for effect in harness.effects if isinstance(effect, KvChanged) for change in effect.changes]


def test_requests_that_arrive_together_compute_their_prefix_once() -> None:
    harness = Harness(tokens_per_block=16, max_num_tokens=2048)
    group = harness.add_group(num_blocks=1024)
    prefix = [(7 * index) % 900 for index in range(512)]
    for number in range(64):
        harness.submit(f"r{number}", [*prefix, number, *range(31)], 4)
    harness.run()
    harness.check_is_empty()
    assert group.model.num_context_tokens == 512 + 64 * 32


def test_a_prefix_longer_than_a_step_is_computed_once_too() -> None:
    harness = Harness(max_num_tokens=6)
    group = harness.add_group()
    for request_id in "abc":
        harness.submit(request_id, [*PREFIX, ord(request_id)], 2)
    harness.run()
    harness.check_is_empty()
    assert group.model.num_context_tokens == 16 + 3


def test_the_last_prompt_token_is_always_computed() -> None:
    harness = Harness()
    group = harness.add_group()
    harness.submit("a", PREFIX, 1)
    harness.run()
    harness.submit("b", PREFIX, 1)
    harness.run()
    assert group.model.num_context_tokens == 16 + 4
    assert harness.core.lifecycle.requests["b"].counters.num_cached_tokens == 12


def test_a_waiting_sequence_takes_over_if_the_writer_is_aborted() -> None:
    harness = Harness(max_num_tokens=8, pipeline_depth=1)
    group = harness.add_group()
    harness.submit("a", [*PREFIX, 1], 2)
    harness.submit("b", [*PREFIX, 2], 2)
    assert harness.turn() == ["+a[0:8]"]
    harness.handle(AbortRequested(harness.now_ns, "a"))
    harness.run()
    harness.check_is_empty()
    assert harness.plans[1] == "+b[8:16]"
    assert group.model.num_context_tokens == 8 + 9


def test_generated_tokens_are_found_by_a_continued_conversation() -> None:
    harness = Harness()
    group = harness.add_group()
    harness.submit("a", [1, 2, 3], 10)
    harness.run()
    answer = harness.tokens["a", 0]
    harness.submit("b", [1, 2, 3, *answer, 50], 1)
    harness.run()
    # 12 of the 13 tokens are in full blocks that have been computed.
    assert harness.core.lifecycle.requests["b"].counters.num_cached_tokens == 12
    assert group.model.num_context_tokens == 3 + 2


def test_tenants_and_adapters_do_not_share() -> None:
    harness = Harness()
    harness.add_group()
    for number, extra in enumerate(({}, {"cache_salt": "x"}, {"lora_name": "x"}, {"cache_salt": "y"})):
        harness.submit(f"r{number}", PREFIX, 1, **extra)
        harness.run()
    harness.submit("again", PREFIX, 1, cache_salt="x")
    harness.run()
    cached = [request.counters.num_cached_tokens for request in harness.core.lifecycle.requests.values()]
    assert cached == [0, 0, 0, 0, 12]


def test_nothing_is_shared_without_reuse_or_by_requests_that_forbid_it() -> None:
    harness = Harness(enable_block_reuse=False)
    harness.add_group()
    harness.submit("a", PREFIX, 1)
    harness.submit("b", PREFIX, 1)
    harness.run()
    assert harness.core.lifecycle.requests["b"].counters.num_cached_tokens == 0
    harness = Harness()
    harness.add_group()
    harness.submit("a", PREFIX, 1)
    harness.submit("b", PREFIX, 1, is_cacheable=False)
    harness.run()
    assert harness.core.lifecycle.requests["b"].counters.num_cached_tokens == 0


def test_kv_events_tell_what_is_stored_and_removed() -> None:
    harness = Harness(pipeline_depth=1)
    harness.add_group(num_blocks=4)
    harness.submit("a", list(range(1, 10)), 1)  # 2 full blocks and one token
    harness.run()
    cleared, stored = changes(harness)
    assert cleared == CacheCleared()
    assert isinstance(stored, BlocksStored)
    assert (stored.parent_hash, list(stored.token_ids)) == (0, list(range(1, 9)))
    harness.submit("b", list(range(50, 63)), 1)  # uses all 4 blocks
    harness.run()
    removed = [change for change in changes(harness)[2:] if isinstance(change, BlocksRemoved)]
    # The end of the chain is evicted first.
    assert [change.block_hashes for change in removed] == [stored.block_hashes[1:], stored.block_hashes[:1]]


def test_a_group_may_have_larger_blocks_than_the_scheduler() -> None:
    harness = Harness(pipeline_depth=1)  # the scheduler's blocks have 4 tokens
    harness.add_group("large", num_blocks=8, tokens_per_block=16)
    prompt = [*range(40)]
    harness.submit("a", prompt, 30)
    harness.turn()
    for _ in range(4):
        harness.step("large")
    stored = [change for change in changes(harness) if isinstance(change, BlocksStored)]
    assert [(change.tokens_per_block, len(change.token_ids)) for change in stored] == [(16, 32)]
    stats = kv_stats(harness.core.groups)
    assert (stats.num_blocks, stats.num_used, stats.tokens_per_block) == (32, 12, 4)
    harness.submit("b", [*prompt, 50], 1)
    for _ in range(4):
        harness.step("large")
    assert harness.core.lifecycle.requests["b"].counters.num_cached_tokens == 32
    # The request continues on a group with other blocks, and reuses blocks of that size only.
    small = harness.add_group("small", num_blocks=32)
    harness.cut("large")
    harness.submit("c", prompt, 1)
    harness.run()
    harness.check_is_empty()
    assert small.model.num_context_tokens < 2 * 40
    assert len(harness.tokens["a", 0]) == 30


@pytest.mark.parametrize("num_before", [0, 1])
def test_retention_keeps_a_system_prompt(num_before: int) -> None:
    """Where ranges overlap, the last one applies."""
    harness = Harness(pipeline_depth=1)
    harness.add_group(num_blocks=6)
    keep = (RetentionRange(start=0, end=None, priority=10),) * num_before + (
        RetentionRange(start=0, end=8, priority=90),
    )
    harness.submit("system", [*range(8), 500], 1, retention=keep)
    harness.run()
    for number in range(5):
        harness.submit(f"other{number}", [600 + number * 20 + i for i in range(13)], 1)  # 4 blocks
        harness.run()
    harness.submit("again", [*range(8), 501], 1)
    harness.run()
    assert harness.core.lifecycle.requests["again"].counters.num_cached_tokens == 8


def test_stored_blocks_are_reported_with_their_priorities() -> None:
    harness = Harness()
    harness.add_group()
    harness.submit("plain", PREFIX, 1)
    harness.submit("kept", [*range(500, 513)], 1, retention=(RetentionRange(start=0, end=8, priority=90),))
    harness.run()
    stored = [item for item in changes(harness) if isinstance(item, BlocksStored)]
    assert [(item.token_ids[0], item.priorities) for item in stored] == [(PREFIX[0], ()), (500, (90, 90, 35))]
    assert list(kv_event_proto(1, "g", stored[1]).stored.priorities) == [90, 90, 35]


@pytest.mark.parametrize("length", [9, 8])  # with 8 tokens, the last block is recomputed into a new block
def test_a_request_raises_the_retention_of_cached_blocks(length: int) -> None:
    harness = Harness(pipeline_depth=1)
    harness.add_group(num_blocks=6)
    system = [*range(8), 500][:length]
    harness.submit("before", system, 1)
    harness.run()
    harness.submit("system", system, 1, retention=(RetentionRange(start=0, end=8, priority=90),))
    harness.run()
    raised = [change for change in changes(harness) if isinstance(change, BlocksUpdated)]
    stored = next(change for change in changes(harness) if isinstance(change, BlocksStored))
    assert raised == [BlocksUpdated((value,), priority=90) for value in stored.block_hashes[:2]]
    assert kv_event_proto(1, "g", raised[0]).updated == stats_pb2.KvBlocksUpdated(
        block_hashes=stored.block_hashes[:1], priority=90
    )
    for number in range(5):
        harness.submit(f"other{number}", [600 + number * 20 + i for i in range(13)], 1)  # 4 blocks
        harness.run()
    harness.submit("again", [*range(8), 501], 1)
    harness.run()
    assert harness.core.lifecycle.requests["again"].counters.num_cached_tokens == 8


def test_requests_go_where_their_prefix_is_until_that_group_has_more_to_do() -> None:
    harness = Harness(tokens_per_block=16)
    harness.add_group("g")
    harness.add_group("h")
    prefix = list(range(64))
    harness.submit("a", [*prefix, 1], 40)
    harness.turn()
    assert len(harness.group("g").active) == 1
    for number in range(8):
        harness.submit(f"r{number}", [*prefix, 2, number], 40)
        harness.turn()
    # Each request adds a load of 16 tokens: after four more requests on `g`, `h` is an equally good choice.
    assert (len(harness.group("g").active), len(harness.group("h").active)) == (5, 4)
    harness.run()
    harness.check_is_empty()


def test_a_groups_cache_ends_with_its_epoch() -> None:
    harness = Harness()
    harness.add_group()
    harness.submit("a", PREFIX, 1)
    harness.run()
    harness.leave("g")
    harness.add_group()
    harness.submit("b", PREFIX, 1)
    harness.run()
    assert harness.core.lifecycle.requests["b"].counters.num_cached_tokens == 0


@pytest.mark.parametrize("chunk", [0, 4])
def test_sequences_that_share_blocks_of_a_failed_row_restart(chunk: int) -> None:
    """The fake model does not write the blocks of the failed row, and checks the contents of each block that is
    read.
    """
    harness = Harness(max_context_chunk=chunk, pipeline_depth=2)
    harness.add_group(fail_token=77)
    harness.submit("bad", [*PREFIX, 77], 4)
    harness.submit("good", [*PREFIX, 78], 4)
    harness.run()
    harness.check_is_empty()
    assert harness.ended == {"bad": FinishReason.ERROR, "good": FinishReason.LENGTH}


def test_a_worker_does_not_keep_blocks_of_a_row_that_failed() -> None:
    harness = Harness(pipeline_depth=1)
    group = harness.add_group(fail_token=77)
    harness.submit("bad", [*PREFIX, 77], 4)
    harness.turn()
    harness.step()
    assert len(group.begin_anew().kept_blocks) == 0
    assert not group.hashes.any()


def test_blocks_of_a_row_that_failed_are_not_found() -> None:
    harness = Harness()
    harness.add_group(fail_token=77)
    harness.submit("bad", [*PREFIX, 77], 4)
    harness.run()
    harness.submit("good", [*PREFIX, 78], 4)
    harness.run()
    harness.check_is_empty()
    assert harness.core.lifecycle.requests["good"].counters.num_cached_tokens == 0


def test_retention_is_read_from_a_request_and_has_defaults() -> None:
    request = generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(values=[5, 6, 7]),
        kv_retention=generation_pb2.KvRetentionConfig(
            token_ranges=[generation_pb2.KvRetentionConfig.TokenRange(start=1, end=3, priority=90, duration_ms=2)],
            decode_priority=0,
            decode_duration_ms=4,
        ),
    )
    spec = spec_from_proto(request, LIMITS, 0)
    assert spec.retention == (RetentionRange(1, 3, 90, 2_000_000),)
    assert (spec.decode_priority, spec.decode_duration_ns) == (0, 4_000_000)
    request.ClearField("kv_retention")
    spec = spec_from_proto(request, LIMITS, 0)
    assert (spec.retention, spec.decode_priority, spec.decode_duration_ns) == ((), 35, None)


@pytest.mark.parametrize("is_later", [False, True])
def test_blocks_of_a_row_that_fails_after_its_request_was_aborted_are_not_reused(is_later: bool) -> None:
    harness = Harness()
    harness.add_group(fail_token=77)
    prefix = list(range(7, 23))
    harness.submit("bad", [*prefix, 77], 4)
    if not is_later:
        harness.submit("good", [*prefix, 78], 4)
    harness.turn()
    harness.handle(AbortRequested(harness.now_ns, "bad"))  # the step of `bad` is in flight, and fails
    harness.run()
    if is_later:
        harness.submit("good", [*prefix, 78], 4)
        harness.run()
    assert harness.tokens["good", 0] == [79, 80, 81, 82]
    harness.check_is_empty()


def test_extra_outputs_of_a_token_that_is_computed_again_are_kept_once() -> None:
    """A resumed sequence shares blocks whose computation fails in another row of the same step, so the sequence's token
    is ignored.
    """
    prefix = list(range(7, 23))
    harness = Harness(pipeline_depth=1)
    harness.add_group(fail_token=77)
    harness.submit("good", [*prefix, 78], 6)
    harness.turn()
    harness.step()
    harness.step()
    harness.cut("g")
    harness.submit("bad", [*prefix, 77], 4, priority=1)
    harness.add_group(fail_token=77)
    assert harness.turn() == ["+bad[0:17] +good[16:19]"]
    sequence = harness.core.lifecycle.requests["good"].sequences[0]
    while "good" not in harness.ended:
        (step,) = harness.group().in_flight
        result = harness.groups["g"].run(harness.now_ns)
        failed = {row for row, _ in result.failures}
        rows = [chunk.row for chunk in step.context if chunk.is_last] + list(step.generation_rows)
        harness.handle(replace(result, outputs=tuple((row, b"a") for row in rows if row not in failed)))
        harness.turn()
    assert [output.token_offset for output in sequence.outputs] == [2, 3, 4, 5]


@pytest.mark.parametrize("num_own", [4, 6])
def test_a_request_that_used_blocks_of_a_failed_row_restarts_after_they_have_left_a_window(num_own: int) -> None:
    """The second step releases the first blocks of `bad` and, if `good` has 16 prompt tokens, also those of `good`."""
    harness = Harness(attention_windows=(6,))
    harness.add_group(fail_token=77)
    shared, end = list(range(7, 17)), 10 + num_own
    harness.submit("bad", [*shared, 100, 77, *range(101, 109)], 9)
    harness.submit("good", [*shared, *range(200, 200 + num_own)], 4)
    assert harness.turn() == [f"+bad[0:20] +good[8:{end}]", "bad good"]
    harness.run()
    assert harness.tokens["good", 0] == list(range(200 + num_own, 204 + num_own))
    harness.check_is_empty()


def test_turns_do_not_look_up_prefixes_of_waiting_requests_again(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(max_batch_size=8)
    harness.add_group(num_blocks=20)
    harness.submit("a", PREFIX, 56)
    harness.turn()
    for request_id in "bcd":
        harness.submit(request_id, [*PREFIX, ord(request_id)], 40, client_id=request_id)
    harness.step()
    lengths: list[int] = []
    find = PrefixCache.find

    def count(cache: PrefixCache, hashes: list[int]) -> list[int]:
        lengths.append(len(hashes))
        return find(cache, hashes)

    monkeypatch.setattr(PrefixCache, "find", count)
    for _ in range(10):
        harness.step()
    assert len(harness.core.queue) == 3
    assert lengths == []
    monkeypatch.undo()
    harness.run()
    harness.check_is_empty()
    assert harness.core.lifecycle.requests["d"].counters.num_cached_tokens == 16
