"""The systems, each as local processes that can be killed, stopped, terminated and restarted."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.kills.service import KilledService
from midstream.cli.run_dir import RunDir

START_TIMEOUT_S = 900.0
STALL_S = 10.0
_VLLM = {
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
Fault = Callable[[], None]
Guide = Callable[[str], dict[str, object]]


def vllm_guide(regex: str) -> dict[str, object]:
    """Return the fields of vLLM's API for a regular expression."""
    return {"structured_outputs": {"regex": regex}}


def dynamo_guide(regex: str) -> dict[str, object]:
    """Return the fields of Dynamo's API for a regular expression."""
    return {"guided_regex": regex}


@dataclass
class Server:
    """A server that is one process tree and has a /health endpoint."""

    name: str
    command: list[str]
    port: int
    log: Path
    variables: dict[str, str] = field(default_factory=dict)
    process: psutil.Popen | None = None

    @property
    def url(self) -> str:
        """Return the URL of the server's OpenAI API, without /v1."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the server if it is not running."""
        if self.process is None or self.process.poll() is not None:
            self.end()
            with self.log.open("ab") as log:
                self.process = psutil.Popen(
                    self.command, stdout=log, stderr=log, env=os.environ | self.variables, start_new_session=True
                )

    def wait_until_healthy(self) -> None:
        """Return once the server is healthy; raise RuntimeError if this takes too long."""
        give_up_at = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < give_up_at:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except OSError:
                time.sleep(0.5)
        raise RuntimeError(f"{self.name} is not healthy; see {self.log}")

    def tree(self) -> list[psutil.Process]:
        """Return the server's process and all descendants."""
        assert self.process is not None
        return [self.process, *self.process.children(recursive=True)]

    def core(self) -> psutil.Process:
        """Return the process that computes: the child that uses the most memory, or the only process."""
        return max(self.tree(), key=lambda process: process.memory_info().rss)

    def kill_front(self) -> None:
        """Kill the process that serves clients."""
        self.tree()[0].kill()

    def kill_all(self) -> None:
        """Kill all processes of the server."""
        for process in self.tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.tree()[0].terminate()

    def end(self) -> None:
        """Kill all processes of the server, including children whose parent is gone."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class Peer:
    """Servers behind one address.

    Attributes:
        servers: The servers, in the order in which they start.
        faults: The faults, by name of the row.
        door: The server that clients call.
        guide: The fields of a request that constrain its output to a regular expression.
    """

    def __init__(
        self,
        name: str,
        servers: list[Server],
        faults: dict[str, Fault],
        door: Server,
        guide: Guide = vllm_guide,
    ) -> None:
        self.name, self.servers, self.faults, self.door, self.guide = name, servers, faults, door, guide
        words = [[Path(word).name if word.startswith("/") else word for word in server.command] for server in servers]
        self.configuration = [" ".join(command) for command in words]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run all servers, and restart each one that ends, as a supervisor would; kill them all on exit."""
        stopped = threading.Event()

        def supervise() -> None:
            while not stopped.wait(0.2):
                for server in self.servers:
                    server.start()

        for server in self.servers:
            server.start()
        supervisor = threading.Thread(target=supervise, daemon=True)
        supervisor.start()
        try:
            yield
        finally:
            stopped.set()
            supervisor.join()
            for server in self.servers:
                server.end()

    def restore(self) -> None:
        """Wait until all servers are healthy."""
        for server in self.servers:
            server.wait_until_healthy()


def vllm_server(python: Path, model: Path, port: int, cores: str, logs: Path) -> Server:
    """Return a server that runs vLLM's CPU build with its OpenAI API."""
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--model", str(model), "--served-model-name", "model", "--dtype", "bfloat16"]
    # Without compilation a server restarts sooner.
    command += ["--max-model-len", "2048", "--max-num-seqs", "64", "--enforce-eager"]
    variables = {**_VLLM, "VLLM_CPU_OMP_THREADS_BIND": cores}
    return Server(f"vllm-{port}", command, port, logs / f"vllm-{port}.log", variables)


def vllm(python: Path, model: Path, port: int, logs: Path) -> Peer:
    """Return one vLLM server: an API process and the engine core, which is both scheduler and worker."""
    server = vllm_server(python, model, port, "0-1", logs)
    faults = {
        "worker stands still": lambda: stand_still(server.core()),
        "frontend killed": server.kill_front,
        "scheduler killed": lambda: server.core().kill(),
        "worker killed": lambda: server.core().kill(),
    }
    return Peer("vLLM", [server], faults, server)


