"""The processes of a service on this machine, with their addresses and flags."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from midstream.config import DetokenizerConfig, RouterConfig, SchedulerConfig, WorkerConfig
from midstream.config.models import write_models
from midstream.config.service import MAX_PORT
from midstream.errors import ConfigError
from midstream.model.folder import EMBEDDED_MODEL
from midstream.parts import SEPARATOR
from midstream.processors import num_compute_threads
from midstream.python_process import python_command
from midstream.security.private_folder import is_private

HOST = "127.0.0.1"
# These ports are below the kernel's ephemeral port range, so that a restarted process finds its port free.
_SPARE_PORTS = range(20_000, 32_000)
# Maximum number of processes of each kind that one machine can reasonably run.
_MAX_REPLICAS = 64
SHARED_PROCESS = ("auto", "on", "off")
MAX_SHARING_CORES = 4
_SHARING_KINDS = ("scheduler", "detokenizer", "router")
# Only routers have ports for clients, regardless of MIDSTREAM_HOST.
_INNER = ("--host", HOST)


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """How to start one component: `python -m KIND FLAGS`, with additional environment variables.

    Attributes:
        shared: Name of the process, if other components share it.
    """

    name: str
    kind: str
    flags: tuple[str, ...]
    addresses: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    shared: str = ""

    @property
    def process(self) -> str:
        """Name of the process."""
        return self.shared or self.name

    @property
    def words(self) -> tuple[str, ...]:
        """The component's kind, name and flags."""
        return (self.kind, "--name", self.name, *self.flags)

    @property
    def command(self) -> list[str]:
        """The command line of the component in a process of its own."""
        return python_command(*self.words)


def command_of(specs: Sequence[ProcessSpec]) -> list[str]:
    """Return the command line of the process that runs these components."""
    if len(specs) == 1:
        return specs[0].command
    words = [word for spec in specs for word in (SEPARATOR, *spec.words)]
    return python_command("midstream.parts", *words[1:])


@dataclass(frozen=True, slots=True)
class Topology:
    """The number of processes of each kind, and their model. A worker has tensor_parallel * pipeline_parallel
    processes.

    Attributes:
        host: Address on which routers listen. All other processes listen on the loopback address.
        port: gRPC port of the first router; 0: any free one; None: the default port, or any free one if that is in use.
        http_port: HTTP port of the first router, likewise.
        served_model_name: Name of the model in the API; empty means the model's own name.
        num_prefill_workers: Number of workers that prefill, while the others decode; 0 means that each does both.
        shares_ports: Whether all routers listen on `port` and `http_port`, in addition to their own ports.
        shared_process: Whether the scheduler, the first detokenizer and the first router share a process; `auto`: if
            there are no other routers and detokenizers, and at most MAX_SHARING_CORES cores, and one model.
        models: If there are several models: for each name, the model and its share of memory and cores. Each has
            schedulers, workers and detokenizers of its own; the routers serve all of them.
        memory_share: The share of the memory for KV blocks that workers use.
    """

    model: str = EMBEDDED_MODEL
    num_routers: int = 1
    num_detokenizers: int = 1
    num_workers: int = 1
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    host: str = HOST
    port: int | None = None
    http_port: int | None = None
    served_model_name: str = ""
    num_prefill_workers: int = 0
    shares_ports: bool = False
    shared_process: str = "off"
    models: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    memory_share: float = 1.0

    def __post_init__(self) -> None:
        if self.shared_process not in SHARED_PROCESS:
            raise ConfigError(
                f"{self.shared_process!r} is not one of {', '.join(SHARED_PROCESS)}", field="--shared-process"
            )
        for flag, port in (("--port", self.port), ("--http-port", self.http_port)):
            if port is not None and not 0 <= port <= MAX_PORT:
                raise ConfigError(f"{port} is not in 0..{MAX_PORT}", field=flag)
        if self.port and self.port == self.http_port:
            raise ConfigError(
                f"{self.port} is the HTTP port as well; --port is for gRPC, --http-port for HTTP", field="--port"
            )
        for flag, count in (
            ("--routers", self.num_routers),
            ("--detokenizers", self.num_detokenizers),
            ("--workers", self.num_workers),
            ("--tensor-parallel", self.tensor_parallel),
            ("--pipeline-parallel", self.pipeline_parallel),
        ):
            if not 1 <= count <= _MAX_REPLICAS:
                raise ConfigError(f"{count} is not in 1..{_MAX_REPLICAS}", field=flag)
        if not 0 <= self.num_prefill_workers < self.num_workers:
            raise ConfigError(
                f"{self.num_prefill_workers} of {self.num_workers} workers would prefill, which leaves none to "
                "decode; raise --workers",
                field="--prefill-workers",
            )

    def shares_process(self, num_cores: int) -> bool:
        """Return whether components share a process on a machine with this number of cores."""
        if self.models:  # a process that ends would end the streams of all models
            return False
        if self.shared_process != "auto":
            return self.shared_process == "on"
        return self.num_routers == self.num_detokenizers == 1 and num_cores <= MAX_SHARING_CORES

    def role(self, worker: int) -> str:
        """Return the role of a worker; empty means the role set in the environment."""
        if not self.num_prefill_workers:
            return ""
        return "prefill" if worker < self.num_prefill_workers else "decode"


