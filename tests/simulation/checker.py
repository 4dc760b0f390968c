"""Checks of invariants at every event: commit before delivery, epochs, block conservation, and a single end per
request.
"""

from __future__ import annotations

from collections.abc import Callable

from protos import scheduler_pb2
from scheduler.core.core import SchedulerCore
from scheduler.core.effects import Effect, Emitted, RequestEnded
from scheduler.core.events import Event, Recovered, StepDone, WorkerBeat
from tests.simulation.journal import JournalDisk
from tests.simulation.workload import Job


class Checker:
    """Checks the invariants, and keeps the results.

    Attributes:
        problems: Descriptions of the violations.
        num_stale: Number of messages dropped because of a stale epoch.
        finishes: Finish reasons of each request, one per scheduler that ended it.
    """

    def __init__(self, disk: JournalDisk) -> None:
        self._disk = disk
        self._streams: dict[object, dict[int, str]] = {}
        self.problems: list[str] = []
        self.num_stale = 0
        self.num_deaths = 0
        self.num_preemptions = 0
        self.finishes: dict[str, list[str]] = {}

    def watch(self, core: SchedulerCore) -> Callable[[Event, list[Effect]], None]:
        """Return a function that checks each event of a scheduler and its effects."""
        epochs: set[int] = set()
        ended: set[str] = set()

        def check(event: Event, effects: list[Effect]) -> None:
            if isinstance(event, StepDone | WorkerBeat) and event.epoch not in epochs:
                self.num_stale += 1
                if any(isinstance(effect, Emitted) for effect in effects):
                    self.problems.append(f"a result of the stale epoch {event.epoch} was accepted")
            if isinstance(event, Recovered) and event.finish is not None:
                ended.add(event.spec.request_id)
            for effect in effects:
                if isinstance(effect, RequestEnded):
                    self._note_end(effect, ended)
            for group in core.membership.groups.values():
                if not group.blocks.is_conserved:
                    self.problems.append(f"blocks of {group.group_id} are not conserved")
            epochs.clear()
            epochs.update(core.membership.groups)
            self.num_deaths = core.totals.num_worker_deaths
            self.num_preemptions = max(self.num_preemptions, core.totals.num_preemptions)

        return check

    def _note_end(self, effect: RequestEnded, ended: set[str]) -> None:
        request = effect.request
        if request.request_id in ended:
            self.problems.append(f"{request.request_id} ended twice")
        ended.add(request.request_id)
        reasons = "+".join(item.end.reason.name for item in request.sequences if item.end is not None)
        self.finishes.setdefault(request.request_id, []).append(reasons)

    def check_fed(self, call: object, message: object) -> None:
        """Check that tokens sent to detokenizers are committed."""
        if not isinstance(message, scheduler_pb2.FeedBatch):
            return
        names = self._streams.setdefault(call, {})
        names.update((opened.stream, opened.request_id) for opened in message.opened)
        indices = message.sequence_indices[:] or [0] * len(message.streams)
        counts = message.num_tokens[:] or [1] * len(message.streams)
        for stream, index, start, count in zip(message.streams, indices, message.token_offsets, counts, strict=True):
            committed = self._disk.num_committed.get((names[stream], index), 0)
            if start + count > committed:
                self.problems.append(
                    f"{start + count} tokens of {names[stream]} were sent, but only {committed} are committed"
                )

    def check_shown(self, job: Job) -> None:
        """Check that the tokens shown to a client are committed."""
        for index, tokens in enumerate(job.tokens):
            committed = self._disk.num_committed.get((job.request.request_id, index), 0)
            if len(tokens) > committed:
                self.problems.append(
                    f"{job.request.request_id} shows {len(tokens)} tokens, but only {committed} are committed"
                )

    def check_rest(self, core: SchedulerCore) -> None:
        """Check that all blocks are free once all requests have ended."""
        if core.lifecycle.num_unfinished:
            left = [item.request_id for item in core.lifecycle.requests.values() if item.times.finished_ns == 0]
            self.problems.append(f"{left} have not ended")
            return
        for group in core.groups:
            blocks = group.blocks
            problems = blocks.check([])
            if blocks.num_available != blocks.num_blocks or group.tables.num_reserved_blocks or group.active:
                problems.append(
                    f"{blocks.num_available} of {blocks.num_blocks} blocks are free, {len(group.active)} requests run"
                )
            self.problems.extend(f"{group.group_id}: {problem}" for problem in problems)
