"""A periodic throughput line in the log, while there is traffic."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from router.pipeline.output import RouterMetrics

logger = logging.getLogger(__name__)


async def log_throughput(metrics: RouterMetrics, num_open: Callable[[], int], interval_s: float) -> None:
    """Log tokens per second, open streams and requests that ended, every `interval_s`, until cancelled."""
    before, num_tokens, num_ended = time.monotonic(), metrics.num_tokens, metrics.num_ended
    while True:
        await asyncio.sleep(interval_s)
        now = time.monotonic()
        rate, ended, streams = (
            (metrics.num_tokens - num_tokens) / (now - before),
            metrics.num_ended - num_ended,
            num_open(),
        )
        if rate or ended or streams:
            extra = {"tokens_per_s": round(rate, 1), "num_open_streams": streams, "num_ended_requests": ended}
            logger.info("%.1f tokens/s, %d open streams, %d requests ended", rate, streams, ended, extra=extra)
        before, num_tokens, num_ended = now, metrics.num_tokens, metrics.num_ended
