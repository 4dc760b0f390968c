"""Schedules computed by hand, step by step.

`+a[0:8] | b c` is a step with a context chunk of `a`, whose row is new, and a generation step of `b` and `c`. Blocks
have 4 tokens, and two steps are in flight unless a test says otherwise.
"""

from __future__ import annotations

import pytest

from scheduler.core.request import FinishReason
from tests.scheduler.harness import Harness


def schedule(harness: Harness) -> list[str]:
    harness.run()
    harness.check_is_empty()
    return harness.plans


def test_fused_steps_hold_generation_and_as_much_context_as_the_budget_leaves() -> None:
    harness = Harness()
    harness.add_group(max_num_tokens=8)
    harness.submit("a", 10, 3)
    harness.submit("b", 3, 4)
    assert harness.turn() == ["+a[0:5] +b[0:3]", "a[5:10] | b"]  # `b` is shorter, and takes less than half a step
    assert harness.step() == ["a b"]
    harness.submit("c", 9, 1)
    assert harness.step() == ["+c[0:6] | a b"]
    assert schedule(harness)[4:] == ["c[6:9]"]


def test_two_stages_compute_two_micro_batches_at_the_same_time() -> None:
    """One additional step is in flight, and no sequence is in two consecutive steps, except immediately after its
    prompt.
    """
    harness = Harness()
    harness.add_group(num_micro_batches=2)
    for name in "abcd":
        harness.submit(name, 3, 5)
    # The first step contains only prompts, so one half of the sequences generates in the next step, and the other half
    # in the one after it.
    assert harness.turn() == ["+a[0:3] +b[0:3] +c[0:3] +d[0:3]", "a b", "c d"]
    assert harness.step() == ["a b"]
    assert harness.step() == ["c d"]
    harness.submit("e", 2, 3)
    # Of five sequences, three run in one step, and two in the other.
    assert harness.step() == ["+e[0:2] | a b"]
    assert harness.step() == ["c d"]
    assert harness.step() == ["a b e"]
    assert harness.step() == ["c d"]
    assert schedule(harness)[9:] == ["e"]
    assert harness.core.totals.num_wasted_tokens == 0


def test_the_chunks_of_a_prompt_follow_each_other_through_three_stages() -> None:
    harness = Harness(max_num_tokens=4)
    harness.add_group(num_micro_batches=3)
    harness.submit("a", 14, 3)
    assert harness.turn() == ["+a[0:4]", "a[4:8]", "a[8:12]", "a[12:14]"]
    harness.submit("b", 3, 3)
    assert harness.step() == ["+b[0:3]"]
    # If there is nothing else to run, the step for the next token waits for the step that it depends on.
    assert schedule(harness)[5:] == ["a", "b", "a", "b"]


def test_two_micro_batches_follow_a_worker_that_dies_with_their_steps() -> None:
    harness = Harness()
    harness.add_group(num_micro_batches=2)
    for name in "ab":
        harness.submit(name, 3, 9)
    harness.turn()
    harness.step()
    harness.step()
    assert len(harness.group().in_flight) == 3
    harness.cut("g")
    harness.add_group(num_micro_batches=2)
    harness.run()
    # The harness has checked each token.
    assert [len(harness.tokens[name, 0]) for name in "ab"] == [9, 9]
    harness.check_is_empty()


def test_nothing_is_scheduled_beyond_a_known_length() -> None:
    harness = Harness()
    harness.add_group()
    harness.submit("a", 3, 3)
    assert schedule(harness) == ["+a[0:3]", "a", "a"]
    assert harness.core.totals.num_wasted_tokens == 0


def test_a_stop_token_wastes_the_step_that_was_in_flight() -> None:
    harness = Harness()
    harness.add_group()
    harness.submit("a", [5], 9, stop_token_ids=frozenset({7}))
    assert schedule(harness) == ["+a[0:1]", "a", "a"]
    assert harness.tokens["a", 0] == [6, 7]
    assert harness.core.totals.num_wasted_tokens == 1


def test_a_chunk_limit_leaves_room_for_others() -> None:
    harness = Harness(max_context_chunk=4)
    harness.add_group(max_num_tokens=8)
    harness.submit("a", 6, 1)
    harness.submit("b", 6, 1)
    assert schedule(harness) == ["+a[0:4] +b[0:4]", "a[4:6] b[4:6]"]


