"""What workers cost, and how long requests wait for their first token."""

from __future__ import annotations

import pytest

from tests.scheduler.harness import MS, Harness

S = 1000 * MS


def test_groups_cost_their_price_while_they_are_registered() -> None:
    harness = Harness()
    harness.wait_until(36 * S)
    assert harness.core.membership.cost == 0
    harness.add_group("g", price_per_hour=200)
    harness.add_group("h", price_per_hour=50)
    assert harness.core.membership.price_per_hour == 250
    harness.wait_until(harness.now_ns + 18 * S)
    assert harness.core.membership.cost == pytest.approx(1.25)
    harness.leave("g")
    harness.wait_until(harness.now_ns + 36 * S)
    assert harness.core.membership.cost == pytest.approx(1.75)
    harness.add_group("h", incarnation=2, price_per_hour=400)  # its successor costs more
    harness.wait_until(harness.now_ns + 36 * S)
    assert harness.core.membership.cost == pytest.approx(5.75)


def test_the_longest_wait_for_a_first_token_is_that_of_the_oldest_request_without_one() -> None:
    harness = Harness(pipeline_depth=1)
    assert harness.core.first_token_wait_ns == 0
    harness.submit("a", 4, 8)
    harness.now_ns += 20 * MS
    harness.submit("b", 4, 8)
    harness.now_ns += 10 * MS
    harness.turn()
    assert harness.core.first_token_wait_ns == 30 * MS
    harness.add_group(max_batch_size=1)
    harness.turn()
    harness.now_ns += 5 * MS
    harness.step()
    assert harness.core.first_token_wait_ns == 15 * MS  # of `b`, which is in the queue
    harness.run()
    assert harness.core.first_token_wait_ns == 0
