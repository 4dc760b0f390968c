"""What the scheduler says of its latest iteration, under TensorRT-LLM's names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class IterationStats:
    """One iteration; `fields` has everything, with the names of TensorRT-LLM's JSON."""

    fields: Mapping[str, object]

    @property
    def num_active_requests(self) -> int:
        """Requests that hold or wait for blocks."""
        return self._count("numActiveRequests")

    @property
    def num_queued_requests(self) -> int:
        """Requests that wait to be taken."""
        return self._count("numQueuedRequests")

    @property
    def num_completed_requests(self) -> int:
        """Requests that ended since the scheduler started."""
        return self._count("numCompletedRequests")

    @property
    def max_num_active_requests(self) -> int:
        """Most requests that may be active."""
        return self._count("maxNumActiveRequests")

    @property
    def current_batch_size(self) -> int:
        """Requests in the iteration's step."""
        for name in ("inflightBatchingStats", "staticBatchingStats"):
            batch = self.fields.get(name)
            if isinstance(batch, Mapping):
                return int(batch["numScheduledRequests"])
        return 0

    def to_json(self) -> str:
        """TensorRT-LLM's JSON."""
        return json.dumps(self.fields)

    def _count(self, name: str) -> int:
        return int(str(self.fields.get(name, 0)))
