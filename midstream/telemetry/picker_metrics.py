"""Metrics whose labels are the information, in the form that gateways' endpoint pickers read.

Schedulers export them for themselves, and routers for all schedulers behind them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric


@dataclass(frozen=True, slots=True)
class UsedLoras:
    """Adapters in use.

    Attributes:
        running: Names of the adapters of running requests, sorted.
        waiting: Names of the adapters of waiting requests, sorted.
        max_loras: Number of adapters that can be in use at once.
    """

    running: Sequence[str]
    waiting: Sequence[str]
    max_loras: int


def cache_config_info(prefix: str, tokens_per_block: int, num_blocks: int, **labels: str) -> Metric:
    """Return the size of the KV cache, which prefix-aware pickers use to estimate what an endpoint still has cached."""
    info = {"block_size": str(tokens_per_block), "num_gpu_blocks": str(num_blocks)}
    return _info(prefix + "cache_config_info", "The KV cache.", labels | info, 1.0)


def lora_requests_info(prefix: str, used: UsedLoras, **labels: str) -> Metric:
    """Return the adapters in use. The value is the current Unix time, in seconds: pickers use the series with the
    highest value.
    """
    info = {
        "max_lora": str(used.max_loras),
        "running_lora_adapters": ",".join(used.running),
        "waiting_lora_adapters": ",".join(used.waiting),
    }
    text = "Adapters of running and waiting requests."
    return _info(prefix + "lora_requests_info", text, labels | info, time.time())


def _info(name: str, text: str, labels: Mapping[str, str], value: float) -> Metric:
    family = GaugeMetricFamily(name, text, labels=tuple(labels))
    family.add_metric(tuple(labels.values()), value)
    return family
