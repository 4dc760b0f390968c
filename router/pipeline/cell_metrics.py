"""Exports the load behind a router as metrics, under the names that gateways' endpoint pickers read from model servers.

Schedulers export their own load as `midstream:NAME`. A gateway sees only routers, so these metrics repeat the sum over
the reachable schedulers, as of the last poll. They have only vLLM's names, so that nothing is counted twice in sums
over `midstream:NAME`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from midstream.telemetry import ALIAS_PREFIX
from midstream.telemetry.picker_metrics import UsedLoras, cache_config_info, lora_requests_info
from protos import loads_pb2

_LABELS = ("model_name",)


class CellMetrics(Collector):
    """Exports the load of a router's cells."""

    def __init__(self, model: str, loads: Callable[[], Iterable[loads_pb2.CellLoad]]) -> None:
        """Create the collector.

        Args:
            loads: Returns the most recent load reports of the cells that are up.
        """
        self._model, self._loads = model, loads

    def collect(self) -> Iterator[Metric]:
        loads = list(self._loads())
        num_blocks = sum(load.num_blocks for load in loads)
        num_held = num_blocks - sum(load.num_free_blocks for load in loads)
        running, waiting = (
            sum(load.num_running_requests for load in loads),
            sum(load.num_queued_requests for load in loads),
        )
        yield self._gauge("num_requests_running", "Requests that hold KV blocks, in all cells.", running)
        yield self._gauge("num_requests_waiting", "Requests in the queues of all cells.", waiting)
        yield self._gauge(
            "kv_cache_usage_perc", "Fraction of all cells' KV blocks that is held.", num_held / max(num_blocks, 1)
        )
        tokens_per_block = max((load.tokens_per_block for load in loads), default=0)
        yield cache_config_info(ALIAS_PREFIX, tokens_per_block, num_blocks, model_name=self._model)
        used = UsedLoras(
            sorted({name for load in loads for name in load.running_loras}),
            sorted({name for load in loads for name in load.waiting_loras}),
            sum(load.max_loras for load in loads),
        )
        yield lora_requests_info(ALIAS_PREFIX, used, model_name=self._model)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(ALIAS_PREFIX + name, text, labels=_LABELS)
        family.add_metric((self._model,), value)
        return family
