from __future__ import annotations

import re
from array import array

import pytest

from scheduler.core.effects import Accepted, SequenceEnded
from scheduler.core.events import AbortRequested, Attached, Detached, DrainStarted, Recovered, StopWordFound
from scheduler.core.request import FinishReason, RequestState
from scheduler.core.request_spec import RequestSpec
from scheduler.core.timers import Action, Timers
from tests.scheduler.harness import MS, Harness


def test_an_identical_submit_attaches_and_a_different_one_is_rejected() -> None:
    harness = Harness()
    harness.submit("a", 3, digest=b"1")
    (again,) = harness.submit("a", 3, digest=b"1")
    assert isinstance(again, Accepted)
    assert again.is_attached
    harness.submit("a", 4, digest=b"2")
    assert harness.refused["a"].failure.code == 6
    assert harness.refused["a"].failure.field == "request_id"


def test_a_full_queue_refuses_with_a_hint() -> None:
    harness = Harness(max_queue_size=2)
    for request_id in "abc":
        harness.submit(request_id, 3)
    assert list(harness.refused) == ["c"]
    assert harness.refused["c"].failure.code == 8
    assert harness.refused["c"].retry_after_ms == 100


def test_bad_requests_are_refused_by_field() -> None:
    harness = Harness(max_sequence_length=20)
    harness.submit("empty", [])
    harness.submit("large token", [1, 1000])
    harness.submit("long", 15, 6)
    harness.submit("none", 3, 0, beam_width=2)
    fields = {request_id: refused.failure.field for request_id, refused in harness.refused.items()}
    assert fields == {"empty": "token_ids", "large token": "token_ids", "long": "max_tokens", "none": "max_tokens"}
    assert {refused.failure.code for refused in harness.refused.values()} == {3}


def test_a_request_too_large_for_all_workers_is_rejected_at_once() -> None:
    harness = Harness()
    harness.add_group(num_blocks=4, max_batch_size=2)
    harness.submit("large", 10, 8)  # the request needs space for 17 tokens, but there is only space for 16
    harness.submit("wide", 2, 2, beam_width=3)
    harness.submit("fits", 10, 7)
    harness.run()
    harness.check_is_empty()
    failures = {name: request.failure for name, request in harness.core.lifecycle.requests.items()}
    assert failures["fits"] is None
    assert failures["large"] is not None
    assert "20 tokens of KV cache; the workers have 16" in failures["large"].message
    assert failures["wide"] is not None
    assert failures["wide"].field == "sampling.beam_width"


def test_a_queued_request_past_its_deadline_is_never_run() -> None:
    harness = Harness()
    harness.add_group(num_blocks=2)
    harness.submit("a", 4, 5)
    harness.submit("late", 4, 2, deadline_ns=harness.now_ns + 10 * MS)
    harness.turn()
    harness.advance(10)
    assert harness.ended == {"late": FinishReason.DEADLINE}
    failure = harness.core.lifecycle.requests["late"].failure
    assert failure is not None
    assert failure.code == 4
    harness.run()
    assert not any("late" in plan for plan in harness.plans)


def test_a_deadline_in_generation_frees_the_blocks_at_once() -> None:
    harness = Harness()
    harness.add_group()
    harness.submit("a", 4, 50, deadline_ns=harness.now_ns + 10 * MS)
    harness.turn()
    harness.step()
    harness.advance(10)
    assert harness.ended == {"a": FinishReason.DEADLINE}
    assert harness.group().blocks.num_held == 0
    assert harness.core.lifecycle.requests["a"].failure is None
    harness.run()
    assert len(harness.tokens["a", 0]) == 1


