"""The components as processes of simulated machines; each runs the real service's main function."""

from __future__ import annotations

import asyncio
import contextvars
import random
import traceback
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import detokenizer.__main__
import router.__main__
from midstream.config import DetokenizerConfig, RouterConfig, SchedulerConfig
from midstream.parts import Part, PartError, run_parts
from scheduler.core.core import SchedulerCore
from scheduler.core.effects import Effect
from scheduler.core.events import Event, Recovered
from scheduler.edge.engine import Engine
from scheduler.journal import DeposedError, JournalError
from scheduler.service import SchedulerService
from tests.simulation.journal import FOLDER, JournalDisk
from tests.simulation.loop import Process, VirtualLoop
from tests.simulation.model import TOKENS_PER_BLOCK
from tests.simulation.network import Network, running
from tests.simulation.worker import Host, SimulatedWorker
from tests.simulation.world import folder

# The parts that share a process, in a layout where some do.
SHARING = ("scheduler", "detokenizer-0", "router-0")
SCHEDULER_PORT, WORKER_PORT, DETOKENIZER_PORT, ROUTER_PORT = 50052, 50053, 50054, 50051


@dataclass
class Shape:
    """The number of processes of each component, and their settings.

    Attributes:
        step_s: Mean duration of a worker's step.
        window: Maximum number of a call's messages that are in transit or unread.
        kinds: Kind of each worker that differs from the usual one, by name.
        has_stages: Whether some workers have several pipeline stages.
        all_kv: Whether workers always have roles and tiers; otherwise, the seed determines it.
        is_shared: Whether the parts in SHARING share a process, which has the scheduler's name and machine.
    """

    num_workers: int = 2
    num_detokenizers: int = 1
    num_routers: int = 1
    num_blocks: int = 64
    step_s: float = 0.01
    window: int = 16
    has_stages: bool = True
    all_kv: bool = False
    is_shared: bool = False
    kinds: dict[str, int] = field(default_factory=dict)
    scheduler: dict[str, Any] = field(default_factory=dict)
    router: dict[str, Any] = field(default_factory=dict)

    def scheduler_config(self) -> SchedulerConfig:
        settings: dict[str, Any] = {
            "host": "scheduler",
            "port": SCHEDULER_PORT,
            "worker_port": WORKER_PORT,
            "tokens_per_block": TOKENS_PER_BLOCK,
            "journal_path": FOLDER,
            "heartbeat_interval_ms": 400,
            "worker_timeout_ms": 1_000,
            "worker_progress_timeout_ms": 2_000,
            "drain_timeout_s": 10.0,
            **self.scheduler,
        }
        return SchedulerConfig(**settings)

    def detokenizer_config(self, name: str) -> DetokenizerConfig:
        return DetokenizerConfig(
            name=name,
            host=name,
            port=DETOKENIZER_PORT,
            schedulers=f"scheduler:{SCHEDULER_PORT}",
            drain_timeout_s=10.0,
        )

    def router_config(self, name: str) -> RouterConfig:
        return RouterConfig(
            name=name,
            host=name,
            port=ROUTER_PORT,
            schedulers=f"scheduler:{SCHEDULER_PORT}",
            detokenizers=f"dns:///detokenizers:{DETOKENIZER_PORT}",
            drain_timeout_s=10.0,
            **self.router,
        )


