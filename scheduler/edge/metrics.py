"""The scheduler's Prometheus metrics, computed from the core's state at each scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from midstream.telemetry import PREFIX
from midstream.telemetry.picker_metrics import UsedLoras, cache_config_info, lora_requests_info
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
        for name, text, histogram in (
            ("time_to_first_token_seconds", "Time from submission to the first token.", totals.time_to_first_token),
            ("inter_token_latency_seconds", "Time between tokens of a sequence.", totals.inter_token_latency),
            ("e2e_request_latency_seconds", "Time from submission to the end.", totals.e2e_request_latency),
            ("request_queue_time_seconds", "Time from submission to the first step.", totals.request_queue_time),
        ):
            yield _histogram(name, text, histogram)

    def _gauges(self) -> Iterator[Metric]:
        core = self._core
        groups = core.groups
        num_blocks = sum(group.blocks.num_blocks * group.units_per_block for group in groups)
        num_held = sum(group.blocks.num_held * group.units_per_block for group in groups)
        num_prompt_tokens = core.queue.num_tokens + sum(group.num_context_tokens for group in groups)
        num_held_off = sum(group.is_held_off for group in groups)
        for name, text, value in (
            ("num_requests_running", "Requests that hold KV blocks.", core.num_active_requests),
            ("num_requests_waiting", "Requests in the queue.", len(core.queue)),
            ("num_prompt_tokens_waiting", "Prompt tokens to be computed.", num_prompt_tokens),
            ("kv_cache_usage_perc", "Fraction of the KV blocks that is held, 0 to 1.", num_held / max(num_blocks, 1)),
            ("num_worker_groups", "Worker groups that are registered.", len(groups)),
            ("num_worker_groups_held_off", "Worker groups that are held off after faults or deaths.", num_held_off),
            ("num_worker_groups_asleep", "Worker groups that sleep.", sum(group.is_asleep for group in groups)),
            ("num_requests_waiting_for_kind", "Requests whose kind of workers is lost.", core.kind_waits.num_waiting),
            ("price_per_hour", "Price per hour of the registered worker groups.", core.membership.price_per_hour),
            (
                "first_token_wait_seconds",
                "Time for which the request that has waited longest for its first token has waited.",
                core.first_token_wait_ns / 1e9,
            ),
            ("num_images_running", "Images that workers are encoding.", self._images.num_running),
        ):
            yield GaugeMetricFamily(PREFIX + name, text, value)
        yield cache_config_info(PREFIX, core.config.tokens_per_block, num_blocks)
        kinds = GaugeMetricFamily(
            PREFIX + "worker_group_kinds", "Worker groups, by kind.", labels=("kind", "arithmetic")
        )
        for kind, count in Counter(group.kind for group in groups).items():
            kinds.add_metric((kind.name, kind.description), count)
        yield kinds
        yield lora_requests_info(PREFIX, used_loras(core))

    def _counters(self) -> Iterator[Metric]:
        totals, dispatcher, images, journal = self._core.totals, self._dispatcher, self._images, self._journal
        for name, text, value in (
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", totals.prefix_cache_queries),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", totals.prefix_cache_hits),
            ("num_preemptions", "Number of times a request was preempted.", totals.num_preemptions),
            (
                "num_postponements",
                "Number of times a request was queued again because it cannot run yet: its grammar is compiled.",
                totals.num_postponements,
            ),
            ("num_recoveries", "Number of times a request lost its worker.", totals.num_recoveries),
            ("num_kind_changes", "Requests moved to another kind of workers.", totals.num_kind_changes),
            ("num_handovers", "Requests moved from prefill to decode groups.", totals.num_handovers),
            (
                "num_failed_handovers",
                "Handovers cancelled because KV blocks could not be fetched; the request stays on its prefill group.",
                totals.num_failed_handovers,
            ),
            ("num_worker_deaths", "Deaths of worker groups.", totals.num_worker_deaths),
            ("num_worker_faults", "Invalid results and messages from workers.", totals.num_worker_faults),
            ("num_verified_steps", "Steps that another worker computed again, equally.", totals.num_verified_steps),
            (
                "num_unverifiable_steps",
                "Steps to be verified that no other worker could compute.",
                totals.num_unverifiable_steps,
            ),
            ("num_wrong_workers", "Workers held off because their results were wrong.", totals.num_wrong_workers),
            (
                "num_unproved_tokens",
                "Tokens that wrong workers gave since their last verified steps, and that were delivered.",
                totals.num_unproved_tokens,
            ),
            ("num_policy_faults", "Exceptions of the scheduler plugin.", totals.num_policy_faults),
            ("num_quarantined", "Requests ended because they crashed workers.", totals.num_quarantined),
            (
                "cost",
                "Cost of the worker groups while they were registered, by their setting price_per_hour.",
                self._core.membership.cost,
            ),
            ("prompt_tokens", "Context tokens computed.", totals.num_prompt_tokens),
            ("generation_tokens", "Tokens generated.", totals.num_generation_tokens),
            ("num_draft_tokens", "Draft tokens verified.", totals.num_draft_tokens),
            ("num_accepted_tokens", "Draft tokens accepted.", totals.num_accepted_tokens),
            ("num_wasted_tokens", "Tokens computed for sequences that had ended.", totals.num_wasted_tokens),
            ("num_stale_messages", "Messages from past epochs.", totals.num_stale_messages),
            ("num_malformed_messages", "Messages that could not be parsed.", dispatcher.num_malformed),
            ("num_refused_connections", "Connections refused on the worker port.", dispatcher.num_refused),
            ("num_unsent_messages", "Messages not sent because the worker was gone.", dispatcher.num_unsent),
            ("num_encoded_images", "Images that workers encoded.", images.num_encoded),
            ("num_cached_images", "Images whose embeddings were known already.", images.num_cached),
            ("journal_commits", "Journal transactions.", journal.num_commits),
            ("journal_losses", "Number of times the journal was deleted or truncated in use.", journal.num_lost),
            ("journal_damaged_records", "Records found damaged at startup.", journal.num_damaged),
            (
                "kv_conservation_violations",
                "Number of iterations after which free + cached + held blocks did not equal all blocks.",
                totals.num_conservation_violations,
            ),
        ):
            yield CounterMetricFamily(PREFIX + name, text, value)
        finished = CounterMetricFamily(
            PREFIX + "request_success", "Number of ended requests.", labels=("finished_reason",)
        )
        for reason, count in list(totals.num_finished_by_reason.items()):
            finished.add_metric((reason,), count)
        yield finished


def used_loras(core: SchedulerCore) -> UsedLoras:
    """Return the adapters of running and waiting requests. Thread-safe."""
    groups = core.groups
    running = {request.spec.lora_name for group in groups for request in list(group.active)}
    waiting = {request.spec.lora_name for request in list(core.queue)}
    most = min((group.registration.max_loras for group in groups), default=0)
    return UsedLoras(tuple(sorted(running - {""})), tuple(sorted(waiting - {""})), most)


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    counts = list(histogram.counts)
    total, buckets = 0, []
    for bound, count in zip((*LATENCY_BUCKETS_S, float("inf")), counts, strict=True):
        total += count
        buckets.append(("+Inf" if bound == float("inf") else str(bound), total))
    return HistogramMetricFamily(PREFIX + name, text, buckets, histogram.sum_ns / 1e9)