def test_without_chunked_context_a_prompt_waits_for_a_step_that_holds_all_of_it() -> None:
    harness = Harness(enable_chunked_context=False, max_num_tokens=8)
    harness.add_group()
    harness.submit("a", 6, 2)
    harness.submit("b", 6, 1)
    assert schedule(harness) == ["+a[0:6]", "+b[0:6] | a"]


def test_without_chunked_context_a_prompt_longer_than_any_step_is_rejected() -> None:
    harness = Harness(enable_chunked_context=False, max_num_tokens=2048)
    harness.add_group(max_num_tokens=256, num_blocks=128)
    harness.submit("long", 300, 4)
    assert harness.ended == {"long": FinishReason.ERROR}
    failure = harness.core.lifecycle.requests["long"].failure
    assert failure is not None
    message = "a prompt must have at most 256 tokens, since it is computed in one step"
    assert (failure.field, failure.message) == ("token_ids", message)
    harness.submit("short", 256, 4)
    harness.run()
    assert harness.ended["short"] is FinishReason.LENGTH


@pytest.mark.parametrize("batching", ["inflight_fused", "inflight", "static"])
def test_without_chunked_context_a_preempted_long_sequence_is_computed_in_pieces(batching: str) -> None:
    """A worker dies when prompt and output together exceed the size of a step; later, a worker with larger steps dies
    too.
    """
    harness = Harness(enable_chunked_context=False, batching=batching)
    harness.add_group("g", max_num_tokens=8)
    harness.add_group("h", max_num_tokens=16)
    harness.submit("long", 12, 9)  # runs only on h
    harness.submit("grows", 6, 9)
    harness.turn()
    for _ in range(6):
        harness.step("h")
        if harness.groups["g"].plans:
            harness.step("g")
    harness.cut("h")
    harness.cut("g")
    harness.add_group("g", max_num_tokens=8)
    harness.run()
    assert harness.ended == {"long": FinishReason.LENGTH, "grows": FinishReason.LENGTH}
    harness.check_is_empty()


def test_without_chunked_context_a_prompt_as_long_as_a_step_takes_turns_with_generation() -> None:
    harness = Harness(enable_chunked_context=False, pipeline_depth=1)
    harness.add_group(max_num_tokens=8)
    harness.submit("a", 2, 7)
    assert harness.turn() == ["+a[0:2]"]
    harness.submit("b", 8, 2)
    harness.submit("c", 8, 1)
    assert harness.step() == ["a"]
    assert schedule(harness)[2:] == ["+b[0:8]", "a b", "+c[0:8]", "a", "a", "a", "a"]


def test_inflight_steps_alternate_between_context_and_generation() -> None:
    harness = Harness(batching="inflight", pipeline_depth=1)
    harness.add_group(max_num_tokens=4)
    harness.submit("a", 3, 5)
    assert harness.turn() == ["+a[0:3]"]
    harness.submit("b", 6, 2)
    assert harness.step() == ["a"]
    assert schedule(harness)[2:] == ["+b[0:4]", "a", "b[4:6]", "a b", "a"]


def test_static_batches_run_in_lockstep_one_after_the_other() -> None:
    harness = Harness(capacity="static_batch", batching="static", pipeline_depth=1)
    harness.add_group(max_num_tokens=4, max_batch_size=2)
    for request_id, num_prompt, max_tokens in (("a", 5, 2), ("b", 3, 4), ("c", 3, 2)):
        harness.submit(request_id, num_prompt, max_tokens)
    assert harness.turn() == ["+a[0:2] +b[0:2]"]  # half a step for the shorter context
    assert harness.step() == ["a[2:5] b[2:3]"]
    assert harness.step() == ["a b"]  # only after the whole context is computed
    assert harness.step() == ["b"]
    harness.finish_step()
    # `a` has ended, but its slot stays empty until the batch ends.
    assert harness.core.current_stats(0).step.empty_generation_slots == 1
    assert harness.turn() == ["b"]
    assert schedule(harness)[5:] == ["+c[0:3]", "c"]  # a new batch starts only when the previous one has finished


