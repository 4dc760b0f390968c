"""Content hashes of full KV blocks, kept across epochs.

The cache keeps its contents when an epoch ends. A worker that registers again therefore reports which blocks still have
the contents that completed steps wrote, so that a restarted scheduler recomputes only the newest tokens.

A hash is recorded when the step that carried it completes. It is dropped as soon as a step arrives before or during
which the block may change, whether or not that step completes. Every recorded hash is therefore valid at any moment,
even while steps of a past epoch still run. The hashes may be stored in memory that outlasts the process (see
`shared_store`); they stay valid then.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from protos import worker_pb2


class KeptBlocks:
    """Records the hashes of full blocks. Must be used only with the link's lock held."""

    def __init__(
        self, hashes: NDArray[np.uint64], on_full: Callable[[list[tuple[int, int]]], None] | None = None
    ) -> None:
        """Start without any hashes.

        Args:
            hashes: [num_blocks], an array that mirrors the hashes, initially all 0.
            on_full: Called with blocks and their hashes when a step has filled them.
        """
        self._memory, self._on_full = hashes, on_full
        self._hashes: dict[int, int] = {}
        self._to_come: dict[int, dict[int, int]] = {}

    def receive(self, step: worker_pb2.StepBatch) -> None:
        """Drop the hashes of blocks that a received step may change, and remember the blocks that it will fill."""
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
        """Record the blocks that a completed step of this epoch filled, unless a part of the step was not computed."""
        new = self._to_come.pop(step_id, {})
        if is_whole:
            self._hashes |= new
            for block, value in new.items():
                self._memory[block] = value
            if new and self._on_full is not None:
                self._on_full([*new.items()])

    def end_epoch(self) -> None:
        """Forget the steps in flight, which may or may not complete."""
        self._to_come.clear()

    def clear(self) -> None:
        """Drop all hashes, because a step has failed midway."""
        self._hashes.clear()
        self._memory[:] = 0
        self._to_come.clear()

    def write(self, register: worker_pb2.Register) -> None:
        """Add all recorded hashes to a registration message."""
        register.ClearField("kept_blocks")
        register.ClearField("kept_hashes")
        register.kept_blocks.extend(self._hashes)
        register.kept_hashes.extend(self._hashes.values())
