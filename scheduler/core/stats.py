"""Statistics of the core: one record per iteration, totals, and distributions of latencies."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from midstream.record import record

LATENCY_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_BUCKETS_NS = tuple(int(seconds * 1e9) for seconds in LATENCY_BUCKETS_S)


class Histogram:
    """A histogram of durations over LATENCY_BUCKETS_S, with one more bucket for longer ones."""

    __slots__ = ("counts", "sum_ns")

    def __init__(self) -> None:
        self.counts = [0] * (len(_BUCKETS_NS) + 1)
        self.sum_ns = 0

    def observe(self, duration_ns: int, count: int = 1) -> None:
        """Add `count` observations of a duration in nanoseconds."""
        self.counts[bisect_left(_BUCKETS_NS, duration_ns)] += count
        self.sum_ns += duration_ns * count


@dataclass(slots=True)
class Totals:
    """Counts since the scheduler started."""

    num_iterations: int = 0
    num_finished_by_reason: dict[str, int] = field(default_factory=dict)
    num_completed: int = 0
    num_preemptions: int = 0
    num_postponements: int = 0  # requests queued again because they cannot run yet
    num_recoveries: int = 0
    num_kind_changes: int = 0  # requests that moved to another kind of groups
    num_handovers: int = 0  # requests moved from prefill to decode groups
    num_failed_handovers: int = 0  # handovers whose blocks could not be fetched
    num_worker_deaths: int = 0
    num_worker_faults: int = 0  # invalid messages and lost results
    num_verified_steps: int = 0  # steps that another group computed again, with the same results
    num_unverifiable_steps: int = 0  # steps to verify that no other group could compute
    num_wrong_workers: int = 0  # groups whose results differed from those of others
    num_unproved_tokens: int = 0  # tokens that such groups gave since their last verified step
    num_stale_messages: int = 0
    num_wasted_tokens: int = 0
    num_conservation_violations: int = 0
    num_quarantined: int = 0
    num_policy_faults: int = 0  # exceptions of a scheduling policy
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    max_num_active_requests: int = 0  # number of rows of all groups
    prefix_cache_queries: int = 0  # prompt tokens looked up in the prefix cache
    prefix_cache_hits: int = 0
    time_to_first_token: Histogram = field(default_factory=Histogram)
    inter_token_latency: Histogram = field(default_factory=Histogram)
    e2e_request_latency: Histogram = field(default_factory=Histogram)
    request_queue_time: Histogram = field(default_factory=Histogram)


@record(kw_only=True)
class RequestCounts:
    """Number of requests by state; a request is active from its start on unless it waits to continue."""

    num_active: int = 0
    num_queued: int = 0
    num_completed: int = 0
    max_num_active: int = 0


@record(kw_only=True)
class KvStats:
    """Block statistics of one group, or of all groups together, in blocks of the scheduler's size; counters start when
    a group joins.
    """

    num_blocks: int = 0
    num_free: int = 0  # available: free and cached
    num_used: int = 0
    num_cached: int = 0
    tokens_per_block: int = 0
    allocated: int = 0
    allocated_new: int = 0
    reused: int = 0
    missed: int = 0
    evicted: int = 0


@record(kw_only=True)
class StepStats:
    """Counts for a step and its result."""

    micro_batch_id: int = 0
    latency_ns: int = 0
    num_new_requests: int = 0  # that run for the first time
    queue_latency_ns: int = 0  # summed over these
    num_context_requests: int = 0
    num_generation_requests: int = 0
    num_paused_requests: int = 0
    num_context_tokens: int = 0
    num_generation_tokens: int = 0
    num_decoded_tokens: int = 0
    empty_generation_slots: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def num_scheduled_requests(self) -> int:
        """Number of rows that ran."""
        return self.num_context_requests + self.num_generation_requests


@record(kw_only=True)
class IterationStats:
    """One iteration of a worker group, from a step's plan to its result; if the group id is empty, the state of all
    groups.
    """

    time_ns: int
    iteration: int
    group_id: str
    requests: RequestCounts
    kv: KvStats
    step: StepStats
    memory: tuple[int, int, int]
    num_finished_by_reason: dict[str, int]
    num_stale_messages: int
    num_conservation_violations: int
    num_preemptions: int
