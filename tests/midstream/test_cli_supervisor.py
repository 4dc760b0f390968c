from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from midstream.cli import health, main, supervisor, up
from midstream.cli.run_dir import ProcessPhase, ProcessState, RunDir, RunState, is_alive, started_ticks
from midstream.cli.supervisor import Supervisor, stop_orphans
from midstream.cli.topology import ProcessSpec
from midstream.cli.up import why_not_started
from midstream.errors import ConfigError, ExecutionError
from tests.integration.service import midstream
from tests.ports import free_port

FAKE = "tests.midstream.fake_service"


class Run:
    """A supervisor of fake services, and the events that its observer has received."""

    def __init__(self, path: Path, kinds: dict[str, str], mode: str = "healthy") -> None:
        self.trace = path / "trace"
        specs = []
        for name, kind in kinds.items():
            port = free_port()
            flags = ("--http-port", str(port), "--mode", mode, "--trace", str(self.trace))
            specs.append(FakeSpec(name, kind, flags, {"http": f"127.0.0.1:{port}"}))
        self.run_dir = RunDir(path / "run")
        self.changed = asyncio.Event()
        self.states: list[RunState] = []
        self.is_output_closed = False
        self.supervisor = Supervisor(self.run_dir, "a-model", specs, self.observe)
        self.stop, self.ready = asyncio.Event(), asyncio.Event()
        self.task = asyncio.create_task(self.supervisor.run(self.stop, self.ready))

    def observe(self, state: RunState) -> None:
        self.states.append(state)
        self.changed.set()
        if self.is_output_closed:
            raise BrokenPipeError

    async def until(self, holds: Callable[[RunState], bool]) -> RunState:
        async with asyncio.timeout(240):
            while not holds(self.supervisor.state):
                self.changed.clear()
                await self.changed.wait()
        return self.supervisor.state

    async def end(self) -> None:
        self.stop.set()
        async with asyncio.timeout(240):
            await self.task


