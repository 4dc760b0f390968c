from __future__ import annotations

from array import array
from typing import Any

import pytest

from scheduler.core.queue import RequestQueue, charge
from scheduler.core.request import Request
from scheduler.core.request_spec import RequestSpec

_ordinals = iter(range(1_000_000))


def request(name: str, num_prompt: int = 10, max_tokens: int = 10, **spec: Any) -> Request:
    prompt = array("I", range(num_prompt))
    return Request(RequestSpec(request_id=name, prompt=prompt, max_tokens=max_tokens, **spec), next(_ordinals))


def drain(queue: RequestQueue) -> str:
    order = ""
    while (head := queue.head()) is not None:
        queue.take(head, 1)
        order += head.request_id
    return order


def test_one_client_is_served_in_order_of_arrival() -> None:
    queue = RequestQueue(10)
    for name in "abc":
        queue.push(request(name))
    assert drain(queue) == "abc"


def test_higher_priority_goes_first() -> None:
    queue = RequestQueue(10)
    for name, priority in (("a", 0), ("b", 5), ("c", -5), ("d", 5)):
        queue.push(request(name, priority=priority))
    assert drain(queue) == "bdac"


def test_clients_take_turns_by_what_they_are_charged() -> None:
    queue = RequestQueue(10)
    for name in "abcd":
        queue.push(request(name, client_id="heavy"))
    queue.push(request("x", client_id="light"))
    queue.push(request("y", client_id="light"))
    # Virtual times: heavy and light start at 0 -> a (heavy at 20), x (light at 20), b (heavy at 40), y (light at 40),
    # then only heavy is left.
    assert drain(queue) == "axbycd"


def test_a_client_of_large_requests_gets_fewer_of_them() -> None:
    queue = RequestQueue(10)
    for name in "AB":
        queue.push(request(name, num_prompt=50, client_id="large"))  # 60 tokens each
    for name in "abcd":
        queue.push(request(name, client_id="small"))  # 20 tokens each
    assert drain(queue) == "AabcBd"


def test_a_client_that_was_away_does_not_catch_up() -> None:
    queue = RequestQueue(20)
    for name in "abcd":
        queue.push(request(name, client_id="busy"))
    for _ in range(3):
        head = queue.head()
        assert head is not None
        queue.take(head, 1)  # the virtual time of `busy` is 60, that of the queue 40
    for name in "xyz":
        queue.push(request(name, client_id="late"))  # its virtual time starts at 40, not at 0
    queue.push(request("e", client_id="busy"))
    assert drain(queue) == "xdyze"


def test_unused_tokens_are_refunded() -> None:
    queue = RequestQueue(10)
    first = request("a", max_tokens=1000, client_id="one")
    queue.push(first)
    queue.push(request("b", client_id="one"))
    queue.push(request("x", client_id="two"))
    queue.push(request("y", client_id="two"))
    queue.take(first, 1)  # the virtual time of client `one` is 1010
    queue.settle(first)  # at 10
    assert drain(queue) == "xby"


def test_requests_that_ran_before_precede_new_ones_of_equal_priority() -> None:
    queue = RequestQueue(2)
    old, older = request("o"), request("p")
    queue.push(request("a"))
    queue.push(request("u", priority=1))
    assert queue.is_full
    queue.put_back(older)
    queue.put_back(old)
    assert len(queue) == 4
    assert drain(queue) == "uopa"


def test_a_held_request_waits_for_its_time_and_blocks_no_other() -> None:
    queue = RequestQueue(10)
    held, removed, new = request("h"), request("r"), request("n")
    queue.push(new)
    queue.hold(held, 100)
    queue.hold(removed, 100)
    queue.release_due(99)
    assert queue.head() is new
    assert queue.behind(new, 8) == []
    assert list(queue.ordered) == [new]
    assert len(queue) == 3
    queue.remove(removed)
    queue.release_due(100)
    assert list(queue.ordered) == [held, new]
    assert drain(queue) == "hn"
    assert queue.num_tokens == 0


def test_a_client_pays_again_for_a_held_request_unless_it_has_output() -> None:
    queue = RequestQueue(10)
    first, second, running = (request(name, num_prompt=4, client_id="one") for name in "abr")
    running.sequences[0].append(7, 0)
    for item in (first, second, running):
        queue.push(item)
        queue.take(item, 1)
    queue.push(request("x", client_id="two"))
    for item in (second, first, running):
        queue.hold(item, 100)
    queue.release_due(100)
    assert drain(queue) == "raxb"  # the virtual times of both clients are equal after r


def test_a_removed_request_is_skipped_and_its_tokens_are_not_counted() -> None:
    queue = RequestQueue(10)
    requests = [request(name, num_prompt=5) for name in "abc"]
    for item in requests:
        queue.push(item)
    queue.remove(requests[0])
    queue.remove(requests[1])
    assert queue.num_tokens == 5
    assert drain(queue) == "c"
    assert queue.num_tokens == 0


