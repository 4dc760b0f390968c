"""Iteration statistics with TensorRT-LLM's names."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# The labels in TensorRT-LLM's batch manager documentation, with the path to each value.
_LABELS = {
    "": {
        "Timestamp": "timestamp",
        "Iteration Counter": "iter",
        "Active Request Count": "numActiveRequests",
        "Max Request Count": "maxNumActiveRequests",
    },
    "kvCacheStats": {
        "Max KV cache blocks": "maxNumBlocks",
        "Free KV cache blocks": "freeNumBlocks",
        "Used KV cache blocks": "usedNumBlocks",
        "Tokens per KV cache block": "tokensPerBlock",
    },
    "inflightBatchingStats": {
        "Scheduled Requests": "numScheduledRequests",
        "Context Requests": "numContextRequests",
        "Generation Requests": "numGenRequests",
        "Total Context Tokens": "numCtxTokens",
        "MicroBatch ID": "microBatchId",
    },
    "staticBatchingStats": {"Total Generation Tokens": "numGenTokens", "Empty Generation Slots": "emptyGenSlots"},
}
# Statistics for which the maximum over cells is used, statistics that are equal in all cells, and ratios, which are
# computed from the sums of other statistics. Most other numbers are summed.
_LARGEST = {"iter", "iterLatencyMS", "newActiveRequestsQueueLatencyMS", "microBatchId"}
_SAME = {"tokensPerBlock"}
_RATIOS = {
    "cacheHitRate": ("reusedBlocks", ("reusedBlocks", "missedBlocks")),
    "acceptanceRate": ("numAcceptedTokens", ("numDraftTokens",)),
}


@dataclass(frozen=True, slots=True)
class IterationStats:
    """Statistics of one iteration.

    Attributes:
        fields: All values, with TensorRT-LLM's JSON names.
        cells: The statistics of each cell, if this is their sum.
    """

    fields: Mapping[str, object]
    cells: Sequence[IterationStats] = ()

    @property
    def num_active_requests(self) -> int:
        """Number of requests that hold KV blocks or wait for them."""
        return self._count("numActiveRequests")

    @property
    def num_queued_requests(self) -> int:
        """Number of requests waiting to be scheduled."""
        return self._count("numQueuedRequests")

    @property
    def num_completed_requests(self) -> int:
        """Number of requests that have ended since the scheduler started."""
        return self._count("numCompletedRequests")

    @property
    def max_num_active_requests(self) -> int:
        """Maximum number of active requests."""
        return self._count("maxNumActiveRequests")

    @property
    def current_batch_size(self) -> int:
        """Number of requests in the iteration's step."""
        for name in ("inflightBatchingStats", "staticBatchingStats"):
            batch = self.fields.get(name)
            if isinstance(batch, Mapping):
                return int(batch["numScheduledRequests"])
        return 0

    def labelled(self) -> dict[str, object]:
        """Return the statistics under the labels used in the batch manager's documentation."""
        labelled: dict[str, object] = {}
        for part, labels in _LABELS.items():
            fields = self.fields.get(part) if part else self.fields
            if isinstance(fields, Mapping):
                labelled |= {label: _number(fields[name]) for label, name in labels.items() if name in fields}
        labelled["Timestamp"] = str(self.fields.get("timestamp", "")).partition(".")[0]
        return labelled

    def to_json(self) -> str:
        """Return the statistics in TensorRT-LLM's JSON format."""
        return json.dumps(self.fields)

    def _count(self, name: str) -> int:
        return int(str(self.fields.get(name, 0)))


def sum_up(cells: Sequence[Mapping[str, object]]) -> IterationStats:
    """Combine statistics of several cells: sums of counts, blocks and bytes; maxima of iteration ids and latencies."""
    if len(cells) < 2:
        return IterationStats(cells[0] if cells else {})
    return IterationStats(_sum(cells), tuple(IterationStats(cell) for cell in cells))


def _sum(cells: Sequence[Mapping[str, object]]) -> dict[str, object]:
    total: dict[str, object] = {}
    for name in dict.fromkeys(name for cell in cells for name in cell):
        values = [cell[name] for cell in cells if name in cell]
        if all(isinstance(value, Mapping) for value in values):
            total[name] = _sum([value for value in values if isinstance(value, Mapping)])
        elif name == "timestamp":
            total[name] = max(str(value) for value in values)
        elif name == "groupId":
            total[name] = ""
        else:
            total[name] = _combined(name, [_number(value) for value in values])
    for name, (part, whole) in _RATIOS.items():
        if name in total:
            size = sum(_float(total.get(item, 0)) for item in whole)
            total[name] = _float(total.get(part, 0)) / size if size else 0.0
    if "avgNumDecodedTokensPerIter" in total:
        total["avgNumDecodedTokensPerIter"] = _average(cells)
    return total


def _combined(name: str, values: Sequence[object]) -> object:
    numbers = [value for value in values if isinstance(value, int | float)]
    if len(numbers) < len(values):
        return values[0]
    return max(numbers) if name in _LARGEST | _SAME else sum(numbers)


def _average(cells: Sequence[Mapping[str, object]]) -> float:
    """Return the average number of tokens per scheduled request over all cells."""
    requests = [_float(cell.get("numScheduledRequests", 0)) for cell in cells]
    tokens = sum(
        count * _float(cell.get("avgNumDecodedTokensPerIter", 0)) for count, cell in zip(requests, cells, strict=True)
    )
    return tokens / sum(requests) if sum(requests) else 0.0


def _number(value: object) -> object:
    """Return the value; protobuf's JSON encodes 64-bit integers as strings."""
    return int(value) if isinstance(value, str) and value.isdigit() else value


def _float(value: object) -> float:
    return float(str(value))
