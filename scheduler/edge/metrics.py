"""The scheduler's Prometheus metrics, computed from the core's state at each scrape."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from midstream.telemetry import PREFIX
from scheduler.core.core import SchedulerCore
from scheduler.core.stats import LATENCY_BUCKETS_S, Histogram
from scheduler.edge.dispatch import Dispatcher
from scheduler.edge.images import Images
from scheduler.journal import Journal


class SchedulerCollector(Collector):
    """Exports the core's state. Runs in the metrics thread, so it only reads numbers and changes nothing."""

    def __init__(self, core: SchedulerCore, dispatcher: Dispatcher, journal: Journal, images: Images) -> None:
        self._core = core
        self._dispatcher = dispatcher
        self._journal = journal
        self._images = images

    def collect(self) -> Iterator[Metric]:
        """Yield all metric families."""
        yield from self._gauges()
        yield from self._counters()
        totals = self._core.totals
        yield _histogram(
            "time_to_first_token_seconds", "Time from submission to the first token.", totals.time_to_first_token
        )
        yield _histogram(
            "inter_token_latency_seconds", "Time between tokens of a sequence.", totals.inter_token_latency
        )
        yield _histogram("e2e_request_latency_seconds", "Time from submission to the end.", totals.e2e_request_latency)
        yield _histogram(
            "request_queue_time_seconds", "Time from submission to the first step.", totals.request_queue_time
        )

    def _gauges(self) -> Iterator[Metric]:
        core = self._core
        groups = core.groups
        num_blocks = sum(group.blocks.num_blocks * group.units_per_block for group in groups)
        num_held = sum(group.blocks.num_held * group.units_per_block for group in groups)
        yield _gauge("num_requests_running", "Requests that hold KV blocks.", core.num_active_requests)
        yield _gauge("num_requests_waiting", "Requests in the queue.", len(core.queue))
        num_prompt_tokens = core.queue.num_tokens + sum(group.num_context_tokens for group in groups)
        yield _gauge("num_prompt_tokens_waiting", "Prompt tokens to be computed.", num_prompt_tokens)
        yield _gauge(
            "kv_cache_usage_perc", "Fraction of the KV blocks that is held, 0 to 1.", num_held / max(num_blocks, 1)
        )
        yield _gauge("num_worker_groups", "Worker groups that are registered.", len(groups))
        num_held_off = sum(group.is_held_off for group in groups)
        yield _gauge(
            "num_worker_groups_held_off", "Worker groups that are held off after faults or deaths.", num_held_off
        )
        yield _gauge("num_images_running", "Images that workers encode now.", self._images.num_running)
        info = GaugeMetricFamily(PREFIX + "cache_config_info", "The KV cache.", labels=("block_size", "num_gpu_blocks"))
        info.add_metric((str(core.config.tokens_per_block), str(num_blocks)), 1.0)
        yield info
        yield lora_requests(core)

    def _counters(self) -> Iterator[Metric]:
        totals, dispatcher = self._core.totals, self._dispatcher
        yield _counter(
            "prefix_cache_queries",
            "Number of prompt tokens looked up in the prefix cache.",
            totals.prefix_cache_queries,
        )
        yield _counter(
            "prefix_cache_hits", "Number of prompt tokens found in the prefix cache.", totals.prefix_cache_hits
        )
        yield _counter("num_preemptions", "Number of times a request was preempted.", totals.num_preemptions)
        yield _counter("num_recoveries", "Number of times a request lost its worker.", totals.num_recoveries)
        yield _counter("num_handovers", "Number of requests moved from prefill to decode groups.", totals.num_handovers)
        yield _counter(
            "num_failed_handovers",
            "Handovers cancelled because KV blocks could not be fetched; the request stays on its prefill group.",
            totals.num_failed_handovers,
        )
        yield _counter("num_worker_deaths", "Number of deaths of worker groups.", totals.num_worker_deaths)
        yield _counter(
            "num_worker_faults", "Number of invalid results and messages from workers.", totals.num_worker_faults
        )
        yield _counter(
            "num_quarantined", "Number of requests ended because they crashed workers.", totals.num_quarantined
        )
        yield _counter("prompt_tokens", "Number of context tokens computed.", totals.num_prompt_tokens)
        yield _counter("generation_tokens", "Number of tokens generated.", totals.num_generation_tokens)
        yield _counter("num_draft_tokens", "Number of draft tokens verified.", totals.num_draft_tokens)
        yield _counter("num_accepted_tokens", "Number of draft tokens accepted.", totals.num_accepted_tokens)
        yield _counter(
            "num_wasted_tokens", "Number of tokens computed for sequences that had ended.", totals.num_wasted_tokens
        )
        yield _counter("num_stale_messages", "Number of messages from past epochs.", totals.num_stale_messages)
        yield _counter(
            "num_malformed_messages", "Number of messages that could not be parsed.", dispatcher.num_malformed
        )
        yield _counter(
            "num_refused_connections", "Number of connections refused on the worker port.", dispatcher.num_refused
        )
        yield _counter(
            "num_unsent_messages",
            "Number of messages not sent because the worker had disconnected.",
            dispatcher.num_unsent,
        )
        yield _counter("num_encoded_images", "Number of images that workers encoded.", self._images.num_encoded)
        yield _counter(
            "num_cached_images", "Number of images whose embeddings were known already.", self._images.num_cached
        )
        yield _counter("journal_commits", "Number of journal transactions.", self._journal.num_commits)
        yield _counter(
            "journal_losses", "Number of times the journal was deleted or truncated in use.", self._journal.num_lost
        )
        yield _counter(
            "journal_damaged_records", "Number of records found damaged at startup.", self._journal.num_damaged
        )
        yield _counter(
            "kv_conservation_violations",
            "Number of iterations after which free + cached + held blocks did not equal all blocks.",
            totals.num_conservation_violations,
        )
        finished = CounterMetricFamily(
            PREFIX + "request_success", "Number of ended requests.", labels=("finished_reason",)
        )
        for reason, count in list(totals.num_finished_by_reason.items()):
            finished.add_metric((reason,), count)
        yield finished


def lora_requests(core: SchedulerCore) -> Metric:
    """Return the info metric with the running and waiting adapters (names in labels), in the format that gateways
    expect.
    """
    groups = core.groups
    running = {request.spec.lora_name for group in groups for request in list(group.active)}
    waiting = {request.spec.lora_name for request in list(core.queue)}
    most = min((group.registration.max_loras for group in groups), default=0)
    names = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
    info = GaugeMetricFamily(PREFIX + "lora_requests_info", "LoRA adapters of requests.", labels=names)
    info.add_metric((str(most), *(",".join(sorted(found - {""})) for found in (running, waiting))), 1.0)
    return info


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, text, value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(PREFIX + name, text, value)


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    counts = list(histogram.counts)
    total, buckets = 0, []
    for bound, count in zip((*LATENCY_BUCKETS_S, float("inf")), counts, strict=True):
        total += count
        buckets.append(("+Inf" if bound == float("inf") else str(bound), total))
    return HistogramMetricFamily(PREFIX + name, text, buckets, histogram.sum_ns / 1e9)