def test_deadlines_and_expiries_of_ended_requests_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 0
    at = Timers.at

    def count(timers: Timers, time_ns: int, action: Action) -> int:
        nonlocal most
        number = at(timers, time_ns, action)
        most = max(most, len(timers))
        return number

    monkeypatch.setattr(Timers, "at", count)
    harness = Harness(finished_ttl_ns=3600_000 * MS, max_num_finished=4)
    harness.add_group()
    for number in range(300):
        deadline_ns = harness.now_ns + 24 * 3600_000 * MS
        harness.submit(f"r{number}", 3, 1, deadline_ns=deadline_ns, is_detached=True)
        harness.run()
    assert harness.core.totals.num_completed == 300
    assert most < 160


def test_cancelled_timers_do_not_run() -> None:
    timers, ran = Timers(), list[int]()
    numbers = [timers.at(number, ran.append) for number in range(300)]
    for number in range(0, 300, 3):
        timers.cancel(numbers[number])
    timers.run_due(150)
    for number in range(0, 300, 2):  # some of these have already run or been cancelled
        timers.cancel(numbers[number])
    timers.run_due(400)
    assert timers.next_ns is None
    assert len(ran) == len([number for number in range(300) if number % 3 and (number <= 150 or number % 2)])


def test_abort_while_queued_in_context_and_in_generation() -> None:
    harness = Harness(pipeline_depth=1)
    harness.add_group(num_blocks=4, max_num_tokens=4)
    for request_id, num_prompt in (("generation", 2), ("context", 6), ("queued", 6)):
        harness.submit(request_id, num_prompt, 6)
    harness.turn()
    harness.step()
    for request_id in ("queued", "context", "generation"):
        assert harness.handle(AbortRequested(harness.now_ns, request_id))
        assert harness.ended[request_id] is FinishReason.ABORT
        harness.check()
    assert harness.handle(AbortRequested(harness.now_ns, "generation")) == []
    assert harness.handle(AbortRequested(harness.now_ns, "unknown")) == []
    harness.run()
    harness.check_is_empty()
    assert harness.core.totals.num_finished_by_reason == {"abort": 3}


def test_a_stop_word_ends_its_sequence_where_it_ends() -> None:
    harness = Harness()
    harness.add_group()
    harness.submit("a", 3, 20)
    harness.turn()
    for _ in range(4):
        harness.step()
    harness.handle(StopWordFound(harness.now_ns, "a", 0, 2, "so"))
    assert harness.ended == {"a": FinishReason.STOP}
    end = harness.core.lifecycle.requests["a"].sequences[0].end
    assert end is not None
    assert (end.num_tokens, end.stop_word) == (2, "so")
    assert harness.core.lifecycle.requests["a"].num_output_tokens == 2
    harness.run()
    harness.check_is_empty()


def test_a_stop_word_found_late_replaces_an_end_by_length() -> None:
    harness = Harness()
    harness.add_group()
    harness.submit("a", 3, 4)
    harness.run()
    effects = harness.handle(StopWordFound(harness.now_ns, "a", 0, 3, "so"))
    assert [type(effect) for effect in effects] == [SequenceEnded]
    end = harness.core.lifecycle.requests["a"].sequences[0].end
    assert end is not None
    assert (end.reason, end.num_tokens) == (FinishReason.STOP, 3)
    # Another detokenizer receives the same output, and nothing after its end.
    assert harness.handle(StopWordFound(harness.now_ns, "a", 0, 3, "so")) == []
    assert harness.handle(StopWordFound(harness.now_ns, "a", 0, 9, "so")) == []


def test_a_stop_word_found_late_replaces_an_end_by_a_deadline() -> None:
    """The client gets the output up to the stop word, so this output must be recorded as its usage."""
    harness = Harness()
    harness.add_group(num_blocks=512)
    harness.submit("a", 3, 500, deadline_ns=harness.now_ns + 100 * MS)
    for _ in range(6):
        harness.turn()
        harness.finish_step()
    harness.advance(100)
    assert harness.ended == {"a": FinishReason.DEADLINE}
    request = harness.core.lifecycle.requests["a"]
    assert request.num_output_tokens > 3
    harness.handle(StopWordFound(harness.now_ns, "a", 0, 3, "so"))
    end = request.sequences[0].end
    assert end is not None
    assert (end.reason, request.num_output_tokens) == (FinishReason.STOP, 3)