def test_guaranteed_no_evict_reserves_blocks_for_the_longest_output() -> None:
    harness = Harness(pipeline_depth=1)
    harness.add_group(num_blocks=4)
    harness.submit("a", 4, 5)  # 4 + 4 computed tokens, which take 2 blocks
    harness.submit("b", 4, 5)  # 2 blocks
    harness.submit("c", 4, 1)  # 1 block; it is free now, but reserved
    assert harness.turn() == ["+a[0:4] +b[0:4]"]
    assert harness.group().blocks.num_available == 2
    assert harness.group().tables.num_reserved_blocks == 2
    assert schedule(harness)[1:] == ["a b", "a b", "a b", "a b", "+c[0:4]"]
    assert harness.core.totals.num_preemptions == 0


def test_max_utilization_pauses_the_newest_and_resumes_it_with_its_tokens() -> None:
    harness = Harness(capacity="max_utilization", pipeline_depth=1)
    harness.add_group(num_blocks=4)
    harness.submit("a", 4, 9)  # 12 computed tokens: 3 blocks
    harness.submit("b", 4, 9)
    assert harness.turn() == ["+a[0:4] +b[0:4]"]
    for _ in range(4):
        assert harness.step() == ["a b"]
    # Both tables are full and no block is free: `b` releases its two blocks and waits for three.
    for _ in range(4):
        assert harness.step() == ["a"]
    assert harness.core.lifecycle.requests["b"].counters.num_preemptions == 1
    # The first block of `b` is still cached; 4 prompt tokens and 5 output tokens are known.
    assert harness.step() == ["+b[4:9]"]
    assert schedule(harness)[10:] == ["b", "b", "b"]


def test_max_utilization_starts_a_request_that_fits_exactly() -> None:
    harness = Harness(capacity="max_utilization")
    harness.add_group(num_blocks=2)
    harness.submit("a", 8, 1)
    assert schedule(harness) == ["+a[0:8]"]


def test_max_utilization_pauses_the_lower_priority_before_the_newer() -> None:
    harness = Harness(capacity="max_utilization", pipeline_depth=1)
    harness.add_group(num_blocks=4)
    harness.submit("a", 4, 9)
    harness.submit("b", 4, 9, priority=1)
    harness.run()
    assert harness.core.lifecycle.requests["a"].counters.num_preemptions == 1
    assert harness.core.lifecycle.requests["b"].counters.num_preemptions == 0


def test_max_utilization_pauses_the_client_that_holds_more_than_its_share_before_the_newer() -> None:
    harness = Harness(capacity="max_utilization", pipeline_depth=1)
    harness.add_group(num_blocks=6)
    harness.submit("a", 4, 9, client_id="heavy")
    harness.submit("b", 4, 9, client_id="heavy")
    assert harness.turn() == ["+a[0:4] +b[0:4]"]
    harness.submit("c", 4, 5, client_id="light")
    assert harness.step() == ["+c[0:4] | a b"]
    for _ in range(3):
        assert harness.step() == ["a b c"]
    # Each request holds two full blocks, and no block is free: the heavy client has 4 of 6.
    assert schedule(harness)[5:] == ["a c", "+b[4:9] | a", "a b", "a b", "b"]


def test_max_utilization_pauses_the_newest_of_clients_with_equal_shares() -> None:
    harness = Harness(capacity="max_utilization", pipeline_depth=1)
    harness.add_group(num_blocks=4)
    harness.submit("a", 4, 9, client_id="one")
    harness.submit("b", 4, 9, client_id="other")
    assert schedule(harness) == ["+a[0:4] +b[0:4]", *["a b"] * 4, *["a"] * 4, "+b[4:9]", *["b"] * 3]


def test_max_utilization_waits_for_the_blocks_of_a_request_whose_last_step_is_in_flight() -> None:
    harness = Harness(capacity="max_utilization")
    harness.add_group(num_blocks=4)
    harness.submit("a", 4, 9)
    harness.submit("b", 4, 5)  # 8 computed tokens: 2 blocks
    assert harness.turn() == ["+a[0:4] +b[0:4]", "a b"]
    for _ in range(3):
        assert harness.step() == ["a b"]
    assert harness.step() == []  # `a` needs a third block; all tokens of `b` are computed or in flight
    assert schedule(harness)[5:] == ["a", "a", "a", "a"]
    assert harness.core.totals.num_preemptions == 0


