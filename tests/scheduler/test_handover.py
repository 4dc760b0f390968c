"""Requests start on prefill groups and move to decode groups, together with their blocks if these can be fetched."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.core.effects import GroupRefused
from scheduler.core.events import BlocksFetched
from scheduler.core.request import FinishReason
from scheduler.core.standing import MAX_PAUSE_NS
from tests.scheduler.fake_group import FakeGroup
from tests.scheduler.harness import Harness

PROMPT = list(range(100, 122))  # 5 blocks of 4 tokens and a partial one


def apart(depth: int = 1, **prefill: Any) -> tuple[Harness, FakeGroup, FakeGroup]:
    harness = Harness(pipeline_depth=depth)
    first = harness.add_group("p", role="prefill", kv_source="at p", **prefill)
    return harness, first, harness.add_group("d", role="decode")


def test_a_prompt_is_computed_on_one_group_and_generates_on_the_other() -> None:
    harness, prefill, decode = apart()
    harness.submit("a", PROMPT, 6)
    assert harness.turn() == ["+a[0:22]"]
    harness.step("p")
    (fetch,) = decode.fetches
    assert len(fetch.hashes) == 5
    assert (fetch.kv_store, fetch.kv_source) == ("", "at p")
    # The request generates on the prefill group until its blocks have arrived.
    harness.step("p")
    assert harness.fetch("d") == [""]
    assert harness.step("d") == ["+a[20:24]"]
    harness.run()
    assert (prefill.model.num_context_tokens, decode.model.num_context_tokens, decode.num_adopted) == (22, 4, 5)
    assert harness.ended["a"] is FinishReason.LENGTH
    assert harness.core.totals.num_handovers == 1
    assert harness.core.lifecycle.requests["a"].counters.num_cached_tokens == 0, (
        "the block was computed for this request"
    )
    harness.check_is_empty()


@pytest.mark.parametrize("depth", [1, 2])
def test_blocks_are_fetched_as_chunks_of_the_prompt_complete_them(depth: int) -> None:
    harness, _, decode = apart(depth, max_num_tokens=6)
    harness.submit("a", PROMPT, 4)
    harness.turn()
    asked = []
    while harness.core.lifecycle.requests["a"].num_handovers == 0:
        harness.step("p")
        while decode.fetches:
            asked.append(len(decode.fetches[0].hashes))
            harness.fetch("d")
    assert asked == [1, 2, 1, 1]
    harness.run()
    assert decode.num_adopted == 5
    harness.check_is_empty()


def backlog(depth: int = 1) -> tuple[Harness, FakeGroup, FakeGroup]:
    """Submit "a", whose prompt fits in the first step, and "b", whose prompt takes three more."""
    harness, prefill, decode = apart(depth, max_num_tokens=24)
    harness.submit("a", PROMPT, 6)
    harness.submit("b", 72, 6)
    return harness, prefill, decode


def test_a_prefill_group_with_a_backlog_leaves_the_last_tokens_of_a_prompt_to_the_decode_group() -> None:
    harness, _, decode = backlog()
    assert harness.turn() == ["+a[0:20] +b[0:4]"]
    harness.step("p")
    harness.fetch("d")
    assert harness.core.lifecycle.requests["a"].num_handovers == 1
    assert not harness.core.lifecycle.requests["a"].sequences[0].output
    harness.run()
    # The first step of group "d" computes the last two prompt tokens of "a". "b" moves only with its first output
    # token, since no further prompt is waiting.
    assert decode.model.num_context_tokens <= 2 + 8
    assert set(harness.ended.values()) == {FinishReason.LENGTH}
    harness.check_is_empty()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_transfer_delays_the_last_tokens_of_a_prompt_by_one_step(depth: int) -> None:
    harness, _, decode = backlog(depth)
    plans = harness.turn()
    while len(plans) < 2 + depth:
        plans += harness.step("p")
    assert decode.fetches
    assert [plan for plan in plans if "a[" in plan] == ["+a[0:20] +b[0:4]", plans[-1]]
    assert plans[-1].startswith("a[20:22] b[")
    harness.run()
    harness.check_is_empty()


def test_a_group_without_room_is_left_no_tokens() -> None:
    harness = Harness(pipeline_depth=1)
    harness.add_group("p", role="prefill", kv_source="at p", max_num_tokens=24)
    harness.add_group("d", role="decode", max_batch_size=1)
    harness.submit("first", 9, 40)
    harness.turn()
    harness.step("p")
    harness.fetch("d")
    assert harness.core.totals.num_handovers == 1
    harness.submit("a", PROMPT, 6)
    harness.submit("b", 72, 6)
    harness.step("p")  # the step that was in flight when "first" moved
    assert harness.plans[-1] == "+a[0:22] +b[0:2]"
    harness.run()
    harness.check_is_empty()


def test_an_idle_prefill_group_keeps_a_request_until_another_prompt_arrives() -> None:
    harness, _, decode = apart()
    harness.submit("a", PROMPT, 40)
    harness.submit("b", PROMPT[::-1], 40)
    harness.turn()
    for _ in range(3):
        harness.step("p")
        while decode.fetches:
            harness.fetch("d")
    assert harness.core.totals.num_handovers == 1, "each group has one request"
    for _ in range(8):
        harness.step("p")
        while decode.fetches:
            harness.fetch("d")
    assert harness.core.totals.num_handovers == 1
    harness.submit("c", 22, 4)
    harness.turn()
    assert harness.core.totals.num_handovers == 2
    harness.run()
    # The blocks that were filled during the transfer have been fetched as well, so at most two blocks of each request
    # are computed twice.
    assert decode.model.num_context_tokens <= 3 * 8
    harness.check_is_empty()


def test_blocks_that_the_decode_group_holds_are_not_fetched() -> None:
    harness, _, decode = apart()
    harness.submit("a", PROMPT, 4)
    harness.run()
    harness.submit("b", [*PROMPT[:16], *range(300, 306)], 4)
    harness.turn()
    harness.step("p")
    assert len(decode.fetches[0].hashes) == 1
    harness.run()
    assert decode.model.num_context_tokens <= 2 * 8
    harness.check_is_empty()


def test_blocks_that_cannot_be_fetched_keep_a_request_where_it_is() -> None:
    harness, prefill, decode = apart()
    harness.submit("a", PROMPT, 8)
    harness.turn()
    harness.step("p")
    harness.fetch("d", 3)
    harness.run()
    assert (decode.model.num_context_tokens, prefill.model.num_context_tokens) == (0, 22)
    assert (harness.core.totals.num_handovers, harness.core.totals.num_failed_handovers) == (0, 1)
    harness.check_is_empty()


def test_a_request_stays_if_the_decode_worker_drops_its_first_blocks_for_its_last() -> None:
    """The decode worker would have to compute the whole prompt again."""
    harness, prefill, decode = apart(max_num_tokens=6)
    harness.submit("a", PROMPT, 8)
    harness.turn()
    while not decode.fetches:
        harness.step("p")
    first = decode.fetches[0].hashes[0]
    harness.fetch("d")
    while not decode.fetches:
        harness.step("p")
    second = decode.fetches.popleft().hashes
    harness.handle(BlocksFetched(harness.now_ns, decode.registration.connection, decode.epoch, second, (first,)))
    harness.run()
    assert (decode.model.num_context_tokens, prefill.model.num_context_tokens) == (0, 22)
    assert (harness.core.totals.num_handovers, harness.core.totals.num_failed_handovers) == (0, 1)
    harness.check_is_empty()


def test_a_fetch_that_never_ends_delays_no_request() -> None:
    harness, _, decode = apart()
    harness.submit("a", PROMPT, 8)
    harness.turn()
    for _ in range(8):
        harness.step("p")
    assert harness.ended["a"] is FinishReason.LENGTH
    assert decode.fetches
    harness.fetch("d")
    harness.check_is_empty()


@pytest.mark.parametrize("num_fetched", [0, 3, 5])
def test_when_the_prefill_worker_dies_the_decode_group_computes_what_it_has_not_fetched(num_fetched: int) -> None:
    harness, _, decode = apart()
    harness.submit("a", PROMPT, 8)
    harness.turn()
    harness.step("p")
    fetch = decode.fetch(harness.now_ns, harness.groups.values(), num_fetched)
    harness.cut("p")
    harness.handle(fetch)
    harness.run()
    assert harness.ended["a"] is FinishReason.LENGTH
    # Reports from before the restart are ignored.
    assert decode.model.num_context_tokens == 23
    harness.check_is_empty()


def test_fetched_blocks_serve_a_request_whose_prefill_worker_has_died() -> None:
    harness, _, decode = apart(max_num_tokens=12)
    harness.submit("a", PROMPT, 8)
    harness.turn()
    harness.step("p")
    harness.fetch("d")
    harness.cut("p")
    harness.run()
    assert (decode.num_adopted, decode.model.num_context_tokens) == (3, 10)
    harness.check_is_empty()


def test_when_the_decode_worker_dies_another_one_takes_over() -> None:
    harness, _, decode = apart()
    harness.submit("a", PROMPT, 12)
    harness.turn()
    harness.step("p")
    harness.fetch("d")
    harness.step("d")
    assert decode.batches
    harness.add_group("e", role="decode")
    harness.cut("d")
    harness.run()
    assert harness.ended["a"] is FinishReason.LENGTH
    assert harness.core.totals.num_handovers == 2
    assert harness.groups["e"].num_adopted >= 5
    harness.check_is_empty()


def test_a_decode_worker_that_dies_in_a_transfer_is_replaced_by_another() -> None:
    harness, _, decode = apart()
    other = harness.add_group("e", role="decode")
    harness.submit("a", PROMPT, 12)
    harness.turn()
    harness.step("p")
    chosen, heir = ("d", other) if decode.fetches else ("e", decode)
    harness.cut(chosen)
    harness.run()
    assert heir.num_adopted in (5, 6), "one more if the prefill group has filled it by then"
    harness.check_is_empty()


@pytest.mark.parametrize("name", ["p", "d"])
def test_a_group_on_trial_computes_a_request_even_if_the_other_has_its_blocks(name: str) -> None:
    harness, _, _ = apart()
    harness.submit("a", PROMPT, 12)
    harness.run()
    for _ in range(2):
        harness.cut(name)
        role, source = ("prefill", "at p") if name == "p" else ("decode", "")
        group = harness.add_group(name, role=role, kv_source=source)
    harness.wait_until(harness.now_ns + MAX_PAUSE_NS)
    assert harness.group(name).standing.is_on_trial
    harness.submit("b", PROMPT, 12)
    harness.run()
    assert group.model.num_context_tokens == len(PROMPT)
    assert not harness.group(name).standing.is_on_trial
    num_handovers = harness.core.totals.num_handovers
    harness.submit("c", [1, *PROMPT], 12)
    harness.run()
    assert harness.core.totals.num_handovers == num_handovers + 1
    harness.check_is_empty()


def test_without_a_decode_group_a_prefill_group_does_all() -> None:
    harness = Harness()
    harness.add_group("p", role="prefill", kv_source="at p")
    harness.submit("a", PROMPT, 4)
    harness.run()
    assert harness.ended["a"] is FinishReason.LENGTH
    harness.check_is_empty()


def test_without_a_prefill_group_a_decode_group_does_all() -> None:
    harness = Harness()
    harness.add_group("d", role="decode")
    harness.submit("a", PROMPT, 4)
    harness.run()
    assert harness.ended["a"] is FinishReason.LENGTH
    harness.check_is_empty()


def test_a_request_waits_on_the_prefill_group_for_a_full_decode_group() -> None:
    harness = Harness(pipeline_depth=1)
    harness.add_group("p", role="prefill", kv_source="at p")
    harness.add_group("d", role="decode", max_batch_size=1)
    harness.submit("a", PROMPT, 30)
    harness.submit("b", 9, 4)
    harness.turn()
    harness.step("p")
    harness.fetch("d")
    while harness.groups["d"].fetches:
        harness.fetch("d")
    harness.run()
    assert harness.core.totals.num_handovers in (1, 2)
    assert set(harness.ended.values()) == {FinishReason.LENGTH}
    harness.check_is_empty()


@pytest.mark.parametrize("spec", [{"num_sequences": 3}, {"beam_width": 3, "num_sequences": 2}])
def test_requests_with_several_sequences_move_as_a_whole(spec: dict[str, Any]) -> None:
    harness, _, decode = apart(depth=2)
    harness.submit("a", PROMPT, 8, **spec)
    harness.run()
    assert harness.core.totals.num_handovers == 1
    assert decode.num_adopted == 5
    harness.check_is_empty()


def test_a_request_that_must_not_be_cached_is_not_moved() -> None:
    harness, prefill, decode = apart()
    harness.submit("a", PROMPT, 8, is_cacheable=False)
    harness.run()
    assert (prefill.model.num_context_tokens, decode.model.num_context_tokens) == (22, 0)
    harness.check_is_empty()


def test_late_and_invalid_reports_change_nothing() -> None:
    harness, _, decode = apart()
    connection = decode.registration.connection
    harness.handle(BlocksFetched(harness.now_ns, connection, decode.epoch, (1, 2), (3,)))
    harness.handle(BlocksFetched(harness.now_ns, connection, decode.epoch - 1, (7,)))
    assert harness.group("d").fetched == {1, 2}
    harness.handle(BlocksFetched(harness.now_ns, connection, decode.epoch, (), (1, 2)))
    assert not harness.group("d").fetched
    harness.submit("a", PROMPT, 4)
    harness.run()
    harness.check_is_empty()


@pytest.mark.parametrize(("kinds", "is_moved"), [(("x", "x"), True), (("x", "y"), False), (("", "y"), False)])
def test_blocks_are_fetched_only_between_groups_of_equal_kinds(kinds: tuple[str, str], *, is_moved: bool) -> None:
    harness = Harness()
    harness.add_group("p", role="prefill", kv_source="at p", block_kind=kinds[0])
    decode = harness.add_group("d", role="decode", block_kind=kinds[1])
    harness.submit("a", PROMPT, 6)
    harness.turn()
    harness.step("p")
    assert bool(decode.fetches) == is_moved
    harness.run()
    totals = harness.core.totals
    assert (totals.num_handovers, totals.num_failed_handovers) == (int(is_moved), 0)
    harness.check_is_empty()


def test_a_decode_group_runs_whole_requests_if_no_prefill_group_has_its_kind_of_blocks() -> None:
    """This happens during an upgrade; otherwise, the capacity of the decode group would be unused."""
    harness = Harness()
    harness.add_group("p", role="prefill", kv_source="at p", block_kind="new")
    harness.add_group("d", role="decode", block_kind="old")
    harness.submit("a", PROMPT, 6)
    harness.submit("b", PROMPT[::-1], 6)
    harness.turn()
    assert sorted(len(group.active) for group in harness.core.groups) == [1, 1]
    harness.run()
    harness.check_is_empty()


def test_an_unknown_role_is_refused() -> None:
    harness = Harness()
    harness.add_group("p", role="prefil")
    (refused,) = (effect for effect in harness.effects if isinstance(effect, GroupRefused))
    assert refused.field == "role"
