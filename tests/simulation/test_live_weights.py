"""Weights that change while requests run and every part is killed.

Each token is the one that its version gives after the tokens before it, where the stream says which version that was.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from typing import Any

import pytest

from midstream.chunk import Chunk
from midstream.client import AsyncClient
from midstream.errors import MidstreamError
from tests.simulation.__main__ import describe
from tests.simulation.cluster import ROUTER_PORT, Shape
from tests.simulation.model import extend_state, next_token
from tests.simulation.run import run_seed
from tests.simulation.running_simulation import RunningSimulation
from tests.simulation.scenarios import Scenario
from tests.simulation.workload import Job, long_request

NUM_SEEDS = 40


class LiveJob(Job):
    """A request of one sequence that is computed by any versions, which its final chunk names."""

    def add(self, chunk: Chunk) -> None:
        tokens = self.tokens[0]
        if chunk.token_offset != len(tokens):
            self.problems.append(f"it continues at token {chunk.token_offset}, but {len(tokens)} tokens were received")
        tokens.extend(chunk.token_ids)
        self.texts[0] += chunk.text
        if chunk.is_final:
            self.final = chunk

    def check_complete(self) -> None:
        tokens = self.tokens[0]
        if self.final is None or len(tokens) != self.request.max_tokens:
            self.problems.append(f"it ended after {len(tokens)} of {self.request.max_tokens} tokens")
            return
        parts = [(part.from_token, part.version) for part in self.final.weights] or [(0, "default")]
        if parts[0][0] != 0 or [start for start, _ in parts] != sorted({start for start, _ in parts}):
            self.problems.append(f"its versions are {parts}")
        for place, token in enumerate(tokens):
            version = [name for start, name in parts if start <= place][-1]
            kind = 0 if version == "default" else int(version)
            state = functools.reduce(extend_state, [*self.request.token_ids.values, *tokens[:place]], kind)
            if next_token(state, self.request.sampling.seed, 0) != token:
                self.problems.append(f"token {place} of {tokens} is not of version {version}; its versions are {parts}")
                return


def live(dice: random.Random) -> Scenario:
    """Change the weights again and again, pause, and kill parts."""
    work: list[Job] = [
        LiveJob(long_request(dice, number, dice.randint(3, 30), dice.randint(20, 90)), start_s=dice.uniform(0, 1.0))
        for number in range(6)
    ]
    shape = Shape(
        num_workers=3,
        num_detokenizers=2,
        num_routers=2,
        step_s=0.02,
        router={"update_root": "/weights", "anonymous_roles": "admin"},
    )

    async def inject(simulation: RunningSimulation) -> None:
        cluster, dice, happened = simulation.cluster, simulation.dice, simulation.happened

        async def administer(*calls: Any) -> None:
            async with AsyncClient([f"router-{number}:{ROUTER_PORT}" for number in range(2)]) as client:
                for call in calls:
                    try:
                        await call(client)
                        happened["administered"] += 1
                    except MidstreamError:
                        happened["failed"] += 1

        async def change(client: AsyncClient, number: int, on_update: Any) -> None:
            await client.update_weights(f"/weights/{number}", str(number), on_update=on_update)
            happened["updated"] += 1

        for number in range(1, dice.randint(2, 5)):
            calls = _calls(dice, functools.partial(change, number=number, on_update="recompute"))
            main: Any = functools.partial(administer, *calls)
            cluster.run(f"admin-{number}", main)
            for _ in range(dice.randint(0, 2)):
                await simulation.sleep(0.02, 0.4)
                name = dice.choice(("worker-0", "worker-1", "worker-2", "scheduler", "router-0", "detokenizer-0"))
                simulation.kill(name)
                await simulation.restart(name, 0.05, 0.4)
            await simulation.sleep(0.2, 0.6)
        # A pause whose end was lost with a router would last forever.
        await simulation.until(lambda: not cluster.alive("admin"), 60, "the administration ends")
        cluster.run("admin-last", lambda: administer(lambda client: client.resume_generation(), _wake))

    def judge(simulation: RunningSimulation) -> None:
        jobs = [job for job in simulation.jobs if isinstance(job, LiveJob) and job.final is not None]
        simulation.happened["swapped"] += sum(len(job.final.weights) > 1 for job in jobs if job.final is not None)

    return Scenario("live weights", shape, work, inject, judge)


def _calls(dice: random.Random, change: Any) -> list[Any]:
    """Return the calls of an administrator: a change, perhaps during a pause, and perhaps a sleep after it."""
    calls = [change]
    if dice.random() < 0.4:
        mode = dice.choice(("keep", "recompute"))
        calls = [functools.partial(_pause, mode=mode), change, lambda client: client.resume_generation()]
    if dice.random() < 0.4:
        calls.append(functools.partial(_sleep, level=dice.randint(1, 2)))
        if dice.random() < 0.8:  # otherwise the workers sleep until the end
            calls.append(_wake)
    return calls


async def _pause(client: AsyncClient, mode: Any) -> None:
    await client.pause_generation(mode)


async def _sleep(client: AsyncClient, level: Any) -> None:
    await client.sleep(level)


async def _wake(client: AsyncClient) -> None:
    await client.wake_up()


def test_every_token_is_of_the_version_that_its_stream_names() -> None:
    happened = Counter[str]()
    outcomes = [run_seed(seed, make=live) for seed in range(NUM_SEEDS)]
    failed = [outcome for outcome in outcomes if outcome.problems]
    assert not failed, "\n".join(map(describe, failed))
    for outcome in outcomes:
        happened.update(outcome.happened)
    for name in ("swapped", "updated", "changed weights", "slept", "woke up"):
        assert happened[name] > NUM_SEEDS / 4, happened


def unloading(dice: random.Random) -> Scenario:
    """Let requests come one after another, each after the workers have been unloaded, and kill parts meanwhile."""
    work: list[Job] = [
        Job(long_request(dice, number, dice.randint(3, 30), dice.randint(5, 40)), start_s=2.0 * number)
        for number in range(4)
    ]
    shape = Shape(num_workers=2, step_s=0.01, scheduler={"unload_after": dice.uniform(0.2, 0.8)})

    async def inject(simulation: RunningSimulation) -> None:
        for _ in range(dice.randint(0, 3)):
            await simulation.sleep(0.3, 2.0)
            name = dice.choice(("worker-0", "worker-1", "scheduler"))
            simulation.kill(name)
            await simulation.restart(name, 0.05, 0.4)

    return Scenario("unloading", shape, work, inject)


def test_unloaded_workers_are_woken_by_the_next_request() -> None:
    happened = Counter[str]()
    outcomes = [run_seed(seed, make=unloading) for seed in range(NUM_SEEDS)]
    failed = [outcome for outcome in outcomes if outcome.problems]
    assert not failed, "\n".join(map(describe, failed))
    for outcome in outcomes:
        happened.update(outcome.happened)
    assert min(happened["slept"], happened["woke up"]) > NUM_SEEDS, happened


@pytest.mark.parametrize("seed", [3, 4])
def test_it_replays_event_for_event(seed: int) -> None:
    first, second = (run_seed(seed, make=live, trace=True) for _ in range(2))
    assert first.trace == second.trace