def test_removed_requests_are_freed_behind_a_more_urgent_one_that_waits() -> None:
    queue = RequestQueue(10)
    queue.push(request("urgent", priority=1))
    returned = request("returned")
    for _ in range(1000):
        item = request("x")
        queue.push(item)
        queue.remove(item)
        queue.put_back(returned)
        queue.remove(returned)
    assert len(queue._fair[0]._clients[""].requests) < 100
    assert len(queue._returned) < 100
    assert len(queue) == 1
    last = request("last")
    queue.push(last)
    queue.take(queue.head() or last, 1)
    assert queue.head() is last


def test_clients_that_are_gone_are_forgotten() -> None:
    queue = RequestQueue(10)
    for number in range(1000):
        item = request("r", client_id=f"client {number}")
        queue.push(item)
        queue.take(item, 1)
    assert len(queue._fair[0]._clients) < 100


def test_a_request_is_charged_for_its_parts_as_they_start() -> None:
    queue = RequestQueue(10)
    large = request("L", num_sequences=4, client_id="one")  # 80 tokens
    queue.push(large)
    queue.push(request("x", client_id="two"))
    queue.push(request("y", client_id="two"))
    assert queue.head() is large
    queue.take(large, 1)  # client `one` is at 20
    assert large in queue
    assert queue.num_tokens == 30 + 20
    large.sequences[0].row = 0
    assert drain_one(queue) == "x"  # client `two` is at 20
    assert queue.head() is large
    queue.take(large, 3)
    assert large not in queue
    assert drain(queue) == "y"


@pytest.mark.parametrize(
    ("tokens_per_block", "num_rows", "num_output_tokens", "num_tokens"),
    [
        (1, 1, None, 20),
        (1, 4, None, 20 + 3 * 11),  # the rows share the prompt except its last token
        (4, 4, None, (5 + 3 * 3) * 4),
        (4, 4, 3, (4 + 3 * 2) * 4),
        (4, 0, None, 0),
    ],
)
def test_a_request_is_charged_for_the_blocks_of_all_its_rows(
    tokens_per_block: int, num_rows: int, num_output_tokens: int | None, num_tokens: int
) -> None:
    large = request("L", num_prompt=10, max_tokens=10, num_sequences=4)
    assert charge(large, tokens_per_block, num_rows, num_output_tokens) == num_tokens


def test_a_waiting_request_is_overtaken_by_at_most_what_it_is_still_charged() -> None:
    queue = RequestQueue(10)
    large, small = request("L", num_sequences=4, client_id="one"), request("x", client_id="two")
    other, urgent = request("y", client_id="two"), request("u", client_id="two", priority=1)
    for item in (large, small, other, urgent):
        queue.push(item)
    assert queue.allowance(large, small) == 53
    queue.take(small, 1)
    assert queue.allowance(large, other) == 53 - 20
    queue.take(large, 1)  # starts one of its sequences, which costs 20 tokens
    assert queue.allowance(large, other) == 53 - 20
    assert queue.allowance(large, urgent) < 0


def test_a_waiting_request_is_overtaken_by_smaller_ones_of_its_client_up_to_its_size() -> None:
    queue = RequestQueue(10)
    sizes = {"large": 100, "b": 60, "equal": 100, "c": 40, "d": 20}
    large, b, equal, c, d = (request(name, num_prompt=size - 10) for name, size in sizes.items())
    for item in (large, b, equal, c, d):
        queue.push(item)
    assert queue.smallest_after(large) is d
    assert not queue.may_overtake_own(equal, large)
    for item, is_next in ((d, c), (c, b)):  # charged 20, then 60
        assert queue.may_overtake_own(item, large)
        queue.take(item, 1)
        assert queue.smallest_after(large) is is_next
    assert not queue.may_overtake_own(b, large)  # 120
    queue.take(large, 1)
    assert queue.head() is b
    assert not queue.may_overtake_own(equal, b)
    assert drain(queue) == "b" + "equal"


def test_a_request_does_not_overtake_one_of_its_client_that_ran_before_or_is_more_urgent() -> None:
    queue = RequestQueue(10)
    ran, urgent, small = request("r", 90), request("u", 90, priority=1), request("s", 10)
    queue.push(small)
    queue.put_back(ran)
    assert not queue.may_overtake_own(small, ran)
    queue.push(urgent)
    assert not queue.may_overtake_own(small, urgent)


def test_a_request_paused_with_waiting_sequences_is_queued_once() -> None:
    queue = RequestQueue(10)
    large = request("L", num_sequences=4)
    queue.push(large)
    queue.push(request("x"))
    queue.take(large, 1)
    queue.put_back(large)
    assert queue.num_tokens == 50
    assert [item.request_id for item in queue.behind(large, 5)] == ["x"]
    queue.remove(large)
    assert drain(queue) == "x"


def test_only_charged_tokens_are_refunded() -> None:
    queue = RequestQueue(10)
    large = request("L", num_sequences=4, client_id="one")
    queue.push(large)
    queue.push(request("b", client_id="one"))
    queue.push(request("x", client_id="two"))
    queue.take(large, 1)  # client `one` is at 20
    queue.remove(large)
    queue.settle(large)  # at 10
    assert drain(queue) == "xb"


def drain_one(queue: RequestQueue) -> str:
    head = queue.head()
    assert head is not None
    queue.take(head, 1)
    return head.request_id