def test_static_batches_generate_after_a_pause_before_the_paused_request_starts_again() -> None:
    harness = Harness(capacity="max_utilization", batching="static")
    harness.add_group(num_blocks=12, max_batch_size=64)
    harness.submit("urgent", 4, 16, priority=1, client_id="u", num_sequences=2)
    for _ in range(4):
        harness.turn()
        harness.step()
    harness.submit("old", 16, 12, client_id="a", num_sequences=2)
    harness.submit("new", 12, 12, client_id="b")
    for _ in range(200):
        harness.turn()
        if not harness.groups["g"].plans:
            break
        harness.step()
    assert set(harness.ended) == {"urgent", "old", "new"}


@pytest.mark.parametrize("block_size", [4, 8])
def test_drafts_within_a_window_take_no_blocks_that_are_reserved_for_others(block_size: int) -> None:
    harness = Harness(attention_windows=(32,), tokens_per_block=block_size)
    blocks_each = 32 // block_size + 2
    harness.add_group(num_blocks=6 * blocks_each, max_batch_size=16)
    for number in range(3):
        harness.submit(f"a{number}", [1 + number * 30, 2, 3, 4, 5], 60, num_draft_tokens=16)
    harness.turn()
    for _ in range(4):
        harness.step()
        group = harness.group()
        assert group.blocks.num_available >= group.tables.num_blocks_to_reserve
    for number in range(8):
        num_tokens = group.tables.num_blocks_to_reserve * block_size // 2 - 2
        harness.submit(f"b{number}", [100 + number * 50 + i for i in range(num_tokens)], 2)
        harness.turn()
    harness.run()
    harness.check_is_empty()


def test_a_paused_request_recomputes_the_token_in_flight() -> None:
    harness = Harness(capacity="max_utilization")
    harness.add_group(num_blocks=4)
    harness.submit("a", 4, 9)
    harness.submit("b", 4, 9)
    harness.run()
    assert harness.core.totals.num_preemptions == 1
    assert harness.core.totals.num_wasted_tokens == 1
    assert harness.tokens["b", 0] == [harness.prompts["b"][-1] + 1 + i for i in range(9)]


def test_a_step_verifies_as_many_drafts_as_a_batch_has_rows() -> None:
    harness = Harness(pipeline_depth=1)
    harness.add_group(max_batch_size=80, max_num_tokens=400, num_blocks=400)
    for number in range(6):
        harness.submit(f"{number}", 4, 40, num_draft_tokens=16)
    harness.turn()
    harness.step()
    # 6 rows are in use. Four requests verify 16 drafts each, and the fifth verifies 10.
    assert harness.groups["g"].plans[-1].draft_limits == [16, 16, 16, 16, 10]
    harness.run()
    harness.check_is_empty()


def test_sequences_of_a_request_share_its_prompt_and_copy_its_last_block() -> None:
    harness = Harness()
    harness.add_group()
    harness.submit("a", 10, 3, num_sequences=3)
    assert harness.turn() == ["+a/0[0:10]", "+a/1[9:10] +a/2[9:10] | a/0"]
    # Two full blocks are shared, and each sequence has its own third block.
    assert harness.group().blocks.num_held == 2 + 3
    assert [list(plan.copy_source_blocks) for plan in harness.groups["g"].plans] == [[], [2, 2]]
    assert schedule(harness)[2:] == ["a/0 a/1 a/2", "a/1 a/2"]


def test_a_long_window_gives_back_the_blocks_behind_it() -> None:
    harness = Harness(attention_windows=(6, 6), pipeline_depth=1)
    harness.add_group(num_blocks=8)
    harness.submit("a", 4, 21)  # 24 tokens, 6 blocks
    harness.turn()
    most = 0
    while harness.groups["g"].plans:
        harness.step()
        most = max(most, harness.group().blocks.num_held)
    harness.check_is_empty()
    assert len(harness.tokens["a", 0]) == 21
    assert most == 3


