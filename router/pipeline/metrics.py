"""Metrics of a router's clients, and a periodic throughput line in the log while there is traffic."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from midstream.telemetry import PREFIX, Metrics
from router.pipeline.gen_ai_metrics import GenAiMetrics

logger = logging.getLogger(__name__)


class RouterMetrics(Collector):
    """Metrics of this router's clients. Only the event loop changes them; the metrics thread reads them at each scrape.

    Attributes:
        num_ended: Number of requests that have ended so far, for the throughput log.
        gen_ai: OpenTelemetry's metrics, if a collector is set.
    """

    def __init__(self, metrics: Metrics, *, logs_requests: bool = False, gen_ai: GenAiMetrics | None = None) -> None:
        self.num_tokens = self.num_ended = 0
        self.num_succeeded = Counter[str]()
        self.gen_ai = gen_ai
        self._request_level = logging.INFO if logs_requests else logging.DEBUG
        self.first_token = metrics.histogram("time_to_first_token_seconds", "Time from arrival to first output.")
        self.inter_token = metrics.histogram("inter_token_latency_seconds", "Time per token after the first.")
        self.request = metrics.histogram("e2e_request_latency_seconds", "Time from arrival to last output.")
        metrics.registry.register(self)

    def count_tokens(self, num_tokens: int) -> None:
        """Count tokens of clients whose answers are sent as a whole, once they are computed."""
        self.num_tokens += num_tokens

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families of the counters."""
        yield CounterMetricFamily(
            PREFIX + "relayed_tokens", "Tokens for clients, as they are computed.", self.num_tokens
        )
        ended = CounterMetricFamily(PREFIX + "request_success", "Ended requests.", labels=("finished_reason",))
        for reason, count in self.num_succeeded.copy().items():
            ended.add_metric((reason,), count)
        yield ended

    def log_end(self, reason: str, duration_s: float, first_s: float | None, num_tokens: int) -> None:
        """Log that a request has ended; its id is in the logging context."""
        self.num_ended += 1
        if logger.isEnabledFor(self._request_level):
            extra = {
                "finish_reason": reason,
                "num_output_tokens": num_tokens,
                "duration_s": round(duration_s, 4),
                "first_token_s": None if first_s is None else round(first_s, 4),
            }
            logger.log(self._request_level, "a request ended: %s", reason, extra=extra)


async def log_throughput(models: Sequence[RouterMetrics], num_open: Callable[[], int], interval_s: float) -> None:
    """Log tokens per second, open streams and the number of ended requests every `interval_s`, until cancelled."""

    def counts() -> tuple[int, int]:
        return sum(metrics.num_tokens for metrics in models), sum(metrics.num_ended for metrics in models)

    before, (num_tokens, num_ended) = time.monotonic(), counts()
    while True:
        await asyncio.sleep(interval_s)
        now = time.monotonic()
        all_tokens, all_ended = counts()
        rate, ended, streams = (all_tokens - num_tokens) / (now - before), all_ended - num_ended, num_open()
        if rate or ended or streams:
            extra = {"tokens_per_s": round(rate, 1), "num_open_streams": streams, "num_ended_requests": ended}
            logger.info("%.1f tokens/s, %d open streams, %d requests ended", rate, streams, ended, extra=extra)
        before, num_tokens, num_ended = now, all_tokens, all_ended
