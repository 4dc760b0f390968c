"""Scenarios in which schedulers, detokenizers, routers and disks fail."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import random
from collections.abc import Iterator

from midstream.errors import DeadlineError
from tests.simulation.cluster import SHARING, Shape
from tests.simulation.journal import FOLDER, JournalDisk
from tests.simulation.model import vocabulary
from tests.simulation.running_simulation import RunningSimulation
from tests.simulation.scenarios import Scenario, scenario
from tests.simulation.workload import Job, jobs, long_request, request

# Time at which the first client may send its request.
_START_S = 0.5


def _two_of_each() -> Shape:
    return Shape(num_detokenizers=2, num_routers=2)


@scenario(7)
def scheduler_killed(dice: random.Random) -> Scenario:
    """SIGKILL the scheduler once or more: its state is rebuilt from the journal."""
    times = dice.choice((1, 1, 2, 3))

    async def inject(simulation: RunningSimulation) -> None:
        for _ in range(times):
            if not await simulation.at(simulation.messages(15, 130), lambda: simulation.kill("scheduler")):
                return
            if simulation.is_streaming():
                simulation.happened["7"] += 1
            await simulation.restart("scheduler")

    return Scenario(shape=_two_of_each(), jobs=jobs(dice, 3), inject=inject)


@scenario(8)
def old_scheduler_returns(dice: random.Random) -> Scenario:
    """A replaced scheduler keeps running, but is fenced and exits."""
    freezes = dice.random() < 0.6

    async def inject(simulation: RunningSimulation) -> None:
        old = simulation.process("scheduler")
        if not await simulation.at(simulation.messages(15, 110), old.freeze if freezes else lambda: None):
            return
        await simulation.sleep(0.05, 1.0)
        new = simulation.cluster.start("scheduler")
        await simulation.sleep(0.0, 1.0)
        if freezes or dice.random() < 0.5:
            simulation.cluster.network.cut(lambda one, other: old in (one, other))
        await simulation.sleep(0.05, 2.0)
        old.thaw()
        await simulation.until(lambda: old.is_dead, 10, "the old scheduler ends")
        if simulation.cluster.num_deposed:
            simulation.happened["8"] += 1
        if new.is_dead:
            simulation.problems.append("the new scheduler ended")

    return Scenario(shape=_two_of_each(), jobs=jobs(dice, 3), inject=inject, may_report=("the journal failed",))


@scenario(9)
def detokenizer_killed_in_a_character(dice: random.Random) -> Scenario:
    """SIGKILL detokenizers while a client has only some of the tokens of a character."""

    def is_torn(job: Job) -> bool:
        pieces = vocabulary().pieces
        for tokens in job.tokens:
            data = b"".join(pieces[token] for token in tokens)
            if not job.is_done and codecs.utf_8_decode(data, "replace", False)[1] < len(data):
                return True
        return False

    async def inject(simulation: RunningSimulation) -> None:
        victims = ["detokenizer-0", "detokenizer-1"] if dice.random() < 0.5 else [f"detokenizer-{dice.randrange(2)}"]

        def kill() -> None:
            for name in victims:
                simulation.kill(name)

        if await simulation.at(lambda: any(map(is_torn, simulation.jobs)), kill):
            simulation.happened["9"] += 1
        for name in victims:
            await simulation.restart(name)

    work = [Job(long_request(dice, i, 4, dice.randint(8, 16)), start_s=dice.uniform(0, 0.2)) for i in range(3)]
    return Scenario(shape=_two_of_each(), jobs=work, inject=inject)


@scenario(10)
def detokenizers_come_and_go(dice: random.Random) -> Scenario:
    """Scale the detokenizers from one to four and back to one under load."""
    work = [Job(request(dice, i), start_s=dice.uniform(0, 5)) for i in range(5)]

    async def inject(simulation: RunningSimulation) -> None:
        await simulation.sleep(0.1, 0.5)
        for number in range(1, 4):
            simulation.cluster.start(f"detokenizer-{number}")
        await simulation.sleep(2.0, 3.0)
        names = [f"detokenizer-{number}" for number in range(4)]
        dice.shuffle(names)
        # A part of a shared process is not removed alone.
        left = "detokenizer-0" if simulation.cluster.shape.is_shared else names[0]
        for name in names:
            if name == left:
                continue
            simulation.cluster.retire(name)
            await simulation.sleep(0.0, 0.4)
        simulation.happened["10"] += 1

    return Scenario(jobs=work, inject=inject)


@scenario(11)
def router_killed(dice: random.Random) -> Scenario:
    """SIGKILL routers: clients resume at another router, or at the same router after its restart."""

    async def inject(simulation: RunningSimulation) -> None:
        for number in dice.sample(range(2), dice.choice((1, 2))):
            name = f"router-{number}"
            if await simulation.at(simulation.messages(20, 90), lambda name=name: simulation.kill(name)):  # type: ignore[misc]
                if simulation.is_streaming():
                    simulation.happened["11"] += 1
                await simulation.restart(name)

    return Scenario(shape=_two_of_each(), jobs=jobs(dice, 3), inject=inject)


@scenario(18)
def rolling_restart(dice: random.Random) -> Scenario:
    """Replace every component under load and close old connections: no request fails."""
    work = [Job(request(dice, i), start_s=dice.uniform(0, 4)) for i in range(5)]

    async def inject(simulation: RunningSimulation) -> None:
        names = [name for name in simulation.cluster.processes if not name.startswith("client")]
        dice.shuffle(names)
        for name in names:
            process = simulation.process(name)
            if name in SHARING and simulation.cluster.shape.is_shared:  # another of its parts may have been restarted
                await simulation.until(lambda process=process: process.signals, 10, f"{name} starts")  # type: ignore[misc]
            process.terminate()
            # The parts of a shared process drain one after the other.
            limit_s = 30 if simulation.cluster.shape.is_shared else 15
            await simulation.until(lambda process=process: process.is_dead, limit_s, f"{name} drains")  # type: ignore[misc]
            if process.exit_code != 0:
                simulation.problems.append(f"{name} exits with status {process.exit_code}")
            await simulation.restart(name, 0.05, 0.3)
            if dice.random() < 0.3:
                simulation.cluster.network.cut(lambda *_: dice.random() < 0.3)
        simulation.happened["18"] += 1

    return Scenario(shape=_two_of_each(), jobs=work, inject=inject)


@scenario(20)
def journal_fails(dice: random.Random) -> Scenario:
    """The disk is full, slow or broken, or loses power, or a record is damaged, or the files are deleted."""
    kind = dice.choice(
        ("full", "slow", "failed write", "failed sync", "power cut", "power cut", "corrupt", "corrupt request", "lost")
    )

    async def inject(simulation: RunningSimulation) -> None:
        if kind == "power cut":
            await _cut_power(simulation)
        elif kind.startswith("corrupt"):
            await _damage(simulation, kind)
        elif await simulation.at(simulation.messages(15, 110)):
            simulation.supervise("scheduler", 0.3)
            with break_disk(simulation.cluster.disk, kind, dice):
                await simulation.sleep(0.6, 2.0)
            simulation.happened[f"20 {kind}"] += 1

    return Scenario(
        shape=_two_of_each(),
        jobs=jobs(dice, 3),
        inject=inject,
        may_report=("the journal failed", "is damaged", "was lost"),
    )


async def _cut_power(simulation: RunningSimulation) -> None:
    for _ in range(simulation.dice.randint(1, 3)):
        if await simulation.at(simulation.messages(15, 90), simulation.cut_power):
            await simulation.restart("scheduler")


async def _damage(simulation: RunningSimulation, kind: str) -> None:
    disk = simulation.cluster.disk
    if not await simulation.at(simulation.messages(25, 110), lambda: simulation.kill("scheduler")):
        return
    if kind == "corrupt request" and simulation.cluster.shape.is_shared:
        # The only other copy of a request was in its router, which died with the scheduler.
        for job in simulation.jobs:
            job.must_complete = False
    if disk.damage(kind, simulation.dice):
        simulation.happened[f"20 {kind}"] += 1
    await simulation.restart("scheduler")
    await simulation.until(
        lambda: simulation.cluster.engine is not None, 5, "the scheduler starts with the remaining journal"
    )
    service = simulation.cluster.service
    if disk.was_damaged and service is not None and not service.journal.num_damaged:
        simulation.problems.append("the damage was not reported")


@contextlib.contextmanager
def break_disk(disk: JournalDisk, kind: str, dice: random.Random) -> Iterator[None]:
    """Break the disk within this context: `full`, `slow`, `failed write`, `failed sync`, or `lost` (the files are
    deleted).
    """
    if kind == "full":
        disk.fill(dice.choice((0, dice.randint(0, 200))))
    elif kind == "slow":
        disk.slow_share = dice.uniform(0.3, 1.0)
    elif kind == "lost":
        disk.delete(FOLDER)
    else:
        disk.failures_left[kind.removeprefix("failed ")] = dice.randint(1, 3)
    try:
        yield
    finally:
        disk.free()
        disk.slow_share = 0.0
        disk.failures_left.clear()


@scenario(21)
def clocks_jump(dice: random.Random) -> Scenario:
    """The wall clocks of all processes jump repeatedly: deadlines are met, and nothing else changes."""
    late = [
        Job(long_request(dice, 8 + number, 5, 200), timeout_s=dice.uniform(1.0, 3.0), must_complete=False)
        for number in range(2)
    ]
    dies = dice.random() < 0.5

    async def inject(simulation: RunningSimulation) -> None:
        while not simulation.is_over:
            parts = [name for name, item in simulation.cluster.processes.items() if not item.is_dead]
            simulation.jump(dice.choice([name for name in parts if not name.startswith("client")]))
            simulation.happened["26"] += 1
            if dies and simulation.is_streaming() and dice.random() < 0.1:
                simulation.kill("scheduler")
                await simulation.restart("scheduler", 0.05, 0.1)
            await asyncio.sleep(0.1)

    def judge(simulation: RunningSimulation) -> None:
        for job in late:
            off_s = job.ended_s - _START_S - job.start_s - (job.timeout_s or 0)
            if simulation.happened["kill scheduler"]:
                continue
            if not isinstance(job.error, DeadlineError):
                simulation.problems.append(f"after its deadline it ended with {job.error!r}")
            elif abs(off_s) > 0.1:
                simulation.problems.append(f"it ended {off_s:+.3f} s from its deadline")
        if simulation.checker.num_deaths and not simulation.happened["kill scheduler"]:
            simulation.problems.append("a worker was declared dead")

    return Scenario(shape=Shape(step_s=0.05), jobs=[*late, *jobs(dice, 3)], inject=inject, judge=judge)