def plan_processes(
    topology: Topology,
    num_cores: int | None = None,
    is_free: Callable[[int], bool] | None = None,
    journal_path: str = "",
    models_file: Path | None = None,
) -> list[ProcessSpec]:
    """Return the processes of `topology`. Unset ports are the defaults if these are free, otherwise any free ports.

    Args:
        num_cores: Number of cores to divide among workers; by default those that affinity and quota allow.
        is_free: Returns whether a port is free; by default `reserve_port`.
        journal_path: Path of the journal on this machine; empty means the one set in the environment. With several
            models, each has a journal of its own, whose path ends with its name.
        models_file: File to which the models are written for the routers, if there are several.

    Raises:
        ConfigError: A port set in the topology is in use.
    """
    ports, cores = _Ports(is_free or reserve_port), num_cores or num_compute_threads()
    if topology.models:
        specs, tables = list[ProcessSpec](), dict[str, dict[str, str]]()
        for name, (model, share) in topology.models.items():
            one = replace(topology, model=model, served_model_name=name, models={}, memory_share=share)
            journal = f"{journal_path}-{file_name(name)}" if journal_path else ""
            cell = _plan_cell(one, ports, max(1, int(cores * share)), journal, f".{file_name(name)}")
            specs += cell
            tables[name] = {"model": model, **_targets(cell)}
        assert models_file is not None
        write_models(models_file, tables)
        links: tuple[str, ...] = ("--models", str(models_file))
    else:
        specs = _plan_cell(topology, ports, cores, journal_path, "")
        targets = [word for key, value in _targets(specs).items() for word in (f"--{key}", value)]
        links = (*_served(topology), *targets)
    links += ("--host", topology.host)
    if topology.shares_ports:
        shared = _Addresses(ports, topology.host)
        port, http_port = (
            shared.add_public(flag, asked)
            for flag, asked in (("--port", topology.port), ("--http-port", topology.http_port))
        )
        links += ("--shared-port", str(port), "--shared-http-port", str(http_port))
    for index in range(topology.num_routers):
        router = _Addresses(ports, topology.host)
        is_first = index == 0 and not topology.shares_ports
        port = router.add_public("--port", topology.port if is_first else 0)
        http_port = router.add_public("--http-port", topology.http_port if is_first else 0)
        own = ("--port", str(port), "--http-port", str(http_port))
        if topology.shares_ports:
            router.taken |= {f"shared {name}": address for name, address in shared.taken.items()}
        specs.append(ProcessSpec(f"router-{index}", "router", (*links, *own), router.taken))
    if topology.shares_process(cores):
        sharing = {f"{kind}-0" for kind in _SHARING_KINDS}
        specs = [replace(spec, shared="services-0") if spec.name in sharing else spec for spec in specs]
    return specs


