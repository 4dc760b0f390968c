"""Runs the processes of a service on this machine: starts, monitors, restarts and stops them.

A process is `starting` until /health first answers 200, then `ready`, or `unhealthy` while /health fails. When it
exits, it is `restarting`, and is started again after a backoff that doubles with each exit and is reset once the
process has been ready for a second. A process that was ready and hangs (no answer, or a stalled loop) is killed after
_MAX_HANG_S. If a process exits before the whole service has been ready once, the run fails, because the settings are
wrong. On shutdown, routers stop first, so that their streams can finish; the scheduler stops last.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from midstream.cli import health
from midstream.cli.logs import last_lines, last_message
from midstream.cli.run_dir import ProcessPhase, ProcessState, RunDir, RunState, is_alive, orphans, started_ticks
from midstream.cli.topology import ProcessSpec, command_of
from midstream.config import API_KEY_VARIABLE
from midstream.errors import ExecutionError
from midstream.python_process import python_environment

_PROBE_INTERVAL_S = 0.2
_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 10.0
_MAX_HANG_S = 30.0
_REWRITE_INTERVAL_S = 1.0
# The first is longer than the services' drain timeout. The second applies after a second SIGTERM, and to processes that
# have nothing to drain, which are safe to kill.
_STOP_TIMEOUT_S, _QUICK_STOP_S = 40.0, 2.0
# Time for open streams to finish after Ctrl-C. Unfinished requests are in the journal and continue at the next start.
HURRIED_STOP_S = 3.0
_STOP_ORDER = (
    (("router",), _STOP_TIMEOUT_S),
    (("detokenizer", "gpu_worker"), _STOP_TIMEOUT_S),
    (("scheduler",), _QUICK_STOP_S),
)

logger = logging.getLogger(__name__)

Observer = Callable[[RunState], None]


class Supervisor:
    """One run of a set of processes, from start to stop.

    Attributes:
        state: The processes, as last written to the run directory.
    """

    def __init__(self, run_dir: RunDir, model: str, specs: Sequence[ProcessSpec], observer: Observer) -> None:
        """Claim the run directory.

        Args:
            observer: Called with the state at each change. If it raises OSError, the run continues.

        Raises:
            ConfigError: Another supervisor uses the directory.
        """
        run_dir.acquire()
        self._run_dir = run_dir
        self._observer = observer
        by_process: dict[str, list[ProcessSpec]] = {}
        for spec in specs:
            by_process.setdefault(spec.process, []).append(spec)
        self._names = [spec.name for spec in specs]
        self._processes = [
            _Process(name, sharing, run_dir.logs / f"{name}.log", self._changed) for name, sharing in by_process.items()
        ]
        self._was_ready = False
        self._max_stop_s = _STOP_TIMEOUT_S
        self._rewrite: asyncio.TimerHandle | None = None
        self.state = RunState(model, ProcessPhase.STARTING, os.getpid(), time.time(), ())

    async def run(self, stop: asyncio.Event, ready: asyncio.Event | None = None) -> None:
        """Run all processes until `stop` is set; then, or if the start fails, stop all of them.

        Args:
            stop: Set it to end the run; clear it and set it again to kill processes that have not stopped.
            ready: Set when every process is ready for the first time.

        Raises:
            ExecutionError: A process died while the service was starting.
            OSError: The run directory cannot be written.
        """
        earlier = self._run_dir.read_state()
        stop_orphans(earlier)
        self._remove_logs(earlier)
        self._run_dir.write_state(self.state)  # if the state cannot be written, no process is started
        self._changed()
        lives = [asyncio.create_task(process.live(), name=process.name) for process in self._processes]
        try:
            await self._wait_until_ready(stop)
            if not stop.is_set():
                self._set_phase(ProcessPhase.READY)
                self._was_ready = True
                if ready is not None:
                    ready.set()
                await stop.wait()
        except ExecutionError as error:
            self.state = replace(self.state, error=str(error))
            raise
        finally:
            self._set_phase(ProcessPhase.STOPPING)
            await self._stop_all()
            await asyncio.gather(*lives)
            self._set_phase(ProcessPhase.FAILED if self.state.error else ProcessPhase.STOPPED)
            if self._rewrite is not None:
                self._rewrite.cancel()
            self._run_dir.release()

    def _remove_logs(self, earlier: RunState | None) -> None:
        """Remove the logs of an earlier run's processes that this run does not have, for example because its services
        share a process.
        """
        own = {process.log for process in self._processes}
        for log in {Path(state.log) for state in earlier.processes if state.log} - own if earlier is not None else ():
            log.unlink(missing_ok=True)

    def hurry(self) -> None:
        """Limit the time for open streams to HURRIED_STOP_S once the run is stopped; call this before `stop` is set."""
        self._max_stop_s = HURRIED_STOP_S

    def kill(self) -> None:
        for process in self._processes:
            process.send(signal.SIGKILL)

    async def _wait_until_ready(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            if all(process.is_in(ProcessPhase.READY) for process in self._processes):
                return
            for process in self._processes:
                if process.num_restarts:
                    lines = last_lines(process.log, 12)
                    reason = last_lines(process.log, 1).strip() or process.states[0].detail
                    raise ExecutionError(
                        f"{process.name} stopped while it was starting: {reason}\n"
                        f"Its log, {process.log}, ends with\n{lines}"
                    )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), _PROBE_INTERVAL_S)

    async def _stop_all(self) -> None:
        """Stop routers first, so that streams can finish; a scheduler without workers has no requests to wait for.

        If the service was never ready, there are no streams; requests in the journal continue at the next start.
        """
        for process in self._processes:
            process.stopping.set()
        if not self._was_ready:
            await asyncio.gather(*(process.stop(_QUICK_STOP_S) for process in self._processes))
            return
        left = list(self._processes)
        for kinds, timeout_s in _STOP_ORDER:
            # The parts of a shared process stop in this order, too, once it is told to stop.
            mine = [process for process in left if any(spec.kind in kinds for spec in process.specs)]
            left = [process for process in left if process not in mine]
            # A shared process also stops its scheduler, which the streams of other routers need.
            for is_shared in (False, True):
                group = [process for process in mine if (len(process.specs) > 1) is is_shared]
                await asyncio.gather(*(process.stop(min(timeout_s, self._max_stop_s)) for process in group))

    def _set_phase(self, phase: ProcessPhase) -> None:
        self.state = replace(self.state, phase=phase)
        self._changed()

    def _changed(self) -> None:
        states = {state.name: state for process in self._processes for state in process.states}
        self.state = replace(self.state, processes=tuple(states[name] for name in self._names))
        self._write_state()
        with contextlib.suppress(OSError):  # the observer prints to a terminal or pipe that may be closed
            self._observer(self.state)

    def _write_state(self) -> None:
        """Write the state; if that fails (for example because the disk is full), continue and retry later."""
        if self._rewrite is not None:
            self._rewrite.cancel()
            self._rewrite = None
        try:
            self._run_dir.write_state(self.state)
        except OSError as error:
            logger.warning("cannot write the state to %s: %s", self._run_dir.path, error)
            self._rewrite = asyncio.get_running_loop().call_later(_REWRITE_INTERVAL_S, self._write_state)


class _Process:
    """One process and its restarts.

    Attributes:
        specs: The components that it runs; several share it.
        states: The state of each of them. They differ in their names, addresses and health.
    """

    def __init__(self, name: str, specs: Sequence[ProcessSpec], log: Path, changed: Callable[[], None]) -> None:
        self.name = name
        self.specs = specs
        self.log = log
        self.stopping = asyncio.Event()
        self.states = [ProcessState(spec.name, spec.kind, spec.addresses, str(log)) for spec in specs]
        self._changed = changed
        self._exited = asyncio.Event()
        self._backoff_s = _FIRST_BACKOFF_S
        self.log.write_bytes(b"")

    @property
    def num_restarts(self) -> int:
        return self.states[0].num_restarts

    def is_in(self, *phases: ProcessPhase) -> bool:
        """Return whether all components are in one of the phases."""
        return all(state.phase in phases for state in self.states)

    async def live(self) -> None:
        """Start the process and restart it whenever it exits, until `stopping` is set."""
        while not self.stopping.is_set():
            code = await self._run_once()
            if self.stopping.is_set():
                break
            reason = f"ended by signal {-code}" if code < 0 else f"exit status {code}"
            self._update(phase=ProcessPhase.RESTARTING, pid=0, num_restarts=self.num_restarts + 1, detail=reason)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.stopping.wait(), self._backoff_s)
            self._backoff_s = min(2 * self._backoff_s, _MAX_BACKOFF_S)
        self._update(phase=ProcessPhase.STOPPED, pid=0, detail="")

    async def stop(self, timeout_s: float) -> None:
        """Terminate the process; after `timeout_s`, end its open streams, and kill it if it is still running."""
        if not self.states[0].pid:
            return
        # After SIGTERM, a router would first wait until proxies send its calls to others, but all routers stop now. A
        # process that is starting may ignore SIGINT, as background processes of a shell do.
        has_router = any(spec.kind == "router" for spec in self.specs)
        is_serving = self.is_in(ProcessPhase.READY, ProcessPhase.UNHEALTHY)
        first = signal.SIGINT if has_router and is_serving else signal.SIGTERM
        self._update(phase=ProcessPhase.STOPPING, detail="finishing its streams")
        for number, limit_s in ((first, timeout_s), (signal.SIGTERM, _QUICK_STOP_S), (signal.SIGKILL, None)):
            self.send(number)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._exited.wait(), limit_s)
                return

    def send(self, number: signal.Signals) -> None:
        """Send a signal if the process is still running."""
        if is_alive(self.states[0]):
            os.kill(self.states[0].pid, number)

    async def _run_once(self) -> int:
        self._exited.clear()
        environment = _environment()
        for spec in self.specs:
            environment |= spec.environment
        with self.log.open("ab") as log:
            # The process gets its own session, so that Ctrl-C in the terminal reaches only the supervisor, which stops
            # the processes in order.
            process = await asyncio.create_subprocess_exec(
                *command_of(self.specs),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=python_environment(environment),
            )
        self._update(
            phase=ProcessPhase.STARTING,
            pid=process.pid,
            started_ticks=started_ticks(process.pid),
            started_unix_s=time.time(),
            detail="",
        )
        if self.stopping.is_set():  # set before there was a pid, so `stop` may have had no effect
            self.send(signal.SIGKILL)
        watches = [asyncio.create_task(self._watch_health(index)) for index in range(len(self.specs))]
        code = await process.wait()
        for watch in watches:
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch
        self._exited.set()
        return code

    async def _watch_health(self, index: int) -> None:
        address, hangs_since = self.specs[index].addresses["http"], None
        while True:
            problem = await health.probe_health(address)
            phase = self.states[index].phase
            if phase is not ProcessPhase.UNHEALTHY or await health.is_alive(address):
                hangs_since = None
            elif time.monotonic() - (hangs_since := hangs_since or time.monotonic()) > _MAX_HANG_S:
                self.send(signal.SIGKILL)
            # The process has been ready for a second, so a later exit is not a failure to start.
            if problem is None and self.is_in(ProcessPhase.READY):
                self._backoff_s = _FIRST_BACKOFF_S
            if self.states[index].phase is not ProcessPhase.STOPPING:
                self._note_health(index, problem)
            settled = self.states[index].phase is ProcessPhase.READY
            await asyncio.sleep(1.0 if settled else _PROBE_INTERVAL_S)

    def _note_health(self, index: int, problem: str | None) -> None:
        state = self.states[index]
        if problem is None:
            self._set(index, replace(state, phase=ProcessPhase.READY, detail=""))
        elif state.phase is ProcessPhase.STARTING:
            self._set(index, replace(state, detail=last_message(self.log) or "starting Python"))
        else:
            self._set(index, replace(state, phase=ProcessPhase.UNHEALTHY, detail=problem))

    def _update(self, **changes: Any) -> None:
        """Change the state of all components."""
        self.states = [replace(state, **changes) for state in self.states]
        self._changed()

    def _set(self, index: int, state: ProcessState) -> None:
        if state != self.states[index]:
            self.states[index] = state
            self._changed()


def _environment() -> dict[str, str]:
    """Return the variables of services: routers would refuse a client's key."""
    return {name: value for name, value in os.environ.items() if name != API_KEY_VARIABLE}


def stop_orphans(state: RunState | None) -> int:
    """Kill processes left behind by a supervisor that was killed, and return their number."""
    left = orphans(state)
    for process in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    return len(left)
