"""Random events for the core: requests and groups start and end, and the invariants hold at every step.

The fake model checks each step against the contents of its KV cache, and the harness checks that each token is the
successor of the previous one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from scheduler.core.events import AbortRequested, Attached, Detached, StopWordFound
from scheduler.core.request import FinishReason
from tests.scheduler.fake_group import FakeGroup
from tests.scheduler.harness import MS, Harness

NUM_BLOCKS = 12
PREFIX = list(range(7, 27))


@dataclass(frozen=True)
class Shape:
    """A request to submit."""

    num_shared: int
    num_own: int
    max_tokens: int
    num_sequences: int
    priority: int
    salt: str
    timeout_ms: int | None
    is_detached: bool
    beam_width: int = 1
    num_draft_tokens: int = 0


class CoreDriver:
    """One core with up to two groups `g` and `h`; each method is a possible event.

    With `are_apart`, `g` runs prefill and `h` runs decode; with `has_tiers`, they share tiers.
    """

    def __init__(
        self,
        capacity: str,
        batching: str,
        pipeline_depth: int,
        max_num_tokens: int,
        reuse: bool,
        window: int,
        are_apart: bool,
        has_tiers: bool,
    ) -> None:
        self.harness = Harness(
            capacity=capacity,
            batching=batching,
            pipeline_depth=pipeline_depth,
            max_num_tokens=max_num_tokens,
            enable_block_reuse=reuse,
            attention_windows=(window,),
            max_queue_size=30,
            max_num_finished=1000,
        )
        self.count = 0
        self.max_tokens: dict[str, int] = {}
        self.undisturbed: set[str] = set()
        self.are_apart, self.has_tiers = are_apart, has_tiers
        self._add_group("g", num_blocks=NUM_BLOCKS, max_batch_size=5)

    def _add_group(self, name: str, **settings: Any) -> None:
        role = {"g": "prefill", "h": "decode"}[name] if self.are_apart else ""
        self.harness.add_group(name, role=role, kv_source=f"at {name}", has_tiers=self.has_tiers, **settings)

    def submit(self, shapes: list[Shape]) -> None:
        for shape in shapes:
            self.count += 1
            request_id = f"r{self.count}"
            own = [100 + self.count % 3 * 100 + index for index in range(shape.num_own)]
            self.max_tokens[request_id] = shape.max_tokens
            timeout_ms = shape.timeout_ms
            self.harness.submit(
                request_id,
                PREFIX[: shape.num_shared] + own,
                shape.max_tokens,
                num_sequences=min(shape.num_sequences, shape.beam_width if shape.beam_width > 1 else 128),
                beam_width=shape.beam_width,
                num_draft_tokens=shape.num_draft_tokens if shape.beam_width == 1 else 0,
                priority=shape.priority,
                client_id=f"client {self.count % 2}",
                cache_salt=shape.salt,
                is_detached=shape.is_detached,
                deadline_ns=None if timeout_ms is None else self.harness.now_ns + timeout_ms * MS,
            )
            if timeout_ms is None and shape.is_detached:
                self.undisturbed.add(request_id)
        self.harness.turn()

    def busy(self) -> list[FakeGroup]:
        return [group for group in self.harness.groups.values() if group.plans]

    def step(self, pick: int, twice: bool) -> None:
        fetching = next((group for group in self.harness.groups.values() if group.fetches), None)
        if fetching is not None and pick % 2:
            self.harness.fetch(fetching.name, pick // 2 if pick < 5 else None)
            return
        busy = self.busy()
        if busy:
            result = busy[pick % len(busy)].run(self.harness.now_ns)
            self.harness.handle(result)
            if twice:
                self.harness.handle(result)
            self.harness.turn()

    def results_change_places(self) -> None:
        group = next((group for group in self.harness.groups.values() if len(group.plans) > 1), None)
        if group is not None:
            first, second = group.run(self.harness.now_ns), group.run(self.harness.now_ns)
            self.harness.handle(second)
            self.harness.handle(first)

    def somebody_comes_or_goes(self, pick: int, kind: str) -> None:
        unfinished = [request_id for request_id in self.harness.accepted if request_id not in self.harness.ended]
        if not unfinished:
            return
        request_id = unfinished[pick % len(unfinished)]
        if kind == "abort":
            self.undisturbed.discard(request_id)
            self.harness.handle(AbortRequested(self.harness.now_ns, request_id))
        else:
            event = Attached if kind == "attach" else Detached
            self.harness.handle(event(self.harness.now_ns, request_id))

    def stop_word(self, pick: int, num_back: int) -> None:
        if not self.harness.tokens:
            return
        request_id, index = list(self.harness.tokens)[-1 - pick % len(self.harness.tokens)]
        self.undisturbed.discard(request_id)
        num_tokens = max(1, len(self.harness.tokens[request_id, index]) - num_back)
        self.harness.handle(StopWordFound(self.harness.now_ns, request_id, index, num_tokens, "stop"))

    def group_changes(self, name: str, kind: str, num_blocks: int) -> None:
        if name not in self.harness.groups:
            self._add_group(name, num_blocks=num_blocks, max_batch_size=4)
        elif kind == "leave" and len(self.harness.groups) > 1:
            self.harness.leave(name)
        elif kind == "again":
            self._add_group(name, num_blocks=NUM_BLOCKS, max_batch_size=5, incarnation=12345)
        self.harness.turn()

    def time_passes(self) -> None:
        self.harness.advance(20)

    def end(self) -> None:
        """Run all requests to completion, and check how each of them ended."""
        self.harness.run(max_steps=3000)
        self.harness.check_is_empty()
        assert set(self.harness.ended) == set(self.harness.accepted)
        for request_id, reason in self.harness.ended.items():
            request = self.harness.core.lifecycle.requests[request_id]
            if request.failure is not None:
                assert any(
                    word in request.failure.message for word in ("at most", "does not fit", "need", "died", "deadline")
                ), request.failure
            elif request_id in self.undisturbed:
                assert reason is FinishReason.LENGTH
                for sequence in request.sequences:
                    num_tokens = len(self.harness.tokens[request_id, sequence.index])
                    assert num_tokens == self.max_tokens[request_id]
