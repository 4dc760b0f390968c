"""Capacity is reserved for other clients, but not while a client is alone."""

from __future__ import annotations

import pytest

from scheduler.core.fairness import Clients, Pace
from scheduler.core.in_flight import ContextChunk, InFlightStep
from scheduler.core.timers import Clock
from tests.scheduler.harness import MS, Harness


def step_of(num_context_tokens: int, planned_ns: int) -> InFlightStep:
    step = InFlightStep(1, 1, planned_ns, [], (), (), 0, 0, 0, 0)
    step.context = [ContextChunk(0, None, num_context_tokens, False)]  # type: ignore[arg-type]
    return step


def two_clients(clock: Clock) -> Clients:
    clients = Clients(clock)
    clients.note("a")
    clients.note("b")
    return clients


def test_clients_are_several_for_a_minute_after_the_last_request_of_the_other() -> None:
    clock = Clock()
    clients = Clients(clock)
    clients.note("a")
    clients.note("a")
    assert not clients.are_several
    clock.now_ns = 1_000 * MS
    clients.note("b")
    assert clients.are_several
    clock.now_ns = 59_999 * MS
    clients.note("b")
    assert clients.are_several
    clock.now_ns = 60_000 * MS  # the last request of `a` was a minute ago
    assert not clients.are_several


def test_among_clients_a_step_is_planned_just_before_the_one_in_flight_ends() -> None:
    clock = Clock()
    pace, alone = Pace(two_clients(clock)), Pace(Clients(clock))
    # A step takes 10 ms plus 1 ms per context token; steps run one after another.
    at_ns = 0
    for number in range(8):
        assert pace.next_plan_ns(step_of(0, at_ns)) == 0  # too few results for an estimate yet
        at_ns += (10 + number) * MS
        for each in (pace, alone):
            each.note_result(step_of(number, 0), at_ns)
    expected_end_ns = at_ns + 30 * MS
    assert abs(pace.next_plan_ns(step_of(20, 0)) - (expected_end_ns - 2 * MS)) < 1_000
    assert abs(pace.next_plan_ns(step_of(20, at_ns + 5 * MS)) - (expected_end_ns + 3 * MS)) < 1_000
    assert alone.next_plan_ns(step_of(20, 0)) == 0


def test_a_row_is_reserved_for_a_client_below_its_share() -> None:
    for capacity in ("guaranteed_no_evict", "max_utilization"):
        harness = Harness(capacity=capacity, pipeline_depth=1)
        harness.add_group(max_batch_size=4)
        harness.submit("x", 2, 1, client_id="light")
        assert harness.turn() == ["+x[0:2]"]
        for name in "abcd":
            harness.submit(name, 2, 9, client_id="heavy")
        assert harness.step() == ["+a[0:2] +b[0:2] +c[0:2]"]
        harness.submit("y", 2, 1, client_id="light")
        assert harness.step() == ["+y[0:2] | a b c"]
        harness.run()
        harness.check_is_empty()


def test_a_single_client_gets_all_rows() -> None:
    harness = Harness(pipeline_depth=1)
    harness.add_group(max_batch_size=4)
    for name in "abcd":
        harness.submit(name, 2, 2, client_id="heavy")
    assert harness.turn() == ["+a[0:2] +b[0:2] +c[0:2] +d[0:2]"]


def test_a_request_that_needs_all_blocks_starts_when_they_are_free() -> None:
    harness = Harness(pipeline_depth=1)
    harness.add_group(num_blocks=16)
    harness.submit("x", 2, 3, client_id="light")
    harness.turn()
    harness.submit("large", 60, 5, client_id="heavy")  # needs all 16 blocks
    harness.run()
    harness.check_is_empty()
    assert len(harness.tokens["large", 0]) == 5


def test_the_balance_of_a_client_survives_an_empty_queue() -> None:
    harness = Harness(pipeline_depth=1)
    harness.add_group(max_batch_size=1)
    harness.submit("first", 2, 100, client_id="heavy")
    harness.turn()  # the queue is empty
    harness.submit("second", 2, 100, client_id="heavy")
    harness.submit("x", 2, 2, client_id="light")
    harness.run()
    assert list(harness.ended) == ["first", "x", "second"]


@pytest.mark.parametrize(("num_blocks", "max_batch_size", "num_sequences"), [(64, 16, 2), (640, 4, 3)])
def test_a_client_that_has_its_share_does_not_block_others(
    num_blocks: int, max_batch_size: int, num_sequences: int
) -> None:
    harness = Harness(pipeline_depth=1)
    harness.add_group(num_blocks=num_blocks, max_batch_size=max_batch_size)
    harness.submit("one", 4, 100, client_id="heavy", num_sequences=num_sequences)  # uses most blocks or rows
    harness.turn()
    # These use more tokens than the heavy client's request, so that its next request is first in the queue.
    for number in range(30):
        harness.submit(f"paid{number}", 28, 1, client_id="light")
    for _ in range(60):
        harness.step()
    harness.submit("two", 4, 100, client_id="heavy", num_sequences=num_sequences)
    small = [f"x{number}" for number in range(15)]  # 480 tokens, which is more than the size of the waiting request
    for name in small:
        harness.submit(name, 28, 1, client_id="light")
    harness.turn()
    for _ in range(36):
        harness.step()
    assert {*small} <= {*harness.ended}
    assert "one" not in harness.ended
    harness.run()
    harness.check_is_empty()