class FakeSpec(ProcessSpec):
    @property
    def command(self) -> list[str]:
        command = super().command
        return [FAKE if word == self.kind else word for word in command]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give processes enough time to end before they are killed, even on a machine that stalls."""
    monkeypatch.setattr(supervisor, "_QUICK_STOP_S", 20.0)


KINDS = {"scheduler-0": "scheduler", "worker-0": "gpu_worker", "router-0": "router"}


async def test_all_become_ready_and_stop_routers_first_and_the_scheduler_last(tmp_path: Path) -> None:
    run = Run(tmp_path, KINDS)
    await run.until(lambda state: state.phase is ProcessPhase.READY)
    assert all(is_alive(process) for process in run.supervisor.state.processes)
    await run.end()
    assert run.trace.read_text().split() == ["router-0", "worker-0", "scheduler-0"]
    assert not any(is_alive(process) for state in run.states for process in state.processes)
    assert run.supervisor.state.phase is ProcessPhase.STOPPED
    assert not run.run_dir.is_supervised()


async def test_logs_of_processes_that_the_last_run_had_and_this_one_has_not_are_removed(tmp_path: Path) -> None:
    for kinds in (KINDS, {"scheduler-0": "scheduler"}):
        run = Run(tmp_path, kinds)
        (run.run_dir.logs / "supervisor.log").write_text("")
        await run.until(lambda state: state.phase is ProcessPhase.READY)
        await run.end()
    assert {path.name for path in run.run_dir.logs.iterdir()} == {"scheduler-0.log", "supervisor.log"}


async def test_a_service_that_is_not_ready_yet_stops_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_QUICK_STOP_S", 0.2)
    run = Run(tmp_path, KINDS, "stubborn")
    monkeypatch.setattr(run.supervisor, "_wait_until_ready", lambda stop: stop.wait())  # never finds the service ready
    await run.until(lambda state: len(state.processes) == 3 and all(is_alive(process) for process in state.processes))
    run.stop.set()
    async with asyncio.timeout(35):  # without the shorter limit, each of the three processes would take 40 s
        await run.task
    assert not any(is_alive(process) for process in run.supervisor.state.processes)


async def test_a_process_that_dies_is_started_again_and_nothing_else_is_touched(tmp_path: Path) -> None:
    run = Run(tmp_path, KINDS)
    before = {process.name: process.pid for process in (await run.until(_all_ready)).processes}
    await run.ready.wait()
    os.kill(before["worker-0"], signal.SIGKILL)
    await run.until(lambda state: _named(state, "worker-0") == (ProcessPhase.RESTARTING, 1))
    state = await run.until(lambda state: _named(state, "worker-0") == (ProcessPhase.READY, 1))
    after = {process.name: process.pid for process in state.processes}
    assert after["worker-0"] != before["worker-0"]
    assert {**after, "worker-0": 0} == {**before, "worker-0": 0}
    assert [process.detail for state in run.states for process in state.processes if process.detail.startswith("ended")]
    await run.end()


async def test_the_pause_before_a_restart_grows_until_the_process_has_served(tmp_path: Path) -> None:
    run = Run(tmp_path, {"worker-0": "gpu_worker"})
    await run.ready.wait()
    (process,) = run.supervisor._processes
    first = process._backoff_s
    for number in (1, 2):
        process.send(signal.SIGKILL)
        is_back = (ProcessPhase.READY, number)
        await run.until(lambda state: _named(state, "worker-0") == is_back)  # noqa: B023
        assert process._backoff_s == first * 2**number
    async with asyncio.timeout(240):
        while process._backoff_s != first:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    await run.end()


async def test_a_process_that_hangs_is_restarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_MAX_HANG_S", 0.5)
    monkeypatch.setattr(health, "_TIMEOUT_S", 0.5)
    run = Run(tmp_path, {"worker-0": "gpu_worker"})
    await run.ready.wait()
    (process,) = run.supervisor._processes
    process.send(signal.SIGSTOP)
    # The worker may be restarted earlier or more than once if the machine itself stalls for longer than the timeouts.
    await run.until(lambda state: _named(state, "worker-0")[1] >= 1 and _all_ready(state))
    await run.end()


@pytest.mark.parametrize("mode", ["waiting", "closing"])
async def test_a_process_that_only_waits_for_others_or_drains_is_not_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr(supervisor, "_MAX_HANG_S", 0.0)
    monkeypatch.setattr(health, "_TIMEOUT_S", 60.0)  # the process responds, but late if the machine stalls
    probe, num_probes = health.probe_health, 0

    async def counted(address: str) -> str | None:
        nonlocal num_probes
        num_probes += 1
        return await probe(address)

    monkeypatch.setattr(health, "probe_health", counted)
    run = Run(tmp_path, {"worker-0": "gpu_worker"}, mode=mode)
    await run.ready.wait()
    run.supervisor._processes[0].send(signal.SIGUSR1)
    await run.until(lambda state: _named(state, "worker-0")[0] is ProcessPhase.UNHEALTHY)
    before = num_probes
    async with asyncio.timeout(240):
        while num_probes < before + 5:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert _named(run.supervisor.state, "worker-0") == (ProcessPhase.UNHEALTHY, 0)
    await run.end()


async def test_a_process_that_cannot_start_ends_the_run_and_its_log_is_shown(tmp_path: Path) -> None:
    run = Run(tmp_path, {"scheduler-0": "scheduler"}, mode="crash")
    with pytest.raises(ExecutionError, match=r"scheduler-0 stopped while it was starting(.|\n)*model: no such folder"):
        await run.task
    state = run.run_dir.read_state()
    assert state is not None
    assert state.phase is ProcessPhase.FAILED


async def test_kill_ends_processes_that_do_not_stop(tmp_path: Path) -> None:
    run = Run(tmp_path, {"router-0": "router"}, mode="stubborn")
    await run.ready.wait()
    run.stop.set()
    await run.until(lambda state: _named(state, "router-0")[0] is ProcessPhase.STOPPING)
    run.supervisor.kill()
    await run.end()


async def test_a_fast_shutdown_ends_open_streams_and_kills_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "HURRIED_STOP_S", 0.2)
    run = Run(tmp_path, KINDS, mode="draining")
    sent, send = set[str](), supervisor._Process.send

    def send_one_at_a_time(process: supervisor._Process, number: signal.Signals) -> None:
        """Send a signal, but only once the process has handled its first one: a second pending signal of the same
        number would be lost.
        """
        deadline, name = time.monotonic() + 20, process.name
        while name in sent and not (tmp_path / f"{name}.drains").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        sent.add(name)
        send(process, number)

    monkeypatch.setattr(supervisor._Process, "send", send_one_at_a_time)
    await run.ready.wait()
    run.supervisor.hurry()
    await run.end()  # without this limit, two of the processes would take 40 s each
    assert run.trace.read_text().split() == ["router-0", "worker-0", "scheduler-0"]


async def test_a_run_continues_and_stops_in_order_after_its_output_was_closed(tmp_path: Path) -> None:
    run = Run(tmp_path, KINDS)
    await run.ready.wait()
    run.is_output_closed = True
    (pid,) = [process.pid for process in run.supervisor.state.processes if process.name == "worker-0"]
    os.kill(pid, signal.SIGKILL)
    await run.until(lambda state: _named(state, "worker-0") == (ProcessPhase.READY, 1))
    await run.end()
    assert run.trace.read_text().split() == ["router-0", "worker-0", "scheduler-0"]


@pytest.fixture
def in_terminal() -> Iterator[None]:
    """Restore the default action of SIGHUP, which nohup sets to be ignored; `up` would then ignore it too."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("in_terminal")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_the_service(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """SIGHUP means that the terminal was closed."""
    address, trace = f"127.0.0.1:{free_port()}", tmp_path / "trace"
    flags = ("--http-port", address.rpartition(":")[2], "--mode", "healthy", "--trace", str(trace))
    router = FakeSpec("router-0", "router", flags, {"http": address, "grpc": address})
    monkeypatch.setattr(up, "plan_processes", lambda *_, **__: [router])

    def how_to_talk(*_: object) -> str:  # called when the service is ready
        os.kill(os.getpid(), number)
        return "ready"

    monkeypatch.setattr(up, "how_to_talk", how_to_talk)
    assert main(["up", "--run-dir", str(tmp_path / "run"), "--port", str(free_port()), "--http-port", "0"]) == 0
    assert trace.read_text().split() == ["router-0"]
    assert "Stopped." in capfd.readouterr().out


async def test_one_supervisor_per_directory(tmp_path: Path) -> None:
    first = RunDir(tmp_path)
    first.acquire()
    with pytest.raises(ConfigError) as caught:
        RunDir(tmp_path).acquire()
    assert caught.value.field == "--run-dir"
    first.release()
    second = RunDir(tmp_path)
    second.acquire()
    second.release()


def test_a_run_directory_is_private_to_its_owner(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o755)
    run_dir = RunDir(tmp_path / "run")
    run_dir.acquire()
    assert {path.stat().st_mode & 0o777 for path in (run_dir.path, run_dir.logs)} == {0o700}
    run_dir.release()


async def test_the_state_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = Run(tmp_path, KINDS)
    await run.until(lambda state: state.phase is ProcessPhase.READY)
    assert RunDir(tmp_path / "run").read_state() == run.supervisor.state
    await run.end()


async def test_a_run_outlives_a_full_disk_and_writes_its_state_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_REWRITE_INTERVAL_S", 0.05)
    run = Run(tmp_path, KINDS)
    await run.ready.wait()
    (tmp_path / "run" / "state.new").symlink_to("/dev/full")
    os.kill(next(process.pid for process in run.states[-1].processes if process.name == "worker-0"), signal.SIGKILL)
    state = await run.until(lambda state: _named(state, "worker-0") == (ProcessPhase.READY, 1))
    stored = run.run_dir.read_state()
    assert stored is not None
    assert _named(stored, "worker-0") == (ProcessPhase.READY, 0)
    (tmp_path / "run" / "state.new").unlink()
    async with asyncio.timeout(240):
        while run.run_dir.read_state() != state:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await run.end()


async def test_orphans_of_a_killed_supervisor_are_found_and_ended(tmp_path: Path) -> None:
    run = Run(tmp_path, KINDS)
    state = await run.until(lambda state: state.phase is ProcessPhase.READY)
    assert stop_orphans(state) == 3
    await run.end()
    assert stop_orphans(run.run_dir.read_state()) == 0


@pytest.fixture
def orphan(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process that is listed in the run folder's state, but whose supervisor is gone."""
    with subprocess.Popen(["sleep", "600"]) as process:
        part = ProcessState("scheduler-0", "scheduler", {}, "", ProcessPhase.READY, process.pid)
        part = replace(part, started_ticks=started_ticks(process.pid))
        (tmp_path / "run").mkdir()
        RunDir(tmp_path / "run").write_state(RunState("model", ProcessPhase.READY, 1, 0.0, (part,)))
        yield process
        process.kill()


