"""Recent rates and latencies, from each scheduler's counters. No clock is read; the time is an argument."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from protos import status_pb2

LATENCY_WINDOW_S = 10
HISTORY_S = 300
# Minimum window for rates; over the few milliseconds between close readings they would be too noisy.
_RATE_WINDOW_S = 0.9


@dataclass(frozen=True, slots=True)
class _Reading:
    """The status, at one time, of all schedulers that responded, by scheduler address."""

    time_s: float
    cells: Mapping[str, status_pb2.CellStatus]


class Samples:
    """Samples over all cells, one per reading; those of the last few minutes are kept.

    Attributes:
        kept: The kept samples, oldest first.
        last_number: Number of the newest sample, counted from 1.
    """

    def __init__(self) -> None:
        self.kept: deque[status_pb2.StatusSample] = deque(maxlen=HISTORY_S)
        self.last_number = 0
        self._readings: deque[_Reading] = deque()

    def since(self, number: int) -> list[status_pb2.StatusSample]:
        """Return the kept samples whose numbers are greater than `number`."""
        num_new = min(self.last_number - number, len(self.kept))
        return list(self.kept)[len(self.kept) - num_new :]

    def add(self, time_s: float, cells: Mapping[str, status_pb2.CellStatus]) -> None:
        """Add a reading, and set each worker group's steps per second.

        Args:
            time_s: Unix time in seconds.
            cells: Status of each scheduler that responded, by address.
        """
        reading = _Reading(time_s, cells)
        while self._readings and self._readings[0].time_s < time_s - LATENCY_WINDOW_S - 0.5:
            self._readings.popleft()
        self._readings.append(reading)
        sample = _levels(reading)
        before = self._reading_before(time_s - _RATE_WINDOW_S)
        if time_s > before.time_s:
            _fill_rates(sample, before, reading)
        self._fill_latencies(sample)
        self.kept.append(sample)
        self.last_number += 1

    def _reading_before(self, time_s: float) -> _Reading:
        """Return the newest reading taken at or before `time_s`; if there is none, the oldest reading."""
        old = [reading for reading in self._readings if reading.time_s <= time_s]
        return old[-1] if old else self._readings[0]

    def _fill_latencies(self, sample: status_pb2.StatusSample) -> None:
        first, last = self._readings[0], self._readings[-1]
        for name, half, most in (
            ("time_to_first_token", "time_to_first_token_p50_ms", "time_to_first_token_p95_ms"),
            ("inter_token_latency", "inter_token_p50_ms", "inter_token_p95_ms"),
            ("queue_time", "", "queue_time_p95_ms"),
        ):
            bounds, counts = _between(first, last, name)
            if sum(counts):
                if half:
                    setattr(sample, half, quantile(bounds, counts, 0.5))
                setattr(sample, most, quantile(bounds, counts, 0.95))


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float:
    """Return the `share`-quantile of a histogram, interpolated linearly within buckets.

    Args:
        bounds: Upper bounds of the buckets, ascending from above 0; there is one more bucket above them.
        counts: Number of values in each bucket; there must be at least one value in total.
        share: Which quantile to return, from 0 to 1.
    """
    rank, below = share * sum(counts), 0
    for index, count in enumerate(counts):
        if count and below + count >= rank:
            if index == len(bounds):
                break
            lower = bounds[index - 1] if index else 0.0
            return lower + (bounds[index] - lower) * (rank - below) / count
        below += count
    return bounds[-1]


def _levels(reading: _Reading) -> status_pb2.StatusSample:
    requests = [cell.requests for cell in reading.cells.values()]
    groups = [group for cell in reading.cells.values() for group in cell.groups]
    num_blocks = sum(group.num_blocks for group in groups)
    return status_pb2.StatusSample(
        time_unix_ms=round(reading.time_s * 1e3),
        num_running=sum(item.num_context + item.num_generation for item in requests),
        num_waiting=sum(item.num_queued + item.num_paused for item in requests),
        kv_usage=sum(group.num_held_blocks for group in groups) / num_blocks if num_blocks else 0.0,
    )


def _fill_rates(sample: status_pb2.StatusSample, before: _Reading, after: _Reading) -> None:
    elapsed_s = after.time_s - before.time_s
    num_generated = num_prompt = 0
    for name, cell in after.cells.items():
        earlier = _same_life(before, name, cell)
        if earlier is None:
            continue
        num_generated += cell.counts.num_generated_tokens - earlier.counts.num_generated_tokens
        num_prompt += cell.counts.num_prompt_tokens - earlier.counts.num_prompt_tokens
        num_steps = {(group.group_id, group.epoch): group.num_steps for group in earlier.groups}
        for group in cell.groups:
            done = group.num_steps - num_steps.get((group.group_id, group.epoch), group.num_steps)
            group.steps_per_s = done / elapsed_s
    sample.generated_tokens_per_s = num_generated / elapsed_s
    sample.prompt_tokens_per_s = num_prompt / elapsed_s


def _between(before: _Reading, after: _Reading, name: str) -> tuple[list[float], list[int]]:
    """Return the growth of counters between two readings, summed over all cells."""
    totals: dict[float, int] = {}
    for cell_name, cell in after.cells.items():
        earlier = _same_life(before, cell_name, cell)
        if earlier is None:
            continue
        now, then = getattr(cell, name), getattr(earlier, name)
        # A scheduler of another version may report fewer fields.
        for bound, count, old in zip((*now.bounds_ms, float("inf")), now.counts, then.counts, strict=False):
            totals[bound] = totals.get(bound, 0) + count - old
    bounds = sorted(totals)
    return bounds[:-1], [totals[bound] for bound in bounds]


def _same_life(reading: _Reading, name: str, cell: status_pb2.CellStatus) -> status_pb2.CellStatus | None:
    """Return the cell's status in an earlier reading; None if the cell's scheduler has restarted since then."""
    earlier = reading.cells.get(name)
    if earlier is None or earlier.scheduler_epoch != cell.scheduler_epoch:
        return None
    return earlier
