"""Measure a planning step: plan, block accounting and encoding, with many running and more waiting requests.

python -m benchmarks.planning
"""

from __future__ import annotations

import argparse
import statistics
import time
from array import array

from scheduler.core.capacity_scheduler import CAPACITY_SCHEDULERS
from scheduler.core.config import CoreConfig
from scheduler.core.core import SchedulerCore
from scheduler.core.effects import StepPlan
from scheduler.core.events import StepDone, Submitted, Turn, WorkerRegistered
from scheduler.core.kind import Kind
from scheduler.core.micro_batch_scheduler import MICRO_BATCH_SCHEDULERS
from scheduler.core.request_scheduler import SimpleScheduler
from scheduler.core.request_spec import RequestSpec
from scheduler.wire.worker_messages import encode_step


def measure(num_running: int, num_queued: int, num_steps: int, policy: str) -> dict[str, list[float]]:
    """Return microseconds per step: `plan` (Turn and encode) and `commit` (handling a result)."""
    scheduler = SimpleScheduler(CAPACITY_SCHEDULERS[policy](), MICRO_BATCH_SCHEDULERS["inflight_fused"]())
    config = CoreConfig(
        scheduler_epoch=1,
        vocab_size=50_000,
        max_sequence_length=8192,
        max_batch_size=num_running,
        max_num_tokens=8192,
        max_queue_size=num_queued + num_running,
    )
    core = SchedulerCore(config, scheduler)
    core.handle(WorkerRegistered(0, b"w", "w", 1, Kind(), 16, 1 << 17, 50_000, 8192, num_running, 8192, 1))
    for number in range(num_running + num_queued):
        prompt = array("I", [(number * 7 + index) % 50_000 for index in range(100 + number % 60)])
        core.handle(Submitted(0, RequestSpec(request_id=f"r{number}", prompt=prompt, max_tokens=400 + number % 97)))
    times: dict[str, list[float]] = {"plan": [], "commit": []}
    waiting: list[StepPlan] = []
    sampled = 0
    while len(times["plan"]) < num_steps:
        begin = time.perf_counter()
        plans = [effect for effect in core.handle(Turn(0)) if isinstance(effect, StepPlan)]
        for plan in plans:
            encode_step(plan)
        duration = time.perf_counter() - begin
        waiting += plans
        group = core.groups[0]
        if len(group.generating) >= num_running - 1 and len(plans) == 1:
            times["plan"].append(duration * 1e6)
        step = group.in_flight[0]
        sampled += 1
        tokens = [1000 + sampled % 1000] * step.num_sampled
        begin = time.perf_counter()
        core.handle(StepDone(0, b"w", group.epoch, step.step_id, tokens))
        times["commit"].append((time.perf_counter() - begin) * 1e6)
    return times


def main() -> None:
    """Print the medians for two sizes and both policies."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    print(f"{'policy':22}{'running':>8}{'queued':>8}{'plan p50 µs':>13}{'p99':>8}{'commit p50 µs':>15}")
    for policy in ("guaranteed_no_evict", "max_utilization"):
        for num_running, num_queued in ((256, 2_000), (1_024, 20_000)):
            times = measure(num_running, num_queued, arguments.steps, policy)
            plan = sorted(times["plan"])
            p99 = plan[int(len(plan) * 0.99)]
            commit = statistics.median(times["commit"][-arguments.steps :])
            print(
                f"{policy:22}{num_running:8}{num_queued:8}{statistics.median(plan):13.0f}{p99:8.0f}{commit:15.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
