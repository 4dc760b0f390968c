"""Run one seed: a scenario on simulated machines, from the first request until every client and process has
finished.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from midstream.client import AsyncClient
from tests.simulation.checker import Checker
from tests.simulation.cluster import ROUTER_PORT, Cluster
from tests.simulation.journal import JournalDisk
from tests.simulation.loop import VirtualLoop
from tests.simulation.network import Network
from tests.simulation.running_simulation import RunningSimulation
from tests.simulation.scenarios import MakeScenario, Scenario, scenario_of
from tests.simulation.sockets import Sockets
from tests.simulation.threads import run_in_thread
from tests.simulation.workload import Job
from tests.simulation.world import simulated

# A simulation that lasts longer than this is considered hung.
LIMIT_S = 300.0
_COLLECT_EVERY = 16
_BLOCKED_SHARE = 0.1
# Reported about a record that a killed scheduler had not written completely, too. What is lost is checked.
_CUT_OFF = "the journal is damaged"


@dataclass
class Outcome:
    """The result of a seed.

    Attributes:
        all_kv: Whether roles and tiers were forced.
        is_shared: Whether parts shared a process.
        happened: Number of occurrences of each fault and adoption.
        problems: Descriptions of the violations; empty if the seed passes.
        trace: All events, if requested; the same for the same seed.
    """

    seed: int
    name: str
    all_kv: bool = False
    is_shared: bool = False
    virtual_s: float = 0.0
    num_messages: int = 0
    happened: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)


def run_seed(
    seed: int,
    *,
    faults: bool = True,
    trace: bool = False,
    make: MakeScenario | None = None,
    all_kv: bool = False,
    is_shared: bool = False,
) -> Outcome:
    """Run a seed with the scenario that `make` creates, or with the seed's own scenario.

    Args:
        seed: The seed.
        faults: Whether to inject the scenario's faults; otherwise only its workload runs.
        trace: Whether to record all events.
        make: Function that creates the scenario.
        all_kv: Whether to give workers roles and tiers, whatever the seed draws.
        is_shared: Whether the scheduler, the first detokenizer and the first router share a process.
    """
    dice = random.Random(f"simulation {seed}")
    scenario = make(dice) if make is not None else scenario_of(seed, dice)
    cluster: Cluster | None = None
    loop = VirtualLoop(lambda name: cluster.resolve(name) if cluster is not None else [])
    network = Network(loop, random.Random(f"network {seed}"), trace=trace)
    network.tokenizers.update(scenario.tokenizers)
    network.blocks_frames = random.Random(f"ports {seed}").random() < _BLOCKED_SHARE
    loop.sockets = Sockets(network)
    loop.run_in_thread = run_in_thread
    scenario.shape.all_kv, scenario.shape.is_shared = all_kv, is_shared
    disk = JournalDisk(network, random.Random(f"disk {seed}"))
    checker = Checker(disk)
    network.on_write = checker.check_fed
    cluster = Cluster(loop, network, scenario.shape, disk, checker.watch)
    outcome = Outcome(seed, scenario.name, all_kv, is_shared)
    simulation = RunningSimulation(cluster, checker, dice, outcome.happened)
    with simulated(loop, network, disk, seed, cluster.make_engine) as errors:
        asyncio.events.set_event_loop(None)
        try:
            loop.run_until_complete(_play(scenario, simulation, outcome, faults))
        except AssertionError as error:
            outcome.problems.append(f"{type(error).__name__}: {error}")
        finally:
            outcome.virtual_s, outcome.num_messages = loop.now, network.num_messages
            outcome.trace = network.trace or []
            _bury(loop, cluster)
    outcome.happened.update(cluster.host.happened)
    outcome.happened["frames blocked"] += network.blocks_frames
    outcome.happened.update({f"disk {name}": count for name, count in disk.happened.items()})
    outcome.problems += checker.problems + loop.failures + cluster.crashes + cluster.problems
    if faults:
        may_report = (*scenario.may_report, _CUT_OFF)
        errors.lines = [line for line in errors.lines if not any(word in line for word in may_report)]
    outcome.problems += errors.lines
    if seed % _COLLECT_EVERY == 0:
        gc.collect()
    return outcome


def begin_many_seeds() -> None:
    """From now on, collect garbage only when a seed requests it, without traversing the objects that exist now."""
    gc.collect()
    gc.freeze()
    gc.disable()


@contextlib.contextmanager
def many_seeds() -> Iterator[None]:
    """Run seeds faster within this context."""
    begin_many_seeds()
    try:
        yield
    finally:
        gc.enable()


def _bury(loop: VirtualLoop, cluster: Cluster) -> None:
    async def end() -> None:
        for process in cluster.all_processes:
            process.die()
        for _ in range(200):
            if not any(process.has_tasks for process in cluster.all_processes):
                break
            await asyncio.sleep(0.01)
        for process in cluster.all_processes:
            process.forget_done()

    loop.run_until_complete(end())
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


async def _play(scenario: Scenario, simulation: RunningSimulation, outcome: Outcome, faults: bool) -> None:
    cluster, checker = simulation.cluster, simulation.checker
    simulation.jobs = scenario.jobs

    cluster.start_all()
    await asyncio.sleep(0.5)
    for number, job in enumerate(scenario.jobs):
        job.watch = checker.check_shown
        cluster.run(f"client-{number}", lambda job=job: _client(cluster, job))  # type: ignore[misc]
    injecting = asyncio.ensure_future(scenario.inject(simulation)) if faults else None
    try:
        async with asyncio.timeout(LIMIT_S):
            while not all(job.is_done for job in simulation.jobs) and not cluster.crashes:  # noqa: ASYNC110 (virtual time)
                await asyncio.sleep(0.05)
            if cluster.crashes:
                return
            if injecting is not None:
                await injecting
            await simulation.settle()
    except TimeoutError:
        waiting = [job.request.request_id for job in simulation.jobs if not job.is_done]
        outcome.problems.append(f"it hangs: {waiting} have not finished")
        return
    for job in simulation.jobs:
        _judge(job, outcome)
    if faults:
        scenario.judge(simulation)
    outcome.problems += simulation.problems
    if cluster.engine is not None:
        checker.check_rest(cluster.engine.core)


async def _client(cluster: Cluster, job: Job) -> None:
    routers = [f"router-{number}:{ROUTER_PORT}" for number in range(cluster.shape.num_routers)]
    async with AsyncClient(routers) as client:
        await job.run(client)


def _judge(job: Job, outcome: Outcome) -> None:
    if job.must_complete and not job.has_left:
        if job.error is not None:
            job.problems.append(f"it failed: {job.error!r}")
        else:
            job.check_complete()
    outcome.problems += [f"{job.request.request_id}: {problem}" for problem in job.problems]
