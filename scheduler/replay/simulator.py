"""`python -m scheduler.replay.simulator`: computes how many workers a load needs, without running a worker.

It runs the real core in virtual time (scheduler/replay/simulation.py), with Poisson arrivals and the lengths of the
chat workload.
"""

from __future__ import annotations

import argparse
import random
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from midstream.cli.bench.workloads import chat_request
from midstream.errors import ConfigError, MidstreamError
from scheduler.core.capacity_scheduler import CAPACITY_SCHEDULERS
from scheduler.core.config import PROTOCOL_VERSION, CoreConfig
from scheduler.core.core import SchedulerCore
from scheduler.core.cost_model import CostModel, StepExtent
from scheduler.core.events import Event, Submitted, WorkerRegistered
from scheduler.core.kind import Kind
from scheduler.core.micro_batch_scheduler import MICRO_BATCH_SCHEDULERS
from scheduler.core.request_spec import RequestSpec
from scheduler.core.role import Role
from scheduler.plugins import load_scheduler
from scheduler.replay.measures import table
from scheduler.replay.replay import replay
from scheduler.replay.simulation import Simulation

# A cell has one scheduler; more workers than this need several cells.
MAX_WORKERS = 1024
_VOCAB_SIZE = 50_000
_MAX_SEQUENCE_LENGTH = 8192
_START_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that arrive at `request_rate` per second for `duration_s`."""

    request_rate: float
    duration_s: float
    seed: int = 0
    client_id: str = ""

    def __iter__(self) -> Iterator[Submitted]:
        generator = random.Random(f"{self.seed} {self.client_id}")
        at_s, number = generator.expovariate(self.request_rate), 0
        while at_s < self.duration_s:
            request = chat_request(generator)
            number += 1
            spec = RequestSpec(
                request_id=f"{self.client_id}{number}",
                prompt=array("I", request.token_ids),
                max_tokens=request.max_tokens,
                client_id=self.client_id,
                is_detached=True,
            )
            yield Submitted(_START_NS + int(at_s * 1e9), spec)
            at_s += generator.expovariate(self.request_rate)


@dataclass(frozen=True, slots=True)
class Fleet:
    """Identical worker groups; if `num_prefill_workers` is above 0, that many prefill and the others decode."""

    num_workers: int = 1
    num_blocks: int = 8192
    max_batch_size: int = 256
    max_num_tokens: int = 2048
    tokens_per_block: int = 16
    num_prefill_workers: int = 0

    def __iter__(self) -> Iterator[WorkerRegistered]:
        for number in range(self.num_workers):
            name = f"worker-{number}"
            role = Role.PREFILL if number < self.num_prefill_workers else Role.DECODE
            yield WorkerRegistered(
                time_ns=_START_NS,
                connection=name.encode(),
                group_id=name,
                incarnation=1,
                kind=Kind(),
                tokens_per_block=self.tokens_per_block,
                num_blocks=self.num_blocks,
                vocab_size=_VOCAB_SIZE,
                max_sequence_length=_MAX_SEQUENCE_LENGTH,
                max_batch_size=self.max_batch_size,
                max_num_tokens=self.max_num_tokens,
                protocol_version=PROTOCOL_VERSION,
                role=role if self.num_prefill_workers else Role.BOTH,
                kv_source=name if role is Role.PREFILL else "",
            )

    def core(self, policy: str, batching_type: str, max_queue_size: int = 4096) -> SchedulerCore:
        config = CoreConfig(
            scheduler_epoch=1,
            vocab_size=_VOCAB_SIZE,
            max_sequence_length=_MAX_SEQUENCE_LENGTH,
            tokens_per_block=self.tokens_per_block,
            max_batch_size=self.max_batch_size,
            max_num_tokens=self.max_num_tokens,
            max_queue_size=max_queue_size,
        )
        return SchedulerCore(config, load_scheduler("", policy, batching_type))


def events_of(fleet: Fleet, *loads: Load) -> list[Event]:
    """Return all external events, in order."""
    arrivals = sorted((event for load in loads for event in load), key=lambda event: event.time_ns)
    return [*fleet, *arrivals]


def main(words: Sequence[str] | None = None) -> int:
    """Run simulations; return 2 if the command line is invalid."""
    arguments = _parser().parse_args(words)
    try:
        return _run(arguments)
    except MidstreamError as error:
        print(f"midstream simulate: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    fleet, cost = Fleet(), CostModel()
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="midstream simulate",
        description="Run the real scheduler core with simulated workers, in virtual time.",
    )
    add = parser.add_argument
    add(
        "--num-workers",
        type=int,
        nargs="+",
        default=[1],
        metavar="N",
        help="Number of worker groups; several numbers are compared.",
    )
    add(
        "--prefill-workers", type=int, nargs="+", default=[0], metavar="N",
        help="Number of prefill workers; the others decode. 0: all do both. Several numbers are compared. [0]",
    )  # fmt: skip
    add("--request-rate", type=float, default=4.0, metavar="R", help="Total requests per second; Poisson arrivals. [4]")
    add("--duration", type=float, default=60.0, metavar="SECONDS", help="Time during which requests arrive. [60]")
    add("--seed", type=int, default=0, metavar="N", help="Seed for arrivals and lengths. [0]")
    add("--policy", choices=sorted(CAPACITY_SCHEDULERS), default="guaranteed_no_evict", help="Capacity policy.")
    add("--batching-type", choices=sorted(MICRO_BATCH_SCHEDULERS), default="inflight_fused", help="Batching type.")
    add("--max-queue-size", type=int, default=4096, metavar="N", help="Maximum waiting requests. [4096]")
    for name in ("num_blocks", "max_batch_size", "max_num_tokens", "tokens_per_block"):
        default = getattr(fleet, name)
        add(
            "--" + name.replace("_", "-"), type=int, default=default, metavar="N", help=f"Per worker group. [{default}]"
        )
    for name, text in (
        ("step_us", "Fixed cost of a step"),
        ("context_token_us", "Cost of a context token"),
        ("generation_row_us", "Cost of a generating row"),
        ("wire_us", "Round trip to the worker"),
        ("block_us", "Time to move a KV block from a prefill to a decode worker"),
    ):
        default = getattr(cost, name)
        add("--" + name.replace("_", "-"), type=float, metavar="US", help=f"{text}, microseconds. [{default:g}]")
    add("--cost-from", type=Path, metavar="RECORDING", help="Fit these costs to recorded steps instead.")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    if arguments.request_rate <= 0 or arguments.duration <= 0:
        raise ConfigError("rate and duration must be above 0", field="--request-rate")
    if not all(1 <= count <= MAX_WORKERS for count in arguments.num_workers):
        raise ConfigError(f"a cell must have 1 to {MAX_WORKERS} worker groups", field="--num-workers")
    fleets = [pair for pair in product(arguments.num_workers, arguments.prefill_workers) if 0 <= pair[1] < pair[0]]
    if len(fleets) < len(arguments.num_workers):
        raise ConfigError("at least one worker must be left to decode", field="--prefill-workers")
    load = Load(arguments.request_rate, arguments.duration, arguments.seed)
    cost, recorded = _cost(arguments)
    columns, growth = {}, list[str]()
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for count, num_prefill in fleets:
            fleet = Fleet(
                count,
                arguments.num_blocks,
                arguments.max_batch_size,
                arguments.max_num_tokens,
                arguments.tokens_per_block,
                num_prefill,
            )
            core = fleet.core(arguments.policy, arguments.batching_type, arguments.max_queue_size)
            name = f"{count} worker{'s' if count > 1 else ''}"
            if num_prefill:
                name = f"{num_prefill} + {count - num_prefill}"  # worker groups that prefill, and those that decode
            events = events_of(fleet, load)
            task = progress.add_task(name, total=len(events) - count)
            simulation = Simulation(core, events, cost=cost)
            simulation.run(lambda _, ended, task=task: progress.update(task, completed=ended))  # type: ignore[misc]
            columns[name] = simulation.measures
            if recorded is not None:
                _warn_beyond(name, simulation.extent, recorded)
            growth.append(f"{simulation.planning_ns / max(simulation.num_plans, 1) / 1_000:.0f}")
    result = table(columns)
    result.add_row("planning, µs per step", *growth)
    Console(highlight=False, soft_wrap=True).print(result)
    return 0


def _warn_beyond(name: str, simulated: StepExtent, recorded: StepExtent) -> None:
    """Warn of simulated steps that are larger than any recorded one: their cost is extrapolated."""
    found = [
        f"{count} {what}, while the recording has at most {most}"
        for what, count, most in (
            ("prompt tokens", simulated.num_context_tokens, recorded.num_context_tokens),
            ("generating rows", simulated.num_generation_rows, recorded.num_generation_rows),
        )
        if count > most
    ]
    if found:
        print(
            f"midstream simulate: warning: with {name}, steps have up to {', and up to '.join(found)}; their times are "
            "extrapolated. Record a heavier load, or lower --max-num-tokens and --max-batch-size to what you recorded",
            file=sys.stderr,
        )


def _cost(arguments: argparse.Namespace) -> tuple[CostModel, StepExtent | None]:
    """Return the costs, and the largest of the steps to which they were fitted, if any."""
    fit = replay(arguments.cost_from, keep_outside=True).steps.fit if arguments.cost_from else None
    base = fit.model() if fit is not None else CostModel()
    names = ("step_us", "context_token_us", "generation_row_us", "wire_us", "block_us")
    given = {name: getattr(arguments, name) for name in names}
    costs = {name: getattr(base, name) if value is None else value for name, value in given.items()}
    return CostModel(**costs), fit.extent if fit is not None else None


if __name__ == "__main__":
    sys.exit(main())