def test_stop_tokens_wait_for_min_tokens() -> None:
    harness = Harness()
    harness.add_group()
    harness.submit("a", [5], 9, stop_token_ids=frozenset({7, 9}), min_tokens=3)
    harness.run()
    assert harness.tokens["a", 0] == [6, 7, 8, 9]
    end = harness.core.lifecycle.requests["a"].sequences[0].end
    assert end is not None
    assert (end.reason, end.stop_token_id) == (FinishReason.STOP, 9)


def test_a_request_nobody_reads_is_aborted_after_its_grace() -> None:
    harness = Harness(orphan_grace_ns=100 * MS)
    harness.add_group(num_blocks=512)
    for request_id in ("never", "read", "left"):
        harness.submit(request_id, 3, 500)
    harness.submit("detached", 3, 500, is_detached=True)
    for request_id in ("read", "left"):
        harness.handle(Attached(harness.now_ns, request_id))
    harness.advance(60)
    harness.handle(Detached(harness.now_ns, "left"))
    harness.advance(60)
    assert harness.ended == {"never": FinishReason.ABORT}
    harness.advance(60)
    assert harness.ended == {"never": FinishReason.ABORT, "left": FinishReason.ABORT}


def test_a_reader_that_comes_back_in_time_saves_its_request() -> None:
    harness = Harness(orphan_grace_ns=100 * MS)
    harness.submit("a", 3)
    harness.handle(Attached(harness.now_ns, "a"))
    harness.handle(Detached(harness.now_ns, "a"))
    harness.advance(90)
    harness.handle(Attached(harness.now_ns, "a"))
    harness.advance(90)
    assert harness.ended == {}


def test_finished_requests_are_kept_for_a_time_and_up_to_a_number() -> None:
    harness = Harness(finished_ttl_ns=100 * MS, max_num_finished=2)
    harness.add_group()
    for request_id in "abc":
        harness.submit(request_id, 3, 1)
    harness.run()
    assert harness.forgotten == {"a"}
    harness.advance(99)
    assert harness.forgotten == {"a"}
    harness.advance(1)
    assert harness.forgotten == {"a", "b", "c"}
    assert harness.core.lifecycle.requests == {}


def test_finished_requests_are_kept_up_to_a_number_of_tokens() -> None:
    harness = Harness(max_finished_tokens=11)
    harness.add_group()
    for request_id in "abc":
        harness.submit(request_id, 3, 1)
    harness.run()
    assert harness.forgotten == {"a"}
    harness.submit("d", 10, 2)
    harness.run()
    assert harness.forgotten == {"a", "b", "c", "d"}
    harness.submit("e", 3, 1)
    harness.run()
    assert list(harness.core.lifecycle.requests) == ["e"]


def test_a_draining_scheduler_rejects_new_requests_and_finishes_running_ones() -> None:
    harness = Harness()
    harness.add_group()
    harness.submit("a", 3)
    harness.handle(DrainStarted(harness.now_ns))
    harness.submit("b", 3)
    assert harness.refused["b"].failure.code == 14
    harness.run()
    assert harness.ended == {"a": FinishReason.LENGTH}


def test_without_a_worker_requests_wait_until_their_limit() -> None:
    harness = Harness(no_worker_timeout_ns=100 * MS)
    harness.submit("patient", 3, 1)
    harness.submit("urgent", 3, 1, deadline_ns=harness.now_ns + 30 * MS)
    harness.submit("deadline is far", 3, 1, deadline_ns=harness.now_ns + 500 * MS)
    harness.advance(30)
    assert harness.ended == {"urgent": FinishReason.DEADLINE}
    harness.advance(70)
    assert harness.ended["patient"] is FinishReason.ERROR
    failure = harness.core.lifecycle.requests["patient"].failure
    assert failure is not None
    assert failure.code == 14
    harness.add_group()
    harness.run()
    assert harness.ended["deadline is far"] is FinishReason.LENGTH


