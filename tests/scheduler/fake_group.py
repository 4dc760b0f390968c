"""A worker group without sockets or a model."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from gpu_worker.kv.kept_blocks import KeptBlocks
from protos import worker_pb2
from scheduler.core.effects import FetchBlocks, StepPlan
from scheduler.core.events import BlocksFetched, StepDone, WorkerBeat, WorkerRegistered
from scheduler.wire.worker_messages import decode_worker_message
from tests.fakes.model import FakeModel

Store = list[tuple[NDArray[np.uint64], list[list[int]]]]


class FakeGroup:
    """A worker group in memory, with queued plans and undelivered results.

    Attributes:
        store: Hashes and slots of the pools of dead groups.
        num_adopted: Number of blocks filled from the store or from fetched data.
        tier: Slots of its stored blocks by hash; other groups may use the same tier. None if it has no tier.
        fetches: Fetches requested from other groups.
        staged: Slots of fetched blocks, by hash.
    """

    def __init__(
        self,
        name: str,
        registration: WorkerRegistered,
        model: FakeModel,
        store: Store,
        tier: dict[int, list[int]] | None = None,
    ) -> None:
        self.store, self.num_adopted = store, 0
        self.tier, self._news = tier, list[int]()
        self.fetches: deque[FetchBlocks] = deque()
        self.staged: dict[int, list[int]] = {}
        self.name = name
        self.registration = registration
        self.model = model
        self.epoch = 0
        self.hashes = np.zeros(registration.num_blocks, dtype=np.uint64)
        self.kept = KeptBlocks(self.hashes, self._store_blocks)
        self.plans: deque[StepPlan] = deque()
        self.batches: deque[worker_pb2.StepBatch] = deque()

    def _store_blocks(self, blocks: list[tuple[int, int]]) -> None:
        if self.tier is not None:
            self.tier |= {value: list(self.model.slots[block]) for block, value in blocks}
            self._news += [value for _, value in blocks]

    def take_beat(self, time_ns: int) -> WorkerBeat | None:
        """Return a heartbeat with the blocks stored since the last heartbeat, or None if there are none."""
        stored, self._news = tuple(self._news), []
        if not stored:
            return None
        return WorkerBeat(time_ns, self.registration.connection, self.epoch, 0, (0, 0, 0), stored)

    def leave_blocks(self) -> None:
        """Simulate the death of the process, which leaves its blocks to the other groups with the same store."""
        self.store.append((self.hashes, self.model.slots))

    def _adopt(self, batch: worker_pb2.StepBatch) -> list[int]:
        """Fill blocks from tiers or from the pools of dead groups; return the blocks that were not found."""
        missing = []
        for block, value in zip(batch.adopted_blocks, batch.adopted_hashes, strict=True):
            if value in self.staged:
                self.model.slots[block] = self.staged.pop(value)
                self.num_adopted += 1
                continue
            if self.tier is not None and value in self.tier:
                found = self.tier[value]
                if value % 8 == 0:  # every eighth block is damaged; it is removed and counts as missing
                    del self.tier[value]
                    missing.append(block)
                    continue
                self.model.slots[block] = list(found)
                self.num_adopted += 1
                continue
            for hashes, slots in self.store:
                (places,) = np.nonzero(hashes == np.uint64(value))
                if len(places):
                    self.model.slots[block] = list(slots[places[0]])
                    self.num_adopted += 1
                    break
            else:
                missing.append(block)
        return missing

    def fetch(self, time_ns: int, sources: Iterable[FakeGroup], most: int | None = None) -> BlocksFetched:
        """Execute the oldest fetch, at most for its first `most` blocks; report the others as not found."""
        fetch = self.fetches.popleft()
        fetched: list[int] = []
        for value in fetch.hashes[:most]:
            for source in sources:
                (places,) = np.nonzero(source.hashes == np.uint64(value))
                if source.registration.kv_source == fetch.kv_source and len(places):
                    self.staged[value] = list(source.model.slots[places[0]])
                    fetched.append(value)
                    break
        missing = tuple(value for value in fetch.hashes if value not in fetched)
        return BlocksFetched(time_ns, self.registration.connection, fetch.epoch, tuple(fetched), missing)

    def run(self, time_ns: int) -> StepDone:
        """Run the oldest step; the plan and the result pass through the wire format."""
        self.plans.popleft()
        batch = self.batches.popleft()
        missing = self._adopt(batch)
        result = self.model.step(batch)
        result.missing_blocks.extend(missing)
        frame = worker_pb2.WorkerMessage(step_result=result).SerializeToString()
        event = decode_worker_message(frame, self.registration.connection, time_ns)
        assert isinstance(event, StepDone)
        failed = {error.row for error in result.errors}
        self.kept.finish(event.step_id, is_whole=failed.isdisjoint(batch.context_rows))
        return event

    def keep(self, batch: worker_pb2.StepBatch) -> None:
        """Queue a step batch."""
        self.kept.receive(batch)
        self.batches.append(batch)

    def begin_anew(self) -> worker_pb2.Register:
        """End the epoch but keep the process and its blocks; return the message for the next registration."""
        self.kept.end_epoch()
        register = worker_pb2.Register()
        self.kept.write(register)
        return register
