"""Random lives of the core: whatever happens, blocks are conserved, every request ends once, no token is lost or
doubled.

The fake model checks each step against the contents of its KV cache, and the harness each token against the arithmetic.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from scheduler.capacity_scheduler import CAPACITY_SCHEDULERS
from scheduler.events import AbortRequested, Attached, Detached, StopWordFound
from scheduler.micro_batch_scheduler import MICRO_BATCH_SCHEDULERS
from scheduler.request import FinishReason
from tests.scheduler.harness import MS, Harness

NUM_BLOCKS = 12
PREFIX = [7, 8, 9, 10, 11, 12, 13, 14, 15, 16]
groups = st.sampled_from(["g", "h"])


class CoreMachine(RuleBasedStateMachine):
    @initialize(
        capacity=st.sampled_from(sorted(CAPACITY_SCHEDULERS)),
        batching=st.sampled_from(sorted(MICRO_BATCH_SCHEDULERS)),
        pipeline_depth=st.integers(1, 2),
        max_num_tokens=st.sampled_from([3, 8, 1000]),
        reuse=st.booleans(),
        window=st.sampled_from([0, 0, 6]),
    )
    def begin(
        self, capacity: str, batching: str, pipeline_depth: int, max_num_tokens: int, reuse: bool, window: int
    ) -> None:
        self.harness = Harness(
            capacity=capacity,
            batching=batching,
            pipeline_depth=pipeline_depth,
            max_num_tokens=max_num_tokens,
            enable_block_reuse=reuse,
            attention_window=window,
            max_queue_size=8,
            max_num_finished=1000,
        )
        self.count = 0
        self.max_tokens: dict[str, int] = {}
        self.undisturbed: set[str] = set()
        self.harness.add_group("g", num_blocks=NUM_BLOCKS, max_batch_size=5)

    @rule(
        num_shared=st.integers(0, 10),
        num_own=st.integers(1, 9),
        max_tokens=st.integers(1, 9),
        num_sequences=st.sampled_from([1, 1, 1, 2, 3]),
        priority=st.integers(-1, 1),
        client_id=st.sampled_from(["x", "y"]),
        salt=st.sampled_from(["", "", "s"]),
        timeout_ms=st.sampled_from([None, None, 50]),
        detached=st.booleans(),
    )
    def submit(
        self,
        num_shared: int,
        num_own: int,
        max_tokens: int,
        num_sequences: int,
        priority: int,
        client_id: str,
        salt: str,
        timeout_ms: int | None,
        detached: bool,
    ) -> None:
        self.count += 1
        request_id = f"r{self.count}"
        prompt = PREFIX[:num_shared] + [(100 + self.count % 3 * 100 + index) for index in range(num_own)]
        self.max_tokens[request_id] = max_tokens
        self.harness.submit(
            request_id,
            prompt,
            max_tokens,
            num_sequences=num_sequences,
            priority=priority,
            client_id=client_id,
            cache_salt=salt,
            is_detached=detached,
            deadline_ns=None if timeout_ms is None else self.harness.now_ns + timeout_ms * MS,
        )
        if timeout_ms is None and detached:
            self.undisturbed.add(request_id)

    @rule()
    def turn(self) -> None:
        self.harness.turn()

    @precondition(lambda self: any(group.plans for group in self.harness.groups.values()))
    @rule(pick=st.integers(0, 9), twice=st.booleans())
    def step(self, pick: int, twice: bool) -> None:
        busy = [group for group in self.harness.groups.values() if group.plans]
        group = busy[pick % len(busy)]
        result = group.run(self.harness.now_ns)
        self.harness.handle(result)
        if twice:
            self.harness.handle(result)
        self.harness.turn()

    @precondition(lambda self: any(len(group.plans) > 1 for group in self.harness.groups.values()))
    @rule()
    def results_change_places(self) -> None:
        group = next(group for group in self.harness.groups.values() if len(group.plans) > 1)
        first, second = group.run(self.harness.now_ns), group.run(self.harness.now_ns)
        self.harness.handle(second)
        self.harness.handle(first)

    @precondition(lambda self: self.count > 0)
    @rule(pick=st.integers(0, 99))
    def abort(self, pick: int) -> None:
        request_id = f"r{pick % self.count + 1}"
        self.undisturbed.discard(request_id)
        self.harness.handle(AbortRequested(self.harness.now_ns, request_id))

    @precondition(lambda self: self.harness.tokens)
    @rule(pick=st.integers(0, 99), num_tokens=st.integers(1, 9))
    def stop_word(self, pick: int, num_tokens: int) -> None:
        request_id, index = sorted(self.harness.tokens)[pick % len(self.harness.tokens)]
        self.undisturbed.discard(request_id)
        self.harness.handle(StopWordFound(self.harness.now_ns, request_id, index, num_tokens, "stop"))

    @precondition(lambda self: self.count > 0)
    @rule(pick=st.integers(0, 99), comes=st.booleans())
    def reader(self, pick: int, comes: bool) -> None:
        event = Attached if comes else Detached
        self.harness.handle(event(self.harness.now_ns, f"r{pick % self.count + 1}"))

    @rule(name=groups, num_blocks=st.sampled_from([NUM_BLOCKS, 2 * NUM_BLOCKS]))
    def group_joins(self, name: str, num_blocks: int) -> None:
        if self.harness.groups.get(name) is None:
            self.harness.add_group(name, num_blocks=num_blocks, max_batch_size=4)

    @precondition(lambda self: len(self.harness.groups) > 1)
    @rule(name=groups)
    def group_leaves(self, name: str) -> None:
        self.harness.leave(name)

    @precondition(lambda self: len(self.harness.groups) > 1)
    @rule(name=groups)
    def group_registers_again(self, name: str) -> None:
        self.harness.add_group(name, num_blocks=NUM_BLOCKS, max_batch_size=5, incarnation=12345)

    @rule()
    def time_passes(self) -> None:
        self.harness.advance(20)

    @invariant()
    def blocks_are_conserved(self) -> None:
        if hasattr(self, "harness"):
            self.harness.check()

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        if not self.harness.groups:
            self.harness.add_group("g", num_blocks=NUM_BLOCKS, max_batch_size=5)
        self.harness.run(max_steps=3000)
        self.harness.check_is_empty()
        assert set(self.harness.ended) == set(self.harness.accepted)
        for request_id, reason in self.harness.ended.items():
            request = self.harness.core.lifecycle.requests[request_id]
            if reason is FinishReason.LENGTH and request_id in self.undisturbed:
                for sequence in request.sequences:
                    num_tokens = len(self.harness.tokens[request_id, sequence.index])
                    assert num_tokens == self.max_tokens[request_id]
            if reason is FinishReason.ERROR:
                assert request.failure is not None
                large = "take" in request.failure.message or "run at most" in request.failure.message
                died = "died" in request.failure.message
                assert large or died, request.failure
        for request_id in self.undisturbed & set(self.harness.ended):
            assert self.harness.ended[request_id] in (FinishReason.LENGTH, FinishReason.ERROR)


@pytest.mark.timeout(600)
def test_no_life_breaks_the_rules() -> None:
    chosen = settings(
        settings.get_profile("scheduler"),
        stateful_step_count=40,
        suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
    )
    run_state_machine_as_test(CoreMachine, settings=chosen)