def test_a_recovered_request_continues() -> None:
    harness = Harness()
    harness.add_group()
    spec = RequestSpec(request_id="a", prompt=array("I", [1, 2, 3]), max_tokens=5)
    harness.handle(Recovered(harness.now_ns, spec, (array("I", [4, 5]),)))
    harness.tokens["a", 0] = [4, 5]
    harness.run()
    assert harness.plans == ["+a[0:5]", "a", "a"]
    assert harness.tokens["a", 0] == [4, 5, 6, 7, 8]


def test_time_stamps_of_a_request() -> None:
    harness = Harness()
    harness.add_group()
    start = harness.now_ns
    harness.submit("a", 3, 2, arrival_ns=start - 5 * MS)
    harness.advance(10)
    harness.now_ns += 20 * MS
    harness.step()
    harness.now_ns += 30 * MS
    harness.step()
    times = harness.core.lifecycle.requests["a"].times
    assert times.arrival_ns == start - 5 * MS
    assert times.first_scheduled_ns == start + 10 * MS
    assert times.first_token_ns == start + 30 * MS
    assert times.last_token_ns == times.finished_ns == start + 60 * MS
    totals = harness.core.totals
    assert totals.time_to_first_token.sum_ns == 30 * MS
    assert totals.inter_token_latency.sum_ns == 30 * MS
    assert totals.e2e_request_latency.sum_ns == 60 * MS
    assert totals.request_queue_time.sum_ns == 10 * MS


def test_the_head_of_the_queue_is_not_starved_by_smaller_requests() -> None:
    harness = Harness(pipeline_depth=1)
    harness.add_group(num_blocks=8)
    harness.submit("a", 4, 13)  # 4 blocks
    harness.submit("b", 4, 5)  # 2 blocks
    harness.turn()
    harness.submit("large", 20, 13)  # needs 8 blocks, so it waits until all of them are free
    for number in range(5):
        harness.submit(f"small{number}", 4, 5)
    harness.run()
    starts = [name for plan in harness.plans for name in re.findall(r"\+(\w+)", plan)]
    # It is charged for 9 blocks and the others for 3 each, so at most three of them may overtake it.
    assert starts == ["a", "b", "small0", "small1", "small2", "large", "small3", "small4"]


def test_a_light_client_is_not_starved_by_a_heavy_one() -> None:
    harness = Harness()
    harness.add_group(num_blocks=1024, max_batch_size=4)
    for number in range(80):
        harness.submit(f"heavy{number}", 4, 8, client_id="heavy")
    harness.turn()
    for number in range(4):
        harness.submit(f"light{number}", 4, 8, client_id="light")
    harness.run()
    ends = list(harness.ended)
    # Four heavy requests are already running; from then on the clients alternate.
    assert [ends.index(f"light{number}") for number in range(4)] == sorted(
        ends.index(f"light{number}") for number in range(4)
    )
    assert max(ends.index(f"light{number}") for number in range(4)) < 16


def test_a_prompt_only_request_ends_without_output() -> None:
    """The request samples one token in its only step. The token is kept, because outputs of the prompt refer to it, but
    it is not counted as output.
    """
    harness = Harness()
    harness.add_group()
    harness.submit("a", [5, 6, 7, 8], 0, num_sequences=2)
    harness.submit("b", [5, 6, 7, 8], 0, stop_token_ids=frozenset({9}), min_tokens=2)
    harness.run()
    for name in "ab":
        request = harness.core.lifecycle.requests[name]
        assert {(s.end.reason, s.end.num_tokens) for s in request.sequences if s.end} == {(FinishReason.LENGTH, 0)}
        assert (request.num_output_tokens, request.state) == (0, RequestState.FINISHED)
        assert {tuple(sequence.output) for sequence in request.sequences} == {(9,)}
    harness.check_is_empty()