async def test_the_next_start_ends_orphans(tmp_path: Path, orphan: subprocess.Popen[bytes]) -> None:
    run = Run(tmp_path, KINDS)
    await run.until(lambda state: state.phase is ProcessPhase.READY)
    status = orphan.poll()
    await run.end()
    assert status == -signal.SIGKILL


def test_down_ends_orphans(tmp_path: Path, orphan: subprocess.Popen[bytes]) -> None:
    result = midstream("down", "--run-dir", str(tmp_path / "run"))
    assert (result.returncode, result.stdout) == (0, "Killed 1 processes without a supervisor.\n")
    assert orphan.wait(240) == -signal.SIGKILL


def test_another_process_with_the_pid_of_a_part_is_left_alone(tmp_path: Path, orphan: subprocess.Popen[bytes]) -> None:
    state = RunDir(tmp_path / "run").read_state()
    assert state is not None
    (part,) = state.processes
    reused = replace(state, processes=(replace(part, started_ticks=part.started_ticks - 1),))
    assert stop_orphans(reused) == 0
    assert orphan.poll() is None


def _all_ready(state: RunState) -> bool:
    return bool(state.processes) and all(process.phase is ProcessPhase.READY for process in state.processes)


def _named(state: RunState, name: str) -> tuple[ProcessPhase, int]:
    (process,) = (process for process in state.processes if process.name == name)
    return process.phase, process.num_restarts


