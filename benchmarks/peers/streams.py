"""Compute figures from the arrival times of tokens, as `midstream bench` does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .peer import Figures, Workload


@dataclass(frozen=True, slots=True)
class Stream:
    """One request as seen by its client; times in seconds.

    Attributes:
        arrivals: Time and number of tokens of each chunk.
    """

    started: float
    arrivals: list[tuple[float, int]]


def stream_figures(workload: Workload, streams: Sequence[Stream], duration_s: float) -> Figures:
    """Return the figures of one run.

    Raises:
        ValueError: A stream had the wrong number of tokens.
    """
    for request, stream in zip(workload.requests, streams, strict=True):
        count = sum(count for _, count in stream.arrivals)
        if count != request.max_tokens:
            raise ValueError(f"got {count} tokens instead of {request.max_tokens}")
    first = [(stream.arrivals[0][0] - stream.started) * 1e3 for stream in streams]
    gaps = [gap for stream in streams for gap in _inter_token_gaps_ms(stream)]
    return Figures(
        workload=workload.name,
        tokens_per_s=workload.num_counted_tokens / duration_s,
        duration_s=duration_s,
        ttft_ms=(percentile(first, 0.5), percentile(first, 0.99)),
        inter_token_ms=(percentile(gaps, 0.5), percentile(gaps, 0.99)) if gaps else None,
    )


def _inter_token_gaps_ms(stream: Stream) -> list[float]:
    gaps: list[float] = []
    for (before, _), (now, count) in zip(stream.arrivals, stream.arrivals[1:], strict=False):
        gaps.extend([(now - before) * 1e3 / count] * count)  # the tokens of one chunk share its gap evenly
    return gaps


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value at `share` (0..1), by nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
