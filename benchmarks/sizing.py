"""Compute how many processes of each component a load needs, as a Markdown table: `python -m benchmarks.sizing`.

Workers, KV blocks and latencies come from the simulator, which runs the real scheduler core with Poisson arrivals and
the lengths of the chat workload. For the other components the CPU time per token is used, as measured by `python -m
benchmarks.control_plane`.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

from scheduler.core.cost_model import CostModel
from scheduler.replay.measures import Measures, quantile
from scheduler.replay.simulation import Simulation
from scheduler.replay.simulator import Fleet, Load, events_of

_MAX_WORKERS = 64
_HEADER = (
    "| requests/s | output tokens/s | concurrent streams | workers | peak KV blocks in use | first token, p95 "
    "| between tokens, p95 | schedulers (cells) | routers | detokenizers |"
)


@dataclass(frozen=True)
class Goal:
    """Latency goals in seconds."""

    first_token_s: float
    between_tokens_s: float

    def is_met(self, measures: Measures) -> bool:
        first, between = latencies(measures)
        return first <= self.first_token_s and between <= self.between_tokens_s


@dataclass(frozen=True)
class TokenCosts:
    """CPU time per token of each component in microseconds, and the target utilization of a core."""

    router_us: float
    scheduler_us: float
    detokenizer_us: float
    core_share: float

    def count(self, tokens_per_s: float, cost_us: float, least: int) -> int:
        return max(least, math.ceil(tokens_per_s * cost_us / 1e6 / self.core_share))


def latencies(measures: Measures) -> tuple[float, float]:
    """Return the 95th percentiles of the time to first token and of the inter-token time, in seconds."""
    return quantile(measures.first_token_ns, 0.95) / 1e9, quantile(measures.tokens_ns, 0.95) / 1e9


def simulate(num_workers: int, load: Load, num_blocks: int, cost: CostModel) -> Measures:
    fleet = Fleet(num_workers, num_blocks)
    core = fleet.core("guaranteed_no_evict", "inflight_fused", max_queue_size=1 << 20)
    simulation = Simulation(core, events_of(fleet, load), cost=cost)
    simulation.run()
    return simulation.measures


def row(rate: float, duration_s: float, num_blocks: int, cost: CostModel, goal: Goal, costs: TokenCosts) -> str:
    """Return a table row: the smallest number of workers that meets the goal, and the numbers of the other
    components.
    """
    load = Load(rate, duration_s)
    num_workers = 1
    while not goal.is_met(measures := simulate(num_workers, load, num_blocks, cost)) and num_workers < _MAX_WORKERS:
        num_workers += 1
    first, between = latencies(measures)
    tokens_per_s = measures.num_output_tokens / measures.duration_s
    cells = [
        f"{rate:g}",
        f"{tokens_per_s:,.0f}",
        f"{sum(measures.end_to_end_ns) / 1e9 / measures.duration_s:.0f}",
        str(num_workers),
        f"{measures.max_kv_use * num_blocks * num_workers:,.0f} of {num_blocks * num_workers:,}",
        f"{1e3 * first:.0f} ms",
        f"{1e3 * between:.0f} ms",
        str(costs.count(tokens_per_s, costs.scheduler_us, 1)),
        str(costs.count(tokens_per_s, costs.router_us, 2)),
        str(costs.count(tokens_per_s, costs.detokenizer_us, 2)),
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sizing", description=__doc__.splitlines()[0])
    add, model = parser.add_argument, CostModel()
    add("--request-rate", type=float, nargs="+", default=[5, 20, 40, 80, 160], help="Requests per second.")
    add("--duration", type=float, default=30.0, help="Simulated seconds at each rate.")
    add("--num-blocks", type=int, default=8192, help="KV blocks of 16 tokens per worker.")
    add("--step-us", type=float, default=model.step_us, help="Fixed cost of a step in microseconds.")
    add(
        "--context-token-us",
        type=float,
        default=model.context_token_us,
        help="Cost of a context token in microseconds.",
    )
    add(
        "--generation-row-us",
        type=float,
        default=model.generation_row_us,
        help="Cost of a generating row in microseconds.",
    )
    add("--first-token-ms", type=float, default=500.0, help="Target for the p95 time to first token.")
    add("--between-tokens-ms", type=float, default=50.0, help="Target for the p95 time between tokens.")
    add("--router-us", type=float, default=46.0, help="CPU time per token in routers, in microseconds.")
    add("--scheduler-us", type=float, default=20.0, help="CPU time per token in the scheduler, in microseconds.")
    add("--detokenizer-us", type=float, default=11.0, help="CPU time per token in detokenizers, in microseconds.")
    add("--core-share", type=float, default=0.5, help="Target utilization of a core by each of these processes.")
    arguments = parser.parse_args()
    cost = CostModel(arguments.step_us, arguments.context_token_us, arguments.generation_row_us)
    goal = Goal(arguments.first_token_ms / 1e3, arguments.between_tokens_ms / 1e3)
    costs = TokenCosts(arguments.router_us, arguments.scheduler_us, arguments.detokenizer_us, arguments.core_share)
    print(_HEADER)
    print("| --- " * 10 + "|")
    for rate in arguments.request_rate:
        print(row(rate, arguments.duration, arguments.num_blocks, cost, goal, costs), flush=True)


if __name__ == "__main__":
    main()