def file_name(model: str) -> str:
    """Return the name of a model, changed to one for processes and files."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", model)


def _served(topology: Topology) -> tuple[str, ...]:
    model = ("--model", topology.model)
    return (*model, "--served-model-name", topology.served_model_name) if topology.served_model_name else model


def _plan_cell(topology: Topology, ports: _Ports, cores: int, journal_path: str, suffix: str) -> list[ProcessSpec]:
    """Return the processes of a model except for routers; `suffix` ends their names."""
    journal = ("--journal-path", journal_path) if journal_path else ()
    scheduler = _Addresses(ports)
    grpc = scheduler.add("grpc", SchedulerConfig.port)
    zmq = scheduler.add("zmq", SchedulerConfig.worker_port)
    flags = ("--port", str(grpc), "--worker-port", str(zmq), *scheduler.http_flags(), *journal)
    specs = [ProcessSpec(f"scheduler-0{suffix}", "scheduler", (*_served(topology), *_INNER, *flags), scheduler.taken)]
    for index in range(topology.num_workers):
        specs += _plan_worker(topology, f"worker-{index}{suffix}", index, f"tcp://{HOST}:{zmq}", cores, ports)
    for index in range(topology.num_detokenizers):
        detokenizer = _Addresses(ports)
        port = detokenizer.add("grpc", DetokenizerConfig.port)
        own = ("--port", str(port), "--schedulers", f"{HOST}:{grpc}", *detokenizer.http_flags())
        flags = ("--model", topology.model, *_INNER, *own)
        specs.append(ProcessSpec(f"detokenizer-{index}{suffix}", "detokenizer", flags, detokenizer.taken))
    return specs


def _targets(specs: Sequence[ProcessSpec]) -> dict[str, str]:
    """Return the settings with which routers find the processes of a model."""
    return {
        f"{kind}s": ",".join(spec.addresses["grpc"] for spec in specs if spec.kind == kind)
        for kind in ("scheduler", "detokenizer")
    }


def check_ports(topology: Topology) -> None:
    """Raise ConfigError if a port given in the topology is in use, without reserving any port."""
    for flag, port in (("--port", topology.port), ("--http-port", topology.http_port)):
        if port and not is_free_port(port, topology.host):
            raise _port_in_use(flag, port, topology.host)


def reachable(host: str) -> str:
    """Return the address at which processes on this machine reach a port on `host`; an IPv6 address is in brackets."""
    host = {"0.0.0.0": HOST, "": HOST, "::": "::1"}.get(host, host)  # noqa: S104
    return f"[{host}]" if ":" in host else host


def _port_in_use(flag: str, port: int, host: str) -> ConfigError:
    return ConfigError(
        f"port {port} on {host} is in use; stop the process that uses it, or choose another port (0: any free one)",
        field=flag,
    )


def _plan_worker(
    topology: Topology, name: str, index: int, scheduler: str, cores: int, ports: _Ports
) -> list[ProcessSpec]:
    """Return the processes of one worker. The process of rank 0 has the worker's name."""
    stages = topology.pipeline_parallel
    world_size = topology.tensor_parallel * stages
    flags: tuple[str, ...] = ("--model", topology.model, *_INNER, "--scheduler", scheduler, "--group-id", name)
    if "MIDSTREAM_NUM_THREADS" not in os.environ:
        flags += ("--num-threads", str(max(1, cores // (topology.num_workers * world_size))))
    if topology.memory_share < 1:
        base = float(os.environ.get("MIDSTREAM_FREE_MEMORY_FRACTION", WorkerConfig.free_memory_fraction))
        flags += ("--free-memory-fraction", f"{base * topology.memory_share:.4f}")
    if role := topology.role(index):
        flags += ("--role", role)
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
    """Return the shared KV folder for workers on this machine; empty if there is none or the environment sets it."""
    if "MIDSTREAM_SHARED_KV_FOLDER" in os.environ:
        return ""
    folder = Path(f"/dev/shm/midstream-{os.geteuid()}")  # noqa: S108 (others' folders are not taken)
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        if is_private(folder):
            return str(folder)
    return ""


class _Ports:
    """Allocates free ports, each only once."""

    def __init__(self, is_free: Callable[[int], bool]) -> None:
        self._is_free = is_free
        self._taken: set[int] = set()

    def take(self, preferred: int | None) -> int:
        spare = random.sample(_SPARE_PORTS, 200)
        for port in [preferred, *spare] if preferred else spare:
            if port not in self._taken and self._is_free(port):
                self._taken.add(port)
                return port
        raise ConfigError("no free port found")


class _Addresses:
    """The addresses of one process."""

    def __init__(self, ports: _Ports, host: str = HOST) -> None:
        self._ports = ports
        self._host = host
        self.taken: dict[str, str] = {}

    def add(self, protocol: str, preferred: int | None = None) -> int:
        port = self._ports.take(preferred)
        self.taken[protocol] = f"{reachable(self._host)}:{port}"
        return port

    def add_public(self, flag: str, port: int | None) -> int:
        """Return a port for clients: `port` itself if it is above 0."""
        protocol, default = {"--port": ("grpc", RouterConfig.port), "--http-port": ("http", RouterConfig.http_port)}[
            flag
        ]
        taken = self.add(protocol, default if port is None else port or None)
        if (port and taken != port) or not (self._host == HOST or is_free_port(taken, self._host)):
            raise _port_in_use(flag, port or taken, self._host)
        return taken

    def http_flags(self) -> tuple[str, str]:
        return "--http-port", str(self.add("http"))


# Ports reserved by this process. For each one, an open named socket shows other supervisors that it is reserved.
_reserved: set[int] = set()


def reserve_port(port: int) -> bool:
    """Reserve a port for the lifetime of this process; return False if it is in use or reserved by another supervisor.

    Processes start to listen seconds after they are planned, and a killed process does not listen. In the meantime, the
    reservation keeps another supervisor from choosing the port.
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
    name.detach()  # the socket stays open until the process ends
    _reserved.add(port)
    return True


def is_free_port(port: int, host: str = HOST) -> bool:
    """Return whether `port` on `host` is free. Raises ConfigError if `host` is not an address of this machine."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(f"{host!r}: {error.strerror}", field="--host") from None
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise ConfigError(f"{host!r} is not an address of this machine", field="--host") from None
            return False
    return True
