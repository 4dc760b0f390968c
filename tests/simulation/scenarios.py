"""The faults that have to be survived, a scenario for each; the seed draws the rest."""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.cluster import Shape
from tests.simulation.stage import Stage
from tests.simulation.workload import Job


async def _nothing(_: Stage) -> None:
    pass


def _accept(_: Stage) -> None:
    pass


@dataclass
class Scenario:
    """Parts, requests, and what is done to them.

    Attributes:
        inject: Makes the faults.
        judge: Looks at what came of it, beside what always holds.
        may_report: Errors that parts may log.
    """

    name: str = ""
    shape: Shape = field(default_factory=Shape)
    jobs: list[Job] = field(default_factory=list)
    inject: Callable[[Stage], Coroutine[Any, Any, None]] = _nothing
    judge: Callable[[Stage], None] = _accept
    may_report: tuple[str, ...] = ()


# Each fault has one seed of so many, and mixtures have the rest.
_CYCLE = 25

MakeScenario = Callable[[random.Random], Scenario]
SCENARIOS: dict[int, MakeScenario] = {}


def scenario(number: int) -> Callable[[MakeScenario], MakeScenario]:
    """Registers what makes a fault; its name says which."""

    def register(make: MakeScenario) -> MakeScenario:
        SCENARIOS[number] = make
        return make

    return register


def scenario_of(seed: int, dice: random.Random) -> Scenario:
    """The scenario of a seed: all take turns."""
    from tests.simulation import fault_mix, faults_of_clients, faults_of_services, faults_of_workers  # noqa: F401 (they register)

    make = SCENARIOS.get(seed % _CYCLE, SCENARIOS[0])
    result = make(dice)
    result.name = make.__name__.strip("_")
    return result