class Cluster:
    """All current processes by name.

    Attributes:
        processes: The newest process with each name.
        disk: The journal's disk.
        workers: The newest worker with each name.
        crashes: Processes that crashed because of a bug.
        problems: Data that a scheduler should have recovered.
        num_deposed: Number of schedulers that ended because another one had taken over.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        network: Network,
        shape: Shape,
        disk: JournalDisk,
        watch: Callable[[SchedulerCore], Callable[[Event, list[Effect]], None]],
    ) -> None:
        self.loop, self.network, self.shape = loop, network, shape
        network.window = shape.window
        self.disk = disk
        self.processes: dict[str, Process] = {}
        self.workers: dict[str, SimulatedWorker] = {}
        self._services: dict[Process, SchedulerService] = {}
        self.all_processes: list[Process] = []
        self.names: dict[str, list[str]] = {}
        self.crashes: list[str] = []
        self.problems: list[str] = []
        self.num_deposed = 0
        self.wall_shifts: dict[str, float] = {}
        self._watch = watch
        # Whether workers share a host, so that they can adopt blocks that a dead worker computed.
        self.host = Host(store=[] if network.dice.random() < 0.6 else None)
        # Whether the first worker runs prefill and the others run decode, and whether there are tiers. These are drawn
        # from another generator, so that they do not affect the other choices of a seed.
        dice = random.Random(repr(network.dice.getstate()))
        self._are_apart = dice.random() < 0.4 or shape.all_kv
        if dice.random() < 0.4 or shape.all_kv:
            self.host.tier = {}

    def start_all(self) -> None:
        """Start all processes of the shape."""
        shape = self.shape
        self.start("scheduler")
        for kind, count in (
            ("worker", shape.num_workers),
            ("detokenizer", shape.num_detokenizers),
            ("router", shape.num_routers),
        ):
            for number in range(count):
                self.start(f"{kind}-{number}")

    def start(self, name: str) -> Process:
        """Start or restart a process; in a layout with a shared process, with all of its parts."""
        if self.shape.is_shared and name in SHARING:
            if name != "scheduler" and name in self.processes and not self.processes[name].is_dead:
                return self.processes[name]
            process = self.run("scheduler", self._shared)
            self.processes |= dict.fromkeys(SHARING, process)
            self.names.setdefault("detokenizers", ["detokenizer-0"])
            return process
        kind = name.partition("-")[0]
        mains: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
            "scheduler": self._scheduler,
            "worker": lambda: self._worker(name),
            "detokenizer": lambda: self._detokenizer(name),
            "router": lambda: self._router(name),
        }
        if kind == "detokenizer":
            known = self.names.setdefault("detokenizers", [])
            if name not in known:
                known.append(name)
        return self.run(name, mains[kind])

    def retire(self, name: str) -> None:
        """Send SIGTERM to a process and stop resolving its name."""
        for names in self.names.values():
            if name in names:
                names.remove(name)
        self.processes[name].terminate()

    def run(self, name: str, main: Callable[[], Coroutine[Any, Any, Any]]) -> Process:
        """Run a coroutine in a new process, as its main task."""
        process = Process(name, len(self.all_processes))
        process.wall_shift_s = self.wall_shifts.get(name, 0.0)
        process.on_death += [lambda: self.network.died(process), lambda: self.disk.died(process)]
        self.all_processes.append(process)
        self.processes[name] = process
        self.network.note(f"{process!r} starts")

        async def live() -> None:
            code = 1
            try:
                code = await main() or 0
            except JournalError as error:
                self.num_deposed += isinstance(error, DeposedError)
            except asyncio.CancelledError:
                pass
            except Exception as error:  # noqa: BLE001 (whatever it is, it is a defect)
                where = traceback.extract_tb(error.__traceback__)[-1]
                self.crashes.append(f"{process!r} failed: {error!r} in {where.filename}:{where.lineno}")
            finally:
                self.network.note(f"{process!r} exits")
                # The last task of the process is this one, which is about to end.
                process.exit_code = code
                asyncio.get_running_loop().call_soon(process.die, code, context=contextvars.Context())

        process.spawn(live(), name)
        return process

    def resolve(self, name: str) -> list[str]:
        """Return the machines that a name in the simulated DNS resolves to."""
        return list(self.names.get(name, ()))

    def alive(self, kind: str) -> list[str]:
        """Return the names of running processes."""
        return [name for name, item in self.processes.items() if name.startswith(kind) and not item.is_dead]

    @property
    def service(self) -> SchedulerService | None:
        """Return the newest scheduler if it is running and ready."""
        process = self.processes.get("scheduler")
        service = self._services.get(process) if process is not None else None
        return service if process is not None and not process.is_dead and hasattr(service, "engine") else None

    @property
    def engine(self) -> Engine | None:
        """Return the engine of the newest scheduler."""
        return self.service.engine if self.service is not None else None

    def make_engine(self, core: SchedulerCore, **parts: Any) -> Engine:
        """Create the engine of the scheduler that is starting; all events of its core are checked."""
        engine = Engine(core, **{**parts, "observers": [self._watch(core)]})
        recover = engine.recover

        def check_and_recover(requests: list[Recovered]) -> None:
            self.problems += self.disk.recovered(requests)
            recover(requests)

        engine.recover = check_and_recover  # type: ignore[method-assign]
        return engine

    async def _scheduler(self) -> None:
        service = SchedulerService(self.shape.scheduler_config(), folder())
        self._services[running()] = service
        await service.run()

    async def _shared(self) -> None:
        parts = [
            Part("scheduler", "scheduler", self._scheduler),
            Part("detokenizer", "detokenizer-0", partial(self._detokenizer, "detokenizer-0")),
            Part("router", "router-0", partial(self._router, "router-0")),
        ]
        try:
            await run_parts(parts)
        except PartError as failed:
            raise failed.error from None

    async def _worker(self, name: str) -> int:
        address = f"tcp://scheduler:{WORKER_PORT}"
        shape = self.shape
        worker = SimulatedWorker(
            self.network,
            name,
            address,
            shape.num_blocks,
            shape.step_s,
            self.host,
            self._role(name),
            shape.kinds.get(name, 0),
            has_stages=shape.has_stages,
        )
        self.workers[name] = worker
        return await worker.run()

    def _role(self, name: str) -> str:
        if not self._are_apart:
            return "both"
        return "prefill" if name == "worker-0" else "decode"

    async def _detokenizer(self, name: str) -> None:
        await detokenizer.__main__.serve(self.shape.detokenizer_config(name))

    async def _router(self, name: str) -> None:
        await router.__main__.serve(self.shape.router_config(name))
