"""Scenarios in which workers and their links fail, or in which workers have too few blocks."""

from __future__ import annotations

import asyncio
import random

from midstream.errors import ExecutionError, UnavailableError
from tests.simulation.cluster import Shape
from tests.simulation.network import Weather
from tests.simulation.running_simulation import RunningSimulation
from tests.simulation.scenarios import Scenario, scenario
from tests.simulation.workload import Job, jobs, long_request, poison, request


@scenario(1)
def worker_killed_in_decode(dice: random.Random) -> Scenario:
    """SIGKILL a worker: the stream continues on another worker."""
    name = f"worker-{dice.randrange(2)}"

    async def inject(simulation: RunningSimulation) -> None:
        if await simulation.at(lambda: simulation.is_decoding(name), lambda: simulation.kill(name)):
            simulation.happened["1"] += 1
            await simulation.restart(name)

    return Scenario(jobs=jobs(dice, 3), inject=inject)


def _name_of_worker(simulation: RunningSimulation, request_id: str, num_tokens: int) -> str:
    """Return the worker that runs a request and has given this number of its tokens, or an empty text."""
    for group in simulation.groups():
        if any(item.request_id == request_id and item.num_output_tokens >= num_tokens for item in group.active):
            return group.group_id
    return ""


@scenario(2)
def worker_terminated(dice: random.Random) -> Scenario:
    """SIGTERM a worker: it leaves, its blocks are adopted, and no death is counted."""
    num_tokens = dice.randint(20, 60)
    work = [*jobs(dice, 2), Job(long_request(dice, 2, dice.randint(40, 90), num_tokens))]
    after = dice.randrange(num_tokens - 5)

    async def inject(simulation: RunningSimulation) -> None:
        def victim() -> str:
            return _name_of_worker(simulation, "r2", after)

        terminated = list[str]()

        def terminate() -> None:
            terminated.append(victim())
            simulation.process(terminated[0]).terminate()

        if await simulation.at(lambda: bool(victim()), terminate):
            simulation.happened["2"] += 1
            process = simulation.process(terminated[0])
            if await simulation.until(lambda: process.is_dead, 5, "the worker exits") and process.exit_code != 0:
                simulation.problems.append(f"the worker exits with status {process.exit_code}")
            await simulation.restart(terminated[0])

    def judge(simulation: RunningSimulation) -> None:
        if simulation.checker.num_deaths:
            simulation.problems.append("a worker that shut down counts as dead")

    return Scenario(jobs=work, inject=inject, judge=judge)


@scenario(3)
def worker_killed_in_chunked_prefill(dice: random.Random) -> Scenario:
    """SIGKILL a worker between two prefill chunks of a prompt."""
    work = [Job(long_request(dice, i, dice.randint(40, 90), dice.randint(3, 12))) for i in range(2)]
    work += [Job(request(dice, number), start_s=dice.uniform(0, 0.1)) for number in (2, 3)]

    async def inject(simulation: RunningSimulation) -> None:
        def victim() -> str | None:
            for group in simulation.groups():
                if any(0 < item.num_computed < len(item.request.spec.prompt) for item in group.context):
                    return group.group_id
            return None

        def kill() -> None:
            simulation.kill(victim() or "")

        if await simulation.at(lambda: victim() is not None, kill):
            simulation.happened["3"] += 1
            simulation.supervise("worker", 0.4)

    settings = {"max_context_chunk": dice.choice((4, 8, 16)), "max_num_tokens": 32}
    return Scenario(shape=Shape(scheduler=settings), jobs=work, inject=inject)


@scenario(4)
def worker_stands_still(dice: random.Random) -> Scenario:
    """SIGSTOP a worker, or let a step hang; after SIGCONT, its messages have a stale epoch."""
    name = f"worker-{dice.randrange(2)}"
    hangs = dice.random() < 0.4

    async def inject(simulation: RunningSimulation) -> None:
        def stop() -> None:
            if hangs:
                simulation.cluster.workers[name].hangs = True
            else:
                simulation.process(name).freeze()

        if not await simulation.at(lambda: simulation.is_decoding(name), stop):
            return
        group = simulation.group(name)
        await simulation.until(lambda: simulation.group(name) is not group, 5, "the group is declared dead")
        simulation.happened["4 hang" if hangs else "4"] += 1
        await simulation.sleep(0.2, 2.0)
        if hangs:
            # The worker's health check kills it.
            simulation.kill(name)
            await simulation.restart(name)
        else:
            simulation.process(name).thaw()
            await simulation.until(lambda: simulation.group(name) is not None, 5, "the worker registers again")

    return Scenario(jobs=jobs(dice, 3), inject=inject)