def test_small_requests_overtake_a_waiting_large_one_up_to_its_size() -> None:
    harness = Harness(pipeline_depth=1)
    harness.add_group(num_blocks=32, max_batch_size=16)  # 128 tokens
    for number in range(60):
        harness.submit(f"s{number:02}", 4, 12, client_id="small")  # 4 blocks each
    harness.turn()
    harness.submit("large", 4, 80, client_id="large")  # needs 21 blocks, so blocks must become free
    order = []
    for _ in range(2_000):
        if not harness.groups["g"].plans:
            break
        harness.step()
        order += [name for name in harness.ended if name not in order]
    assert len(order) == 61
    # The large request does not wait until all the small ones are done.
    assert order.index("large") < 40


def steps_until_first_token(harness: Harness, request_id: str, at_most: int) -> int:
    for count in range(1, at_most + 1):
        harness.step()
        if harness.tokens.get((request_id, 0)):
            return count
    raise AssertionError(f"{request_id} has no token after {at_most} steps")


@pytest.mark.parametrize("other", ["other", "hoarder"])
@pytest.mark.parametrize(
    ("capacity", "reuse", "num_tokens"),
    [("guaranteed_no_evict", True, 8_000), ("max_utilization", False, 8_000), ("guaranteed_no_evict", True, 14_000)],
)
def test_two_large_requests_do_not_block_new_ones(capacity: str, reuse: bool, num_tokens: int, other: str) -> None:
    """Neither another client's nor those of the same client, since many users may share a client id, or have none."""
    harness = Harness(
        capacity=capacity,
        max_sequence_length=20_000,
        max_num_tokens=2_048,
        tokens_per_block=16,
        enable_block_reuse=reuse,
    )
    harness.add_group(num_blocks=7_000, max_batch_size=16, max_num_tokens=2_048, max_sequence_length=20_000)
    for name in ("one", "two"):  # each needs nearly all blocks of the pool
        num_sequences = 7_000 * 16 // num_tokens
        harness.submit(name, 16, num_tokens - 16, client_id="hoarder", num_sequences=num_sequences)
    harness.turn()
    for _ in range(10):
        harness.step()
    for number in range(3):
        harness.submit(f"small{number}", 20, 20, client_id=other)
        for _ in range(25):
            harness.step()
        assert f"small{number}" in harness.ended
    assert not {"one", "two"} & set(harness.ended)


@pytest.mark.parametrize("client_id", ["light", "heavy"])
def test_a_prompt_does_not_wait_for_the_long_prompts_of_others(client_id: str) -> None:
    """Neither those of another client nor those of the same one."""
    harness = Harness(pipeline_depth=1, max_num_tokens=16)
    harness.add_group(num_blocks=256, max_num_tokens=16)
    for name in "abc":
        harness.submit(name, 160, 1, client_id="heavy")
    harness.turn()
    harness.submit("x", 8, 2, client_id=client_id)
    assert steps_until_first_token(harness, "x", 10)
    assert not harness.ended


def test_a_large_request_starts_in_parts_and_leaves_room() -> None:
    harness = Harness(pipeline_depth=1)
    harness.add_group(num_blocks=16, max_batch_size=16)
    harness.submit("n", 4, 13, num_sequences=4)  # 4 blocks for each sequence; one block is reserved for other clients
    assert harness.turn() == ["+n/0[0:4]"]
    assert harness.step() == ["+n/1[3:4] +n/2[3:4] | n/0"]
    assert [request.request_id for request in harness.core.queue] == ["n"]
    harness.submit("x", 2, 2, client_id="other")
    assert harness.step() == ["+x[0:2] | n/0 n/1 n/2"]
    harness.run()
    harness.check_is_empty()
    assert [len(harness.tokens["n", index]) for index in range(4)] == [13] * 4


def test_later_sequences_share_a_running_prompt_even_without_reuse() -> None:
    harness = Harness(pipeline_depth=1, capacity="max_utilization", enable_block_reuse=False)
    harness.add_group(num_blocks=32, max_batch_size=3)
    harness.submit("x", 2, 2, client_id="other")
    harness.turn()
    harness.submit("n", 41, 3, num_sequences=2)  # 10 blocks for the prompt, plus 1 for each sequence
    assert harness.step() == ["+n/0[0:41] | x"]
    assert harness.step() == ["+n/1[40:41] | n/0"]
    assert harness.group().blocks.num_held == 12
    harness.run()
    harness.check_is_empty()


def test_a_part_that_starts_after_all_others_have_ended_computes_the_prompt_again() -> None:
    harness = Harness(pipeline_depth=1, enable_block_reuse=False)
    harness.add_group(max_batch_size=2)
    harness.submit("x", 2, 9, client_id="other")
    harness.turn()
    harness.submit("n", 4, 2, num_sequences=2)
    assert harness.step() == ["+n/0[0:4] | x"]
    assert harness.step() == ["x n/0"]
    harness.run()
    harness.check_is_empty()
    assert [len(harness.tokens["n", index]) for index in range(2)] == [2, 2]
