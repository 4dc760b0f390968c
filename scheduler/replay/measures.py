"""Measurements of a run of the core, over time and in total, from a replay or a simulation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from rich.table import Table

from midstream.errors import ConfigError
from scheduler.core.effects import Effect, Emitted, IterationDone, Refused, RequestEnded
from scheduler.core.request import Request, Sequence
from scheduler.core.stats import IterationStats

_NS_PER_S = 1e9
_NS_PER_MS = 1e6
# Maximum number of time buckets; above it, pairs of buckets are merged.
_MAX_BUCKETS = 512
# Bins of times between tokens, per factor e.
_BINS = 100


@dataclass(slots=True)
class Bucket:
    """Sums over the iterations within one time interval."""

    num_iterations: int = 0
    batch_size: int = 0
    queue: int = 0
    kv_use: float = 0.0
    num_tokens: int = 0
    num_first_tokens: int = 0
    first_token_ns: int = 0

    def add(self, other: Bucket) -> None:
        """Add the sums of another bucket."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def mean(self, name: str) -> float:
        """Return the mean per iteration."""
        total: float = getattr(self, name)
        return total / self.num_iterations if self.num_iterations else 0.0


@dataclass(slots=True)
class Gaps:
    """Times between two consecutive tokens of a sequence, counted to within 1%."""

    _counts: Counter[int] = field(default_factory=Counter)
    _last_ns: dict[Sequence, int] = field(default_factory=dict)

    def note(self, emitted: Emitted) -> None:
        """Count the times between new tokens and those before them; tokens of one step come at the same time."""
        for sequence in emitted.sequences:
            at_ns, before_ns = sequence.last_token_ns, self._last_ns.get(sequence)
            self._last_ns[sequence] = at_ns
            if before_ns is not None and at_ns > before_ns:
                self._counts[round(_BINS * math.log(at_ns - before_ns))] += 1

    def forget(self, request: Request) -> None:
        """Drop what is kept of an ended request's sequences."""
        for sequence in request.sequences:
            self._last_ns.pop(sequence, None)

    def quantile(self, share: float) -> float:
        """Return the quantile in nanoseconds; 0 if no time was counted."""
        left = int(self._counts.total() * share)
        for number, count in sorted(self._counts.items()):
            left -= count
            if left < 0:
                return math.exp(number / _BINS)
        return 0.0