@scenario(5)
def all_workers_dead(dice: random.Random) -> Scenario:
    """No worker is left: requests wait for a new worker, or fail with UNAVAILABLE within the time limit."""
    is_long = dice.random() < 0.4
    work = jobs(dice, 3)
    late = Job(request(dice, 9), start_s=12.0)
    if is_long:
        for job in work:
            job.must_complete = False
        work.append(late)

    async def inject(simulation: RunningSimulation) -> None:
        if not await simulation.at(simulation.is_streaming, lambda: [simulation.kill(f"worker-{i}") for i in range(2)]):  # type: ignore[arg-type,func-returns-value]
            return
        simulation.happened["5 long" if is_long else "5"] += 1
        await asyncio.sleep(10.0 if is_long else dice.uniform(0.1, 2.5))
        simulation.cluster.start("worker-0")

    def judge(simulation: RunningSimulation) -> None:
        for job in simulation.jobs:
            if job.error is not None and job is not late:
                if not isinstance(job.error, UnavailableError):
                    simulation.problems.append(f"not UNAVAILABLE: {job.error!r}")
                if job.ended_s > 6.0:
                    simulation.problems.append(f"it failed only after {job.ended_s} s")

    return Scenario(
        shape=Shape(scheduler={"no_worker_timeout_s": 3.0, "max_worker_deaths": 3}),
        jobs=work,
        inject=inject,
        judge=judge,
    )


@scenario(6)
def poisonous_request(dice: random.Random) -> Scenario:
    """A request that crashes workers is quarantined; the other requests complete."""
    work = jobs(dice, 3)
    bad = Job(poison(long_request(dice, 8, 5, 10)), start_s=dice.uniform(0, 0.2), must_complete=False)

    async def inject(simulation: RunningSimulation) -> None:
        simulation.supervise("worker", dice.uniform(0.1, 0.5))

    def judge(simulation: RunningSimulation) -> None:
        simulation.happened["6"] += 1
        if not isinstance(bad.error, ExecutionError):
            simulation.problems.append(f"the poison request ended with {bad.error!r}")
        if not 1 <= simulation.checker.num_deaths <= 8:
            simulation.problems.append(f"{simulation.checker.num_deaths} workers died while running it")

    return Scenario(jobs=[*work, bad], inject=inject, judge=judge)


@scenario(22)
def worker_lies(dice: random.Random) -> Scenario:
    """One of two workers returns invalid results, temporarily or permanently: it is held off, and no request fails."""
    work = jobs(dice, 4)
    name, num_lies = f"worker-{dice.randrange(2)}", dice.choice((1, 3, -1))

    async def inject(simulation: RunningSimulation) -> None:
        simulation.cluster.workers[name].lies = num_lies

    def judge(simulation: RunningSimulation) -> None:
        engine = simulation.cluster.engine
        assert engine is not None
        if engine.core.totals.num_worker_faults:
            simulation.happened["27"] += 1
            if simulation.checker.num_deaths:
                simulation.problems.append("a worker that returns invalid results counts as dead")

    return Scenario(jobs=work, inject=inject, judge=judge)


@scenario(16)
def kv_exhausted(dice: random.Random) -> Scenario:
    """There are more requests than blocks: some requests are preempted, and the output is the same."""
    work = [Job(long_request(dice, i, dice.randint(4, 16), dice.randint(10, 24))) for i in range(4)]

    def judge(simulation: RunningSimulation) -> None:
        simulation.happened["16"] += simulation.checker.num_preemptions

    shape = Shape(num_workers=1, num_blocks=dice.randint(12, 16), scheduler={"capacity_policy": "max_utilization"})
    return Scenario(shape=shape, jobs=work, judge=judge)


@scenario(17)
def zeromq_misbehaves(dice: random.Random) -> Scenario:
    """Messages between scheduler and workers are lost, duplicated, late and out of order; links are cut."""

    async def inject(simulation: RunningSimulation) -> None:
        network = simulation.cluster.network
        network.weather = Weather(
            slow_share=dice.choice((0, 0.05)), slow_s=0.3, loss=dice.choice((0, 0.01, 0.03)), repeats=0.1, overtakes=0.1
        )
        for _ in range(dice.randint(1, 3)):
            if not await simulation.at(simulation.messages(15, 90)):
                break
            name = f"worker-{dice.randrange(2)}"
            pair = {name, "scheduler"}
            if dice.random() < 0.5:
                network.cut(lambda one, other, pair=pair: {one.name, other.name} == pair)  # type: ignore[misc]
                simulation.happened["17 cut"] += 1
            else:
                network.part(name, "scheduler")
                await simulation.sleep(0.1, 3.0)
                network.heal()
                simulation.happened["17 parted"] += 1
        simulation.happened["17"] += 1
        await simulation.sleep(0, 1)
        network.weather = Weather()

    return Scenario(shape=Shape(scheduler={"max_worker_deaths": 100}), jobs=jobs(dice, 3), inject=inject)