def test_status_shows_parts_whose_supervisor_was_killed(tmp_path: Path) -> None:
    pid, addresses = os.getpid(), {"grpc": "127.0.0.1:1", "http": "127.0.0.1:1"}
    part = ProcessState("scheduler-0", "scheduler", addresses, "", ProcessPhase.READY, pid, started_ticks(pid))
    RunDir(tmp_path).write_state(RunState("model", ProcessPhase.READY, 1, 0.0, (part,)))
    result = midstream("status", "--json", "--run-dir", str(tmp_path))
    status = json.loads(result.stdout)
    assert (result.returncode, status["running"], status["supervised"]) == (0, True, False)
    assert [process["pid"] for process in status["processes"]] == [pid]
    assert "supervisor" in midstream("status", "--run-dir", str(tmp_path)).stdout


def test_a_run_folder_is_private_to_its_owner(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.acquire()
    folders = (run_dir.path, run_dir.logs)
    assert [folder.stat().st_mode & 0o777 for folder in folders] == [0o700, 0o700]
    run_dir.release()
    for folder in folders:  # the state that an earlier version wrote
        folder.chmod(0o755)
    run_dir.acquire()
    assert [folder.stat().st_mode & 0o777 for folder in folders] == [0o700, 0o700]
    run_dir.release()


@pytest.mark.parametrize("command", [("up",), ("up", "--detach"), ("generate", "hi"), ("status",)])
def test_a_home_that_cannot_be_written_is_named_without_a_traceback(command: tuple[str, ...]) -> None:
    result = midstream(*command, MIDSTREAM_HOME="/proc/no-home")
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert result.stdout + result.stderr


def test_a_supervisor_that_could_write_no_log_is_still_explained(tmp_path: Path) -> None:
    log = tmp_path / "supervisor.log"
    log.write_text("")
    assert "exit status 1" in why_not_started(log, 1)
    assert "MiB are free" in why_not_started(log, 1)
    log.write_text("a reason")
    assert why_not_started(log, 1).endswith("a reason")