def gateway(python: Path, launcher: Path, model: Path, port: int, logs: Path) -> Peer:
    """Return SGLang's model gateway in front of two vLLM servers, with its retries and health checks."""
    workers = [vllm_server(python, model, port + 1 + number, str(number), logs) for number in range(2)]
    command = [str(launcher), "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--policy", "round_robin", "--health-check-interval-secs", "2", "--worker-startup-timeout-secs", "900"]
    command += ["--worker-urls", *(worker.url for worker in workers)]
    front = Server("sglang-gateway", command, port, logs / "sglang-gateway.log")
    faults = {
        "worker stands still": lambda: stand_still(workers[0].core()),
        "frontend killed": front.kill_front,
        "worker killed": lambda: workers[0].core().kill(),
        "scale-down": workers[1].terminate,
    }
    return Peer("SGLang's gateway, two vLLM servers", [*workers, front], faults, front)


def dynamo(python: Path, model: Path, port: int, logs: Path) -> Peer:
    """Return Dynamo's frontend, with migration enabled, in front of two workers that run vLLM (dynamo_worker.py)."""
    # The components find each other through files instead of etcd.
    variables = {"DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": str(logs / "dynamo"), "DYN_REQUEST_PLANE": "tcp"}
    variables |= dict.fromkeys(
        ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST", "DYN_SYSTEM_HOST"), "127.0.0.1"
    )
    workers = []
    for number in range(2):
        status = port + 1 + number
        command = [str(python), str(Path(__file__).with_name("dynamo_worker.py")), str(model), "model"]
        own = {**_VLLM, **variables, "VLLM_CPU_OMP_THREADS_BIND": str(number), "DYN_SYSTEM_PORT": str(status)}
        workers.append(Server(f"dynamo-worker-{number}", command, status, logs / f"dynamo-{number}.log", own))
    command = [
        str(python),
        "-m",
        "dynamo.frontend",
        "--http-host",
        "127.0.0.1",
        "--http-port",
        str(port),
        "--migration-limit",
        "3",
    ]
    front = Server("dynamo-frontend", command, port, logs / "dynamo-frontend.log", variables)
    faults = {
        "worker stands still": lambda: stand_still(workers[0].core()),
        "frontend killed": front.kill_front,
        "worker killed": workers[0].kill_all,
        "scale-down": workers[1].terminate,
    }
    return Peer("Dynamo, two vLLM workers", [*workers, front], faults, front, dynamo_guide)


def own_faults(service: KilledService, run_dir: RunDir) -> dict[str, Fault]:
    """Return the faults of `midstream serve` with one scheduler and two processes of every other component."""

    def upgrade() -> None:
        for kind in ("gpu_worker", "scheduler", "detokenizer", "router"):
            for process in service.state().of_kind(kind):
                psutil.Process(process.pid).terminate()
                _wait_for_successor(service, process.name, process.pid)

    def scale_down() -> None:
        psutil.Process(run_dir_part(run_dir, "worker-1")).terminate()

    return {
        "worker stands still": lambda: stand_still(psutil.Process(run_dir_part(run_dir, "worker-0"))),
        "frontend killed": lambda: _kill(service, "router"),
        "scheduler killed": lambda: _kill(service, "scheduler"),
        "worker killed": lambda: _kill(service, "gpu_worker"),
        "detokenizer killed": lambda: _kill(service, "detokenizer"),
        "scale-down": scale_down,
        "rolling upgrade": upgrade,
    }


def stand_still(process: psutil.Process) -> None:
    """Send SIGSTOP, and ten seconds later SIGCONT."""
    process.send_signal(signal.SIGSTOP)
    time.sleep(STALL_S)
    process.send_signal(signal.SIGCONT)


def run_dir_part(run_dir: RunDir, name: str) -> int:
    """Return the process id of a component."""
    state = run_dir.read_state()
    assert state is not None
    return next(process.pid for process in state.processes if process.name == name)


def _kill(service: KilledService, kind: str) -> None:
    service.kill(kind)


def _wait_for_successor(service: KilledService, name: str, pid: int) -> None:
    give_up_at = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < give_up_at:
        (process,) = (process for process in service.state().processes if process.name == name)
        if process.pid not in (0, pid) and service.is_whole():
            return
        time.sleep(0.1)
    raise RuntimeError(f"{name} was not restarted")
