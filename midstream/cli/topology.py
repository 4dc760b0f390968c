"""Which processes make up a service on this machine, at which addresses, with which flags."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from midstream.config import DetokenizerConfig, RouterConfig, SchedulerConfig
from midstream.errors import ConfigError
from midstream.model.folder import EMBEDDED_MODEL
from midstream.processors import num_compute_threads
from midstream.python_process import python_command
from midstream.security.private_folder import is_private

HOST = "127.0.0.1"
# Below the range from which the kernel gives ports to outgoing connections: a restarted process finds its port free.
_SPARE_PORTS = range(20_000, 32_000)
# The smallest count of each part, and the largest that one machine can reasonably carry.
_MAX_REPLICAS = 64


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """How to start one process: `python -m KIND FLAGS`, with some variables beside those of this process."""

    name: str
    kind: str
    flags: tuple[str, ...]
    addresses: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def command(self) -> list[str]:
        """The command line."""
        return python_command(self.kind, "--name", self.name, *self.flags)


@dataclass(frozen=True, slots=True)
class Topology:
    """How many of each part run, for which model; each worker has tensor_parallel * pipeline_parallel processes."""

    model: str = EMBEDDED_MODEL
    num_routers: int = 1
    num_detokenizers: int = 1
    num_workers: int = 1
    tensor_parallel: int = 1
    pipeline_parallel: int = 1

    def __post_init__(self) -> None:
        for flag, count in (
            ("--routers", self.num_routers),
            ("--detokenizers", self.num_detokenizers),
            ("--workers", self.num_workers),
            ("--tensor-parallel", self.tensor_parallel),
            ("--pipeline-parallel", self.pipeline_parallel),
        ):
            if not 1 <= count <= _MAX_REPLICAS:
                raise ConfigError(f"{count} is not in 1..{_MAX_REPLICAS}", field=flag)


def plan_processes(
    topology: Topology,
    num_cores: int | None = None,
    is_free: Callable[[int], bool] | None = None,
    journal_path: str = "",
) -> list[ProcessSpec]:
    """The processes of `topology`: default ports where they are free, spare ones for replicas and where they are not.

    Args:
        topology: What to run.
        num_cores: Cores to share among workers; default: those that affinity and quota leave to this process.
        is_free: Whether a port can be listened on; default: `reserve_port`.
        journal_path: Where a journal in SQLite goes; empty: as the environment says.
    """
    ports = _Ports(is_free or reserve_port)
    model = ("--model", topology.model)
    journal = ("--journal-path", journal_path) if journal_path else ()
    scheduler = _Addresses(ports)
    grpc = scheduler.add("grpc", SchedulerConfig.port)
    zmq = scheduler.add("zmq", SchedulerConfig.worker_port)
    specs = [
        ProcessSpec(
            "scheduler-0",
            "scheduler",
            (*model, "--port", str(grpc), "--worker-port", str(zmq), *scheduler.http_flags(), *journal),
            scheduler.taken,
        )
    ]
    cores = num_cores or num_compute_threads()
    for index in range(topology.num_workers):
        specs += _plan_worker(topology, f"worker-{index}", f"tcp://{HOST}:{zmq}", cores, ports)
    for index in range(topology.num_detokenizers):
        detokenizer = _Addresses(ports)
        port = detokenizer.add("grpc", DetokenizerConfig.port)
        flags = (*model, "--port", str(port), "--schedulers", f"{HOST}:{grpc}", *detokenizer.http_flags())
        specs.append(ProcessSpec(f"detokenizer-{index}", "detokenizer", flags, detokenizer.taken))
    targets = ",".join(spec.addresses["grpc"] for spec in specs if spec.kind == "detokenizer")
    for index in range(topology.num_routers):
        router = _Addresses(ports)
        port = router.add("grpc", RouterConfig.port)
        links = ("--schedulers", f"{HOST}:{grpc}", "--detokenizers", targets)
        http = router.http_flags(RouterConfig.http_port)
        specs.append(
            ProcessSpec(f"router-{index}", "router", (*model, "--port", str(port), *links, *http), router.taken)
        )
    return specs


def _plan_worker(topology: Topology, name: str, scheduler: str, cores: int, ports: _Ports) -> list[ProcessSpec]:
    """The processes of one worker: rank 0 has the worker's name."""
    stages = topology.pipeline_parallel
    world_size = topology.tensor_parallel * stages
    threads = max(1, cores // (topology.num_workers * world_size))
    flags: tuple[str, ...] = (
        "--model",
        topology.model,
        "--scheduler",
        scheduler,
        "--group-id",
        name,
        "--num-threads",
        str(threads),
    )
    if folder := _shared_memory():
        flags += ("--shared-kv-folder", folder)
    variables = {"WORLD_SIZE": str(world_size)}
    if world_size > 1:
        flags += ("--tensor-parallel", str(topology.tensor_parallel), "--pipeline-parallel", str(stages))
        variables |= {"MASTER_ADDR": HOST, "MASTER_PORT": str(ports.take(None))}
    specs = []
    for rank in range(world_size):
        http = _Addresses(ports)
        own = {**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = f"{name}-rank-{rank}" if rank else name
        specs.append(ProcessSpec(process, "gpu_worker", (*flags, *http.http_flags()), http.taken, own))
    return specs


def _shared_memory() -> str:
    """Where workers on this machine leave KV blocks to each other; empty: nowhere, or as the environment says."""
    if "MIDSTREAM_SHARED_KV_FOLDER" in os.environ:
        return ""
    folder = Path(f"/dev/shm/midstream-{os.geteuid()}")  # noqa: S108 (others' folders are not taken)
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        if is_private(folder):
            return str(folder)
    return ""


class _Ports:
    """Hands out ports that nobody listens on, each once."""

    def __init__(self, is_free: Callable[[int], bool]) -> None:
        self._is_free = is_free
        self._taken: set[int] = set()

    def take(self, preferred: int | None) -> int:
        spare = random.sample(_SPARE_PORTS, 200)
        for port in [preferred, *spare] if preferred else spare:
            if port not in self._taken and self._is_free(port):
                self._taken.add(port)
                return port
        raise ConfigError("no free port was found")


class _Addresses:
    """The addresses of one process."""

    def __init__(self, ports: _Ports) -> None:
        self._ports = ports
        self.taken: dict[str, str] = {}

    def add(self, protocol: str, preferred: int | None = None) -> int:
        port = self._ports.take(preferred)
        self.taken[protocol] = f"{HOST}:{port}"
        return port

    def http_flags(self, preferred: int | None = None) -> tuple[str, str]:
        return "--http-port", str(self.add("http", preferred))


# Ports of this process's plans; for each a socket is open whose name tells other supervisors of it.
_reserved: set[int] = set()


def reserve_port(port: int) -> bool:
    """Takes a port for as long as this process lives; False where somebody listens, or another supervisor has taken it.

    From a plan until its parts listen is seconds, and a killed part listens no more: another supervisor that starts in
    between takes other ports.
    """
    if not is_free_port(port):
        return False
    if port in _reserved:
        return True
    name = socket.socket(socket.AF_UNIX)
    try:
        name.bind(f"\0midstream-port-{port}")
    except OSError:
        name.close()
        return False
    name.detach()  # open until the process ends
    _reserved.add(port)
    return True


def is_free_port(port: int) -> bool:
    """Whether nobody listens on `port` of the loopback address."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True
