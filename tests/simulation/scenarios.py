"""The faults, one scenario for each, drawn by the seed."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from tests.simulation.checker import Checker
from tests.simulation.cluster import Cluster, Shape
from tests.simulation.workload import Job, jobs


@dataclass
class Stage:
    """A running simulation, for those that make faults."""

    cluster: Cluster
    checker: Checker
    dice: random.Random
    happened: Counter[str]
    jobs: list[Job] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    async def settle(self) -> None:
        """Waits until the scheduler has nothing left to do."""
        self.cluster.network.heal()
        while (engine := self.cluster.engine) is None or engine.core.lifecycle.num_unfinished:
            await asyncio.sleep(0.1)


async def _nothing(_: Stage) -> None:
    pass


@dataclass
class Scenario:
    """Parts, requests, and what is done to them."""

    name: str
    shape: Shape
    jobs: list[Job]
    inject: Callable[[Stage], Awaitable[None]] = _nothing
    judge: Callable[[Stage], None] = lambda _: None
    may_report: tuple[str, ...] = ()


def scenario_of(seed: int, dice: random.Random) -> Scenario:
    """The scenario of a seed."""
    return Scenario("fault-free", Shape(), jobs(dice, 4))