@dataclass(slots=True)
class Measures:
    """Measurements of one run, in nanoseconds; `tokens_ns` has each request's mean time per token after the first."""

    buckets: dict[int, Bucket] = field(default_factory=dict)
    bucket_ns: int = 10_000_000
    begin_ns: int = 0
    end_ns: int = 0
    num_by_reason: dict[str, int] = field(default_factory=dict)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    max_queue: int = 0
    max_kv_use: float = 0.0
    first_token_ns: list[int] = field(default_factory=list)
    tokens_ns: list[float] = field(default_factory=list)
    end_to_end_ns: list[int] = field(default_factory=list)
    gaps: Gaps = field(default_factory=Gaps)

    def note(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, IterationDone):
                self._note_iteration(effect.stats)
            elif isinstance(effect, Emitted):
                self.gaps.note(effect)
            elif isinstance(effect, RequestEnded):
                self._note_end(effect.request)
            elif isinstance(effect, Refused):
                self.num_by_reason["refused"] = self.num_by_reason.get("refused", 0) + 1

    def _note_iteration(self, stats: IterationStats) -> None:
        bucket = self._bucket(stats.time_ns)
        bucket.num_iterations += 1
        bucket.batch_size += stats.step.num_scheduled_requests
        bucket.queue += stats.requests.num_queued
        bucket.num_tokens += stats.step.num_decoded_tokens
        kv_use = stats.kv.num_used / stats.kv.num_blocks
        bucket.kv_use += kv_use
        self.max_queue = max(self.max_queue, stats.requests.num_queued)
        self.max_kv_use = max(self.max_kv_use, kv_use)
        self.end_ns = max(self.end_ns, stats.time_ns)

    def _note_end(self, request: Request) -> None:
        self.gaps.forget(request)
        times, end = request.times, request.sequences[0].end
        assert end is not None
        reason = end.reason.name.lower()
        self.num_by_reason[reason] = self.num_by_reason.get(reason, 0) + 1
        self.num_prompt_tokens += len(request.spec.prompt)
        self.num_cached_tokens += request.counters.num_cached_tokens
        self.num_output_tokens += request.num_output_tokens
        self.num_preemptions += request.counters.num_preemptions
        if times.first_token_ns:
            first_ns = times.first_token_ns - times.queued_ns
            self.first_token_ns.append(first_ns)
            self.end_to_end_ns.append(times.finished_ns - times.queued_ns)
            bucket = self._bucket(times.first_token_ns)
            bucket.num_first_tokens += 1
            bucket.first_token_ns += first_ns
            if end.num_tokens > 1:
                self.tokens_ns.append((times.last_token_ns - times.first_token_ns) / (end.num_tokens - 1))

    def _bucket(self, time_ns: int) -> Bucket:
        if not self.begin_ns:
            self.begin_ns = time_ns
        while (index := (time_ns - self.begin_ns) // self.bucket_ns) >= _MAX_BUCKETS:
            self.bucket_ns *= 2
            buckets, self.buckets = self.buckets, {}
            for number, bucket in buckets.items():
                self.buckets.setdefault(number // 2, Bucket()).add(bucket)
        return self.buckets.setdefault(index, Bucket())

    def percentile_ns(self, name: str, share: float) -> float:
        """Return the quantile `share` of the times to the first token (`ttft`), between tokens (`itl`), or from arrival
        to end (`e2e`).
        """
        if name == "itl":
            return self.gaps.quantile(share)
        return quantile({"ttft": self.first_token_ns, "e2e": self.end_to_end_ns}[name], share)

    def _quantile_rows(self, title: str, name: str) -> list[tuple[str, str]]:
        return [(f"{title}, ms: p{p}", f"{self.percentile_ns(name, p / 100) / _NS_PER_MS:.1f}") for p in (50, 95, 99)]

    @property
    def duration_s(self) -> float:
        """Duration in seconds, from the first iteration to the last."""
        return max(self.end_ns - self.begin_ns, 1) / _NS_PER_S

    def rows(self) -> list[tuple[str, str]]:
        """Return (name, value) pairs for a table."""
        total = Bucket()
        for bucket in self.buckets.values():
            total.add(bucket)
        ended = ", ".join(f"{count} {reason}" for reason, count in sorted(self.num_by_reason.items()))
        cached = self.num_cached_tokens / max(self.num_prompt_tokens, 1)
        return [
            ("requests ended", ended or "none"),
            ("duration, s", f"{self.duration_s:.1f}"),
            ("steps", f"{total.num_iterations}"),
            ("output tokens per s", f"{self.num_output_tokens / self.duration_s:.1f}"),
            ("prompt tokens cached", f"{cached:.1%}"),
            *self._quantile_rows("time to first token", "ttft"),
            *self._quantile_rows("between tokens", "itl"),
            *self._quantile_rows("end to end", "e2e"),
            ("rows per step, mean", f"{total.mean('batch_size'):.1f}"),
            ("queue: mean / most", f"{total.mean('queue'):.1f} / {self.max_queue}"),
            ("KV use: mean / most", f"{total.mean('kv_use'):.1%} / {self.max_kv_use:.1%}"),
            ("pauses", str(self.num_preemptions)),
        ]


def quantile(values: Iterable[float], share: float) -> float:
    """Return the quantile `share` of the values; 0 if there are none."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)] if ordered else 0.0


def table(columns: dict[str, Measures]) -> Table:
    """Return a table with one column per run."""
    result = Table(box=None)
    result.add_column("", no_wrap=True)
    for name in columns:
        result.add_column(name, justify="right", no_wrap=True)
    for lines in zip(*(measures.rows() for measures in columns.values()), strict=True):
        result.add_row(lines[0][0], *(value for _, value in lines))
    return result


def plot(columns: dict[str, Measures], path: Path) -> None:
    """Plot rows per step, queue, KV use and time to first token over time. Raises ConfigError if matplotlib is not
    installed, or the file's format is unknown.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("needs matplotlib: pip install 'midstream[plots]'", field="--plot") from None
    figure = Figure(figsize=(10, 10), layout="constrained")
    titles = {"batch_size": "rows per step", "queue": "queue", "kv_use": "KV use", "first_token": "first token, ms"}
    for axes, (name, title) in zip(figure.subplots(4, 1, sharex=True), titles.items(), strict=True):
        for label, measures in columns.items():
            points = [(index * measures.bucket_ns / _NS_PER_S, b) for index, b in sorted(measures.buckets.items())]
            if name == "first_token":
                ys = [(x, b.first_token_ns / b.num_first_tokens / _NS_PER_MS) for x, b in points if b.num_first_tokens]
            else:
                ys = [(x, b.mean(name)) for x, b in points if b.num_iterations]
            axes.plot([x for x, _ in ys], [y for _, y in ys], label=label, linewidth=1)
        axes.set_ylabel(title)
        axes.set_ylim(bottom=0)
    figure.axes[0].legend(loc="upper right")
    figure.axes[-1].set_xlabel("seconds")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(str(error), field="--plot") from None
