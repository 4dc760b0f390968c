"""A running simulation, through which scenarios inject faults."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from scheduler.core.worker_group import WorkerGroup
from tests.simulation.checker import Checker
from tests.simulation.cluster import Cluster
from tests.simulation.loop import Process
from tests.simulation.workload import Job

_POLL_S = 0.05


@dataclass
class RunningSimulation:
    """A running simulation and its faults.

    Attributes:
        happened: How often each fault occurred.
        problems: Violations found by a scenario.
    """

    cluster: Cluster
    checker: Checker
    dice: random.Random
    happened: Counter[str]
    jobs: list[Job] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    _watches: list[tuple[Callable[[], bool], Callable[[], None]]] = field(default_factory=list)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cluster.network.on_message = self._on_message

    def _on_message(self) -> None:
        for watch in self._watches[:]:
            if watch[0]():
                self._watches.remove(watch)
                watch[1]()

    @property
    def is_over(self) -> bool:
        """Return whether all clients have finished."""
        return all(job.is_done for job in self.jobs)

    async def at(self, condition: Callable[[], bool], action: Callable[[], None] = lambda: None) -> bool:
        """Run `action` just before the first message at whose arrival the condition holds; return False if all clients
        finish before that.
        """
        done = asyncio.get_running_loop().create_future()

        def act() -> None:
            action()
            done.set_result(None)

        self._watches.append((condition, act))
        while not done.done() and not self.is_over:
            await asyncio.wait([done], timeout=_POLL_S)
        self._watches = [watch for watch in self._watches if watch[1] is not act]
        return done.done()

    async def until(self, condition: Callable[[], bool], limit_s: float, what: str) -> bool:
        """Wait for a condition; return False and record a problem if the time limit is exceeded."""
        for _ in range(int(limit_s / _POLL_S)):
            if condition():
                return True
            await asyncio.sleep(_POLL_S)
        self.problems.append(f"did not happen within {limit_s} s: {what}")
        return False

    async def sleep(self, low_s: float, high_s: float) -> None:
        """Wait for a random time in this range."""
        await asyncio.sleep(self.dice.uniform(low_s, high_s))

    def messages(self, low: int, high: int) -> Callable[[], bool]:
        """Return a condition that holds after a random number of further messages."""
        network = self.cluster.network
        due = network.num_messages + self.dice.randint(low, high)
        return lambda: network.num_messages >= due

    def process(self, name: str) -> Process:
        """Return the newest process with a name."""
        return self.cluster.processes[name]

    def kill(self, name: str) -> None:
        """Send SIGKILL to a process."""
        process = self.process(name)
        if not process.is_dead:
            self.cluster.network.note(f"{process!r} is killed")
            self.happened[f"kill {name.partition('-')[0]}"] += 1
            process.die()

    def cut_power(self) -> None:
        """Cut the power of the scheduler's machine."""
        cluster = self.cluster
        cluster.network.note("the machine of the scheduler loses power")
        self.happened["power cut"] += 1
        for process in cluster.all_processes:
            if process.name == "scheduler":
                process.die()
        cluster.disk.cut_power(self.dice)

    def jump(self, name: str) -> None:
        """Shift the wall clock of a process's machine; later processes on that machine use the shifted clock too."""
        seconds = self.dice.choice((3, -3, 30, -30, 3600, -3600))
        self.cluster.wall_shifts[name] = self.process(name).wall_shift_s = seconds
        self.cluster.network.note(f"{self.process(name)!r} has its clock at {seconds:+d} s")

    async def restart(self, name: str, low_s: float = 0.05, high_s: float = 1.0) -> None:
        """Restart a dead process after a delay."""
        await self.sleep(low_s, high_s)
        if self.process(name).is_dead:
            self.cluster.start(name)

    def supervise(self, kind: str, delay_s: float) -> None:
        """Restart processes whenever they end."""
        self._tasks.append(asyncio.create_task(self._supervise(kind, delay_s)))

    async def _supervise(self, kind: str, delay_s: float) -> None:
        while True:
            await asyncio.sleep(delay_s)
            for name, process in list(self.cluster.processes.items()):
                if name.startswith(kind) and process.is_dead:
                    self.cluster.start(name)

    def groups(self) -> list[WorkerGroup]:
        """Return the scheduler's worker groups."""
        engine = self.cluster.engine
        return engine.core.groups if engine is not None else []

    def group(self, name: str) -> WorkerGroup | None:
        """Return the group of a worker."""
        return next((group for group in self.groups() if group.group_id == name), None)

    def is_decoding(self, name: str) -> bool:
        """Return whether a worker has a generation step in flight."""
        group = self.group(name)
        return group is not None and any(step.generation for step in group.in_flight)

    def is_streaming(self) -> bool:
        """Return whether any client is in the middle of its stream."""
        return any(not job.is_done and job.num_tokens for job in self.jobs)

    async def settle(self) -> None:
        """Wait until the scheduler has no more work."""
        self.cluster.network.heal()
        while (engine := self.cluster.engine) is None or engine.core.lifecycle.num_unfinished:
            if engine is None and self.process("scheduler").is_dead:
                self.cluster.start("scheduler")
            await asyncio.sleep(0.1)
        for task in self._tasks:
            task.cancel()
