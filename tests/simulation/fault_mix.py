"""Combinations of random faults of any kind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

from midstream.errors import DeadlineError
from tests.simulation.cluster import Shape
from tests.simulation.faults_of_services import break_disk
from tests.simulation.loop import Process
from tests.simulation.network import KEEPALIVE_S, Weather
from tests.simulation.running_simulation import RunningSimulation
from tests.simulation.scenarios import Scenario, scenario
from tests.simulation.workload import jobs

Fault = Callable[[RunningSimulation, random.Random], Coroutine[Any, Any, None]]

_SLOW_S = 0.5


@scenario(0)
def mixture(dice: random.Random) -> Scenario:  # noqa: C901 (one throw of the dice after another)
    """Inject several faults of any kind, on an unreliable network."""
    work = jobs(dice, 4, 1.0)
    for job in work:
        if dice.random() < 0.1:
            job.timeout_s, job.must_complete = dice.uniform(1, 10), False
        elif dice.random() < 0.1:
            job.leaves_after = dice.randint(1, 10)
    weather = _weather(dice)
    kinds: tuple[Fault, ...] = (_kill, _terminate, _freeze, _part, _cut, _jump, _lie, _power, _disk)
    faults = dice.choices(kinds, (4, 2, 2, 2, 2, 2, 2, 1, 1), k=dice.randint(1, 4))

    async def inject(simulation: RunningSimulation) -> None:
        network = simulation.cluster.network
        network.weather = weather
        making: list[asyncio.Task[None]] = []
        for fault in faults:
            if not await simulation.at(simulation.messages(5, 90)):
                break
            making.append(asyncio.ensure_future(fault(simulation, dice)))
            simulation.happened[f"0 {fault.__name__.strip('_')}"] += 1
        if making:
            await asyncio.wait(making)
        network.weather = Weather()
        network.heal()

    def judge(simulation: RunningSimulation) -> None:
        for job in work:
            if job.error is not None and not job.must_complete and not isinstance(job.error, DeadlineError):
                simulation.problems.append(f"{job.request.request_id} ended with {job.error!r}")

    shape = Shape(
        num_workers=dice.randint(1, 3),
        num_detokenizers=dice.randint(1, 3),
        num_routers=dice.randint(1, 3),
        num_blocks=dice.choice((32, 64)),
        scheduler={
            "max_worker_deaths": 100,
            "capacity_policy": dice.choice(("guaranteed_no_evict", "max_utilization")),
            "max_context_chunk": dice.choice((0, 0, 8)),
        },
    )
    may_report = ("the journal failed",)
    return Scenario(shape=shape, jobs=work, inject=inject, judge=judge, may_report=may_report)


def _weather(dice: random.Random) -> Weather:
    return Weather(
        delay_s=dice.choice((0.001, 0.005)),
        slow_share=dice.choice((0, 0.02, 0.1)),
        slow_s=dice.choice((0.05, _SLOW_S)),
        loss=dice.choice((0, 0, 0.01)),
        repeats=dice.choice((0, 0.05)),
        overtakes=dice.choice((0, 0.05)),
    )


def _any(simulation: RunningSimulation, dice: random.Random) -> str:
    return dice.choice([name for name in simulation.cluster.processes if not name.startswith("client")])


async def _kill(simulation: RunningSimulation, dice: random.Random) -> None:
    name = _any(simulation, dice)
    simulation.kill(name)
    await simulation.restart(name)


async def _power(simulation: RunningSimulation, dice: random.Random) -> None:
    simulation.cut_power()
    await simulation.restart("scheduler")


async def _disk(simulation: RunningSimulation, dice: random.Random) -> None:
    with break_disk(simulation.cluster.disk, dice.choice(("full", "slow", "failed write", "failed sync")), dice):
        await simulation.sleep(0.1, 2.0)
    await simulation.restart("scheduler")


async def _terminate(simulation: RunningSimulation, dice: random.Random) -> None:
    name = _any(simulation, dice)
    process = simulation.process(name)
    process.terminate()
    await simulation.until(lambda: process.is_dead, 20, f"{name} drains")
    await simulation.restart(name)


async def _jump(simulation: RunningSimulation, dice: random.Random) -> None:
    simulation.jump(_any(simulation, dice))


async def _lie(simulation: RunningSimulation, dice: random.Random) -> None:
    name = dice.choice([name for name in simulation.cluster.processes if name.startswith("worker")])
    # After six faults and repeated deaths, a worker would be held off for longer than a request waits for a worker.
    num_before = simulation.happened["0 lie"] - 1
    simulation.cluster.workers[name].lies += (dice.randint(1, 3), 1, 0, 0)[num_before]


async def _freeze(simulation: RunningSimulation, dice: random.Random) -> None:
    process = simulation.process(_any(simulation, dice))
    process.freeze()
    await simulation.sleep(0.1, 3.0)
    process.thaw()


async def _part(simulation: RunningSimulation, dice: random.Random) -> None:
    one, other = (simulation.process(name).name for name in dice.sample(sorted(simulation.cluster.processes), 2))
    if one != other:  # otherwise they share a process
        simulation.cluster.network.part(one, other)
    # A client that cannot reach its router for longer than this counts as disconnected.
    has_client = any(name.startswith("client") for name in (one, other))
    await simulation.sleep(0.1, KEEPALIVE_S - 1 if has_client else KEEPALIVE_S + 3)
    simulation.cluster.network.heal()


async def _cut(simulation: RunningSimulation, dice: random.Random) -> None:
    name, network = simulation.process(_any(simulation, dice)).name, simulation.cluster.network
    # A client has only half a second to reconnect, which is too short on a slow network.
    spares_clients = network.weather.slow_share > 0 and network.weather.slow_s >= _SLOW_S

    def matches(one: Process, other: Process) -> bool:
        if spares_clients and (one.name.startswith("client") or other.name.startswith("client")):
            return False
        return name in (one.name, other.name) and dice.random() < 0.7

    network.cut(matches)
