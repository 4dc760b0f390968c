"""Drive the core step by step: the clock advances and workers run steps only on demand, and all output is checked."""

from __future__ import annotations

from array import array
from typing import Any

from protos import generation_pb2, worker_pb2
from scheduler.core.capacity_scheduler import CAPACITY_SCHEDULERS
from scheduler.core.config import CoreConfig
from scheduler.core.core import SchedulerCore
from scheduler.core.effects import (
    Accepted,
    Effect,
    Emitted,
    FetchBlocks,
    GroupJoined,
    Refused,
    RequestEnded,
    RequestForgotten,
    SequenceEnded,
    StepPlan,
)
from scheduler.core.events import Event, Submitted, Turn, WorkerBeat, WorkerLeft, WorkerLost, WorkerRegistered
from scheduler.core.kind import Kind
from scheduler.core.micro_batch_scheduler import MICRO_BATCH_SCHEDULERS
from scheduler.core.prefix_cache import Hits
from scheduler.core.request import FinishReason, Request, Sequence
from scheduler.core.request_scheduler import RequestScheduler, SimpleScheduler
from scheduler.core.request_spec import RequestSpec
from scheduler.core.worker_group import WorkerGroup
from scheduler.wire.requests import ModelLimits
from scheduler.wire.worker_messages import encode_step
from tests.fakes.model import FakeModel
from tests.scheduler.beam_reference import best_beams
from tests.scheduler.fake_group import FakeGroup, Store

VOCAB = 1000
MS = 1_000_000
LIMITS = ModelLimits(max_sequence_length=4096, end_ids=(999,))


