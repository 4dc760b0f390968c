"""A scenario for each fault that must be survived; the seed determines the rest."""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.cluster import Shape
from tests.simulation.running_simulation import RunningSimulation
from tests.simulation.workload import Job


async def _nothing(_: RunningSimulation) -> None:
    pass


def _accept(_: RunningSimulation) -> None:
    pass


@dataclass
class Scenario:
    """Processes, requests, and faults.

    Attributes:
        inject: Function that injects the faults.
        judge: Function that checks the result, in addition to the general invariants.
        may_report: Errors that processes are allowed to log.
        tokenizers: Tokenizers of processes with another one than the usual, by name.
    """

    name: str = ""
    shape: Shape = field(default_factory=Shape)
    jobs: list[Job] = field(default_factory=list)
    inject: Callable[[RunningSimulation], Coroutine[Any, Any, None]] = _nothing
    judge: Callable[[RunningSimulation], None] = _accept
    may_report: tuple[str, ...] = ()
    tokenizers: dict[str, str] = field(default_factory=dict)


# Of this many consecutive seeds, each scenario has one, and mixtures of faults have the rest.
_CYCLE = 25

MakeScenario = Callable[[random.Random], Scenario]
SCENARIOS: dict[int, MakeScenario] = {}


def scenario(number: int) -> Callable[[MakeScenario], MakeScenario]:
    """Register the decorated function, which creates a scenario, under a number; the scenario has the name of the
    function.
    """

    def register(make: MakeScenario) -> MakeScenario:
        SCENARIOS[number] = make
        return make

    return register


def scenario_of(seed: int, dice: random.Random) -> Scenario:
    """Return the scenario of a seed; the seeds cycle through all scenarios."""
    from tests.simulation import fault_mix, faults_of_clients, faults_of_services, faults_of_workers  # noqa: F401 (they register)

    make = SCENARIOS.get(seed % _CYCLE, SCENARIOS[0])
    result = make(dice)
    result.name = make.__name__.strip("_")
    return result
