"""What full KV blocks hold, by the hashes that the scheduler gives them: a memory that outlasts the epoch.

The cache itself stays as it is when an epoch ends. So a worker that registers again says which blocks are still as the
steps that were done left them, and a scheduler that was started anew has only the newest tokens computed again.

A hash is noted when the step that it came with is done; it is dropped as soon as a step is received before or in which
the block may change, done or not. So whatever is noted holds at any moment, also while steps of an epoch that is over
still run. The hashes may lie in memory that outlasts the process, see `kv_store`: then it holds of its death as well.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from protos import worker_pb2


class KeptBlocks:
    """Used by the link's thread alone."""

    def __init__(
        self, hashes: NDArray[np.uint64], on_full: Callable[[list[tuple[int, int]]], None] | None = None
    ) -> None:
        """Know nothing yet.

        Args:
            hashes: [num_blocks], where they are noted besides, all 0 at first.
            on_full: Called with blocks and their hashes when a step has filled them.
        """
        self._memory, self._on_full = hashes, on_full
        self._hashes: dict[int, int] = {}
        self._to_come: dict[int, dict[int, int]] = {}

    def receive(self, step: worker_pb2.StepBatch) -> None:
        """Notes what is to become of blocks in a step that will be run."""
        new: dict[int, int] = {}
        for block, value in zip(step.hashed_blocks, step.block_hashes, strict=True):
            self._memory[block] = 0
            for hashes in (self._hashes, *self._to_come.values(), new):
                hashes.pop(block, None)
            if value:
                new[block] = value
        if new:
            self._to_come[step.step_id] = new

    def finish(self, step_id: int, *, is_whole: bool) -> None:
        """Notes what blocks hold now that a step of this epoch is done; nothing where not all of it was computed."""
        new = self._to_come.pop(step_id, {})
        if is_whole:
            self._hashes |= new
            for block, value in new.items():
                self._memory[block] = value
            if new and self._on_full is not None:
                self._on_full([*new.items()])

    def end_epoch(self) -> None:
        """Forgets steps in flight: whether they were done is unknown."""
        self._to_come.clear()

    def clear(self) -> None:
        """Forgets all, after a step that failed half-way."""
        self._hashes.clear()
        self._memory[:] = 0
        self._to_come.clear()

    def write(self, register: worker_pb2.Register) -> None:
        """Puts all that is known into a registration."""
        register.ClearField("kept_blocks")
        register.ClearField("kept_hashes")
        register.kept_blocks.extend(self._hashes)
        register.kept_hashes.extend(self._hashes.values())