class Harness:
    """A core, its workers, and the output so far.

    Attributes:
        tokens: Emitted tokens by request id and sequence index.
        ended: Finish reasons by request id.
        plans: Every planned step, as text from `describe`.
    """

    def __init__(
        self,
        *,
        capacity: str = "guaranteed_no_evict",
        batching: str = "inflight_fused",
        scheduler: RequestScheduler | None = None,
        attention_windows: tuple[int, ...] = (),
        **config: Any,
    ) -> None:
        """Create the core; `attention_windows` are the default windows of groups."""
        settings = {"tokens_per_block": 4, "vocab_size": VOCAB, "max_sequence_length": 4096, "scheduler_epoch": 7}
        self.config = CoreConfig(**(settings | config))
        chosen = scheduler or SimpleScheduler(CAPACITY_SCHEDULERS[capacity](), MICRO_BATCH_SCHEDULERS[batching]())
        self.scheduler = chosen
        self.core = SchedulerCore(self.config, chosen)
        self.now_ns = 1_000_000_000
        self._attention_windows = attention_windows
        self.groups: dict[str, FakeGroup] = {}
        self.store: Store = []
        self.tier: dict[int, list[int]] = {}
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.prompts: dict[str, list[int]] = {}
        self.ended: dict[str, FinishReason] = {}
        self.ended_sequences: set[tuple[str, int]] = set()
        self.refused: dict[str, Refused] = {}
        self.accepted: dict[str, int] = {}
        self.forgotten: set[str] = set()
        self.plans: list[str] = []
        self.effects: list[Effect] = []

    def add_group(
        self,
        name: str = "g",
        *,
        num_blocks: int = 64,
        max_batch_size: int = 64,
        max_num_tokens: int = 1 << 20,
        after: FakeGroup | None = None,
        **more: Any,
    ) -> FakeGroup:
        """Register a worker group, or register it again after its epoch `after` has ended.

        Groups that have tiers (`has_tiers`) share them.
        """
        incarnation = more.pop("incarnation", len(self.effects) + 1)
        end_after, fail_token = more.pop("end_after", 0), more.pop("fail_token", None)
        kept = after.begin_anew() if after is not None else worker_pb2.Register()
        has_tiers = more.pop("has_tiers", False)
        if has_tiers:
            more |= {"tier_store": "tiers", "stored_hashes": tuple(self.tier)}
        registration = WorkerRegistered(
            time_ns=self.now_ns,
            connection=f"{name}.{incarnation}".encode(),
            group_id=name,
            incarnation=incarnation,
            kind=more.pop("kind", Kind(more.pop("model_fingerprint", ""))),
            tokens_per_block=more.pop("tokens_per_block", self.config.tokens_per_block),
            num_blocks=num_blocks,
            vocab_size=more.pop("vocab_size", VOCAB),
            max_sequence_length=more.pop("max_sequence_length", 4096),
            max_batch_size=max_batch_size,
            max_num_tokens=max_num_tokens,
            protocol_version=more.pop("protocol_version", 1),
            kept_blocks=tuple(kept.kept_blocks),
            kept_hashes=tuple(kept.kept_hashes),
            kv_store=more.pop("kv_store", ""),
            tier_store=more.pop("tier_store", ""),
            stored_hashes=more.pop("stored_hashes", ()),
            block_bytes=more.pop("block_bytes", 0),
            attention_windows=more.pop("attention_windows", self._attention_windows),
            max_attention_window=more.pop("max_attention_window", self.config.max_attention_window),
            sink_token_length=more.pop("sink_token_length", self.config.sink_token_length),
            role=more.pop("role", ""),
            device=more.pop("device", ""),
            kv_source=more.pop("kv_source", ""),
            num_micro_batches=more.pop("num_micro_batches", 1),
            block_kind=more.pop("block_kind", ""),
            price_per_hour=more.pop("price_per_hour", 0.0),
            sleep_level=more.pop("sleep_level", 0),
            features=more.pop("features", ()),
        )
        assert not more, more
        model = FakeModel(
            vocab_size=VOCAB,
            tokens_per_block=registration.tokens_per_block,
            num_blocks=num_blocks,
            end_after=end_after,
            fail_token=fail_token,
            attention_window=registration.attention_window,
            sink_token_length=registration.sink_token_length,
        )
        group = FakeGroup(name, registration, model, self.store, self.tier if has_tiers else None)
        if after is not None:
            model.slots, group.kept, group.hashes = after.model.slots, after.kept, after.hashes
        self.groups[name] = group
        self.handle(registration)
        return group

    def handle(self, event: Event) -> list[Effect]:
        """Pass an event to the core and record its effects."""
        effects = self.core.handle(event)
        for effect in effects:
            self._note(effect)
        self.effects += effects
        return effects

    def _note(self, effect: Effect) -> None:
        if isinstance(effect, StepPlan | FetchBlocks):
            self._note_work(effect)
        elif isinstance(effect, Emitted):
            self._note_tokens(effect)
        elif isinstance(effect, SequenceEnded):
            key = (effect.sequence.request.request_id, effect.sequence.index)
            self.ended_sequences.add(key)
            assert effect.sequence.end is not None
            assert effect.sequence.end.num_tokens <= len(self.tokens.get(key, []))
        elif isinstance(effect, RequestEnded):
            self._note_end(effect.request)
        elif isinstance(effect, RequestForgotten):
            self.forgotten.add(effect.request.request_id)
            del self.ended[effect.request.request_id]
        elif isinstance(effect, Refused):
            self.refused[effect.request_id] = effect
        elif isinstance(effect, Accepted):
            self.accepted[effect.request.request_id] = self.accepted.get(effect.request.request_id, 0) + 1
        elif isinstance(effect, GroupJoined):
            self.groups[effect.group_id].epoch = effect.epoch

    def _note_work(self, effect: StepPlan | FetchBlocks) -> None:
        if isinstance(effect, FetchBlocks):
            for group in self.groups.values():
                if (group.registration.connection, group.epoch) == (effect.connection, effect.epoch):
                    group.fetches.append(effect)
            return
        group = self.groups[effect.group_id]
        self.plans.append(describe(effect, self.group(effect.group_id)))
        if group.epoch == effect.epoch:
            group.plans.append(effect)
            batch = worker_pb2.SchedulerMessage.FromString(encode_step(effect)).step_batch
            group.keep(batch)

    def _note_end(self, request: Request) -> None:
        assert request.request_id not in self.ended, "a request ended twice"
        end = request.sequences[0].end
        assert end is not None
        self.ended[request.request_id] = end.reason
        if request.beams is not None and end.reason in (FinishReason.STOP, FinishReason.LENGTH) and not end.stop_word:
            for sequence, (tokens, _) in zip(request.sequences, best_beams(request.spec, VOCAB), strict=True):
                assert sequence.output.tolist() == tokens

    def _note_tokens(self, effect: Emitted) -> None:
        for sequence, length in zip(effect.sequences, effect.lengths, strict=True):
            key = (sequence.request.request_id, sequence.index)
            known = self.tokens.setdefault(key, [])
            assert length > len(known), "a token was emitted twice"
            assert key not in self.ended_sequences, "a token was emitted after the end of the request"
            known += sequence.output[len(known) : length]
            if sequence.request.beams is not None:
                self._check_beam(sequence, known)
                continue
            last = sequence.request.spec.prompt[-1]
            expected = [(last + 1 + i) % VOCAB for i in range(length)]
            assert known == expected or sequence.output[-1] == 999, f"{key}: got {known}, expected {expected}"

    def _check_beam(self, sequence: Sequence, known: list[int]) -> None:
        """Check that the output so far is a prefix of the output of a search that was never preempted, moved or
        recovered.
        """
        assert known == best_beams(sequence.request.spec, VOCAB)[sequence.index][0][: len(known)]
        assert sequence.output.tolist() == known

    def submit(self, request_id: str, prompt: list[int] | int, max_tokens: int = 4, **spec: Any) -> list[Effect]:
        """Submit a request; if `prompt` is a number, the prompt has this many unique tokens."""
        tokens = prompt if isinstance(prompt, list) else own_prompt(request_id, prompt)
        self.prompts[request_id] = tokens
        sampling = generation_pb2.SamplingConfig(
            beam_width=spec.get("beam_width", 1), min_tokens=spec.get("min_tokens", 0)
        )
        stopping = generation_pb2.StoppingConfig(
            stop_token_ids=spec.get("stop_token_ids", ()), stop_words=spec.get("stop_words", ()), ignore_eos=True
        )
        payload = generation_pb2.GenerateRequest(
            request_id=request_id, sampling=sampling, stopping=stopping
        ).SerializeToString()
        return self.handle(
            Submitted(
                self.now_ns,
                RequestSpec(
                    request_id=request_id, prompt=array("I", tokens), max_tokens=max_tokens, payload=payload, **spec
                ),
            )
        )

    def turn(self) -> list[str]:
        """Run one turn after the workers have reported stored blocks; return the planned steps."""
        for group in self.groups.values():
            if (beat := group.take_beat(self.now_ns)) is not None:
                self.handle(beat)
        before = len(self.plans)
        self.handle(Turn(self.now_ns))
        return self.plans[before:]

    def finish_step(self, name: str = "g") -> None:
        """Run the oldest step of a group and deliver its result, without running a turn."""
        self.handle(self.groups[name].run(self.now_ns))

    def fetch(self, name: str, most: int | None = None) -> list[str]:
        """Execute the oldest fetch of a group, in whole or in part, and run a turn."""
        self.handle(self.groups[name].fetch(self.now_ns, self.groups.values(), most))
        return self.turn()

    def step(self, name: str = "g") -> list[str]:
        """Run the oldest step of a group, deliver its result, and run a turn; return the planned steps."""
        self.finish_step(name)
        return self.turn()

    def advance(self, milliseconds: int) -> list[str]:
        """Advance the clock, then run a turn."""
        self.now_ns += milliseconds * MS
        return self.turn()

    def run(self, max_steps: int = 10_000) -> int:
        """Run until no step is in flight; return the number of steps."""
        self.turn()
        for count in range(max_steps):
            fetching = next((group for group in self.groups.values() if group.fetches), None)
            if fetching is not None:
                self.fetch(fetching.name)
                self.check()
                continue
            busy = next((group for group in self.groups.values() if group.plans), None)
            if busy is None:
                if not self.wait_for_groups():
                    return count
                continue
            self.step(busy.name)
            self.check()
        raise AssertionError("the requests do not finish")

    def wait_for_groups(self) -> bool:
        """Advance until the first held-off group is eligible again; return False if no group is held off or no request
        waits.
        """
        groups = (group for group in self.core.groups if group.is_held_off and not group.is_changing)
        held = [group.standing.held_until_ns for group in groups]
        if not held or not len(self.core.queue):
            return False
        self.wait_until(min(held))
        return True

    def wait_until(self, time_ns: int) -> None:
        """Advance the clock while workers send heartbeats."""
        while self.now_ns < time_ns:
            self.now_ns = min(time_ns, self.now_ns + self.config.worker_timeout_ns // 2)
            for group in self.groups.values():
                self.handle(WorkerBeat(self.now_ns, group.registration.connection, group.epoch, 0))
        self.turn()

    def kill(self, name: str) -> None:
        """Kill a worker without closing its connection, and wait until it times out."""
        del self.groups[name]
        self.advance(self.config.worker_timeout_ns // MS + 1)

    def cut(self, name: str) -> None:
        """Kill a worker and close its connection."""
        group = self.groups.pop(name)
        group.leave_blocks()
        self.handle(WorkerLost(self.now_ns, group.registration.connection))
        self.turn()

    def leave(self, name: str, *, leaves_blocks: bool = False) -> None:
        """Shut a worker down in an orderly way."""
        group = self.groups.pop(name)
        if leaves_blocks:
            group.leave_blocks()
        link = group.registration.connection
        self.handle(WorkerLeft(self.now_ns, link, group.epoch, leaves_blocks=leaves_blocks))

    def group(self, name: str = "g") -> WorkerGroup:
        """Return the core's object for a group."""
        return next(group for group in self.core.groups if group.group_id == name)

    def check(self) -> None:
        """Check that every group conserves its blocks, and that cached lookups of waiting requests are up to date."""
        for group in self.core.groups:
            for request in self.core.queue:
                for sequence in request.waiting_sequences:
                    found = group.tables.find(sequence)
                    num_cached = sum(group.blocks.num_owners(block) == 0 for block in found)
                    assert group.tables.hits(sequence) == Hits(len(found), num_cached)
            assert group.blocks.check(group.held_tables()) == []
            reserved = sum(
                s.num_reserved for request in group.active for s in request.placed_sequences if s.row is not None
            )
            assert group.tables.num_reserved_blocks == reserved
            rows = [s.row for request in group.active for s in request.placed_sequences if s.row is not None]
            assert len(set(rows)) == len(rows) == group.max_batch_size - group.num_free_rows

    def check_is_empty(self) -> None:
        """Check that every request has ended and that no block is in use."""
        self.check()
        assert self.core.lifecycle.num_unfinished == 0
        assert len(self.core.queue) == 0
        for group in self.core.groups:
            assert group.blocks.num_held == 0
            assert group.prefix_cache.num_pending == 0
            assert not group.context
            assert not group.generating
        assert self.core.totals.num_conservation_violations == 0


def own_prompt(request_id: str, length: int) -> list[int]:
    """Return a prompt whose first token differs from those of other requests' prompts."""
    first = sum(ord(letter) * (7**index) for index, letter in enumerate(request_id)) % 900
    return [first] + [(first + index) % 900 for index in range(1, length)]


def describe(plan: StepPlan, group: WorkerGroup) -> str:
    """Return a step as text: `+a b[0:4] | c d` lists context chunks (+ marks a new row), then generating requests.

    The names of requests that check others end with a question mark.
    """
    steps = (*group.in_flight, *group.checks.values())
    step = next(step for step in steps if step.step_id == plan.step_id)
    new = {added.row for added in plan.added}
    chunks = []
    for (row, sequence, length, *_), start in zip(step.context, plan.context_starts, strict=True):
        chunks.append(f"{'+' if row in new else ''}{_name(sequence)}[{start}:{start + length}]")
    generation = [_name(sequence) for sequence in step.generation]
    return " ".join(chunks) + (" | " if chunks and generation else "") + " ".join(generation)


def _name(sequence: Any) -> str:
    name: str = sequence.request.request_id + "?" * sequence.request.is_check
    return name if len(sequence.request.placed_sequences) == 1 else f"{name}/{sequence.index}"