@pytest.mark.parametrize("window", [4, 5, 6, 7, 8, 9])
def test_a_window_keeps_exactly_the_blocks_that_the_next_token_needs(window: int) -> None:
    harness = Harness(attention_windows=(window,), pipeline_depth=1)
    harness.add_group(num_blocks=8)
    harness.submit("a", 4, 21)
    harness.turn()
    (request,) = harness.group().active
    (sequence,) = request.sequences
    freed = []
    while harness.groups["g"].plans:
        first_attended = max(
            0, sequence.num_computed - window
        )  # the first position that the token at num_computed - 1, which the step computes, attends to
        assert sequence.num_freed * 4 <= first_attended
        if harness.groups["g"].plans[0].block_ids:
            assert sequence.num_freed == first_attended // 4
            freed.append(sequence.num_freed)
        harness.step()
    assert freed == [max(0, position - window + 1) // 4 for position in (4, 8, 12, 16, 20)]


def test_blocks_of_sink_tokens_stay_while_those_between_are_given_back() -> None:
    """The last of the 5 sink tokens is in the second block, so two blocks are kept."""
    harness = Harness(attention_windows=(6,), max_attention_window=6, sink_token_length=5, pipeline_depth=1)
    harness.add_group(num_blocks=8)
    harness.submit("a", 4, 25)  # 28 tokens, 7 blocks
    harness.turn()
    (request,) = harness.group().active
    (sequence,) = request.sequences
    held = []
    while harness.groups["g"].plans:
        if harness.groups["g"].plans[0].block_ids:
            held.append([sequence.table.index(block) for block in sequence.held_blocks])
        harness.step()
    # When block i is added, the next query is at position 4 * i and attends to positions 4 * i - 5 and later.
    assert held == [[0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 3, 4, 5], [0, 1, 4, 5, 6]]
    assert len(harness.tokens["a", 0]) == 25
    harness.check_is_empty()


def test_clients_share_a_step_and_do_not_wait_for_each_others_long_contexts() -> None:
    harness = Harness(max_num_tokens=8, pipeline_depth=1)
    harness.add_group()
    harness.submit("a", 14, 1, client_id="heavy")
    harness.submit("b", 6, 1, client_id="heavy")
    assert harness.turn() == ["+a[0:4] +b[0:4]"]  # `b` is shorter, and gets half a step
    harness.submit("x", 6, 1, client_id="light")
    # `x` needs less, so it is served first, and client `heavy` gets the rest of the step. While client `light` might
    # send another request, `heavy` gets at most half a step.
    steps = ["+a[0:4] +b[0:4]", "+x[0:6] a[4:5] b[4:5]", "a[5:8] b[5:6]", "a[8:12]", "a[12:14]"]
    assert schedule(harness) == steps


def test_short_contexts_do_not_wait_for_a_long_one_of_their_client() -> None:
    """The long one gets at least half of each step, and the shortest other one comes first. A context that is not
    shorter than those that run starts when they leave a part of a step free.
    """
    harness = Harness(max_num_tokens=8, pipeline_depth=1)
    harness.add_group()
    harness.submit("long", 20, 1)
    assert harness.turn() == ["+long[0:8]"]
    harness.submit("equal", 12, 1)
    harness.submit("c", 6, 1)
    harness.submit("d", 3, 1)
    steps = ["+long[0:8]", "long[8:13] +d[0:3]", "long[13:17] +c[0:4]", "long[17:20] +equal[0:3] c[4:6]"]
    assert schedule(harness)[:4] == steps


def test_generation_alternates_if_the_budget_is_below_the_batch() -> None:
    harness = Harness(batching="inflight", pipeline_depth=1)
    harness.add_group(max_num_tokens=2)
    for request_id in "abc":
        harness.submit(request_id, 1, 3)
    assert schedule(harness) == ["+a[0:1] +b[0:1]", "a b", "+c[0:1]", "a c", "b c"]


def test_steady_steps_ship_only_what_changed() -> None:
    harness = Harness(pipeline_depth=1)
    group = harness.add_group()
    harness.submit("a", 3, 9)
    harness.submit("b", 1, 9)
    harness.turn()
    harness.step()
    assert list(group.batches[0].generation_rows) == [0, 1]
    assert list(group.batches[0].block_rows) == []
    harness.step()
    steady = group.batches[0]
    assert steady.repeat_generation
    assert list(steady.generation_rows) == []
    assert list(steady.block_rows) == [0]  # row 0 starts its second block
    harness.step()
    assert list(group.batches[0].block_rows) == []
