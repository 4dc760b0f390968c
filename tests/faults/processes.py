"""Run two processes of each component on this machine, with fake workers; each process can be killed, stopped and
started.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from midstream.client import AsyncClient, Result, SamplingParams
from midstream.client.stream import AsyncStream
from midstream.errors import MidstreamError
from midstream.model.folder import open_model_folder
from midstream.rpc.channel import open_channel
from protos import service_pb2_grpc, stats_pb2
from tests.integration.named_processes import NamedProcesses
from tests.integration.service import latest_stats
from tests.ports import free_ports

WAIT_S = 240.0
ALL = ("scheduler", "worker-0", "worker-1", "detokenizer-0", "detokenizer-1", "router-0", "router-1")


class Processes(NamedProcesses):
    """The running service.

    Attributes:
        worker_flags: Flags for workers that are started from now on.
        router_flags: Flags for routers that are started from now on.
        worker_port: Port to which workers connect; it may be that of a proxy.
        urls: HTTP URLs of the routers.
    """

    def __init__(self, folder: Path, *scheduler_flags: str, step_ms: float = 10) -> None:
        super().__init__(folder)
        self.worker_flags: tuple[str, ...] = ()
        self.router_flags: tuple[str, ...] = ()
        self.journal_path = folder / "journal"
        self._model = open_model_folder("smollm2")
        self._step_ms = step_ms
        self._scheduler_flags = scheduler_flags
        self.scheduler_port, self.worker_port, self._first_router, self._second_router, *others = free_ports(10)
        self._detokenizers, self._http_ports = others[:4], others[4:]
        self.urls = [f"http://127.0.0.1:{port}" for port in self._http_ports]
        self.routers = [f"127.0.0.1:{port}" for port in (self._first_router, self._second_router)]

    def _command(self, name: str) -> list[str]:
        kind, _, number = name.partition("-")
        links = ["--schedulers", f"127.0.0.1:{self.scheduler_port}"]
        if kind == "scheduler":
            ports = ["--port", str(self.scheduler_port), "--worker-port", str(self.worker_port)]
            return ["scheduler", *ports, "--journal-path", str(self.journal_path), *self._scheduler_flags]
        if kind == "detokenizer":
            return ["detokenizer", "--name", name, "--port", str(self._detokenizers[int(number)]), *links]
        if kind == "router":
            targets = ",".join(f"127.0.0.1:{port}" for port in self._detokenizers)
            ports = ["--port", str((self._first_router, self._second_router)[int(number)])]
            ports += ["--http-port", str(self._http_ports[int(number)])]
            return ["router", *ports, *links, "--detokenizers", targets, *self.router_flags]
        model = ["--model-fingerprint", self._model.fingerprint, "--vocab-size", str(self._model.vocab_size)]
        address = ["--scheduler", f"tcp://127.0.0.1:{self.worker_port}", "--group-id", name]
        return ["tests.fakes.worker", *address, *model, "--step-ms", str(self._step_ms), *self.worker_flags]

    def start(self, *names: str) -> None:
        """Start processes."""
        for name in names:
            self.launch(name, *self._command(name))

    async def kill(self, name: str) -> None:
        await asyncio.to_thread(self.end, name)

    async def wait(self, name: str) -> int:
        """Wait until a process exits; return its exit status."""
        return await asyncio.to_thread(self.processes[name].wait, WAIT_S)

    async def make_whole(self, client: AsyncClient) -> None:
        """Start missing processes; return once all processes are ready and idle."""
        self.start(*(name for name in ALL if not self.is_running(name)))
        await self.stand()  # the client may ask only one of the routers
        await until(lambda: self._is_complete(client))

    async def _is_complete(self, client: AsyncClient) -> bool:
        info = await client.server_info()
        groups = {group.group_id for group in info.worker_groups}
        names = {item.detokenizer_id for item in info.detokenizers}
        stats = await self.stats()
        is_idle = not (stats.num_active_requests or stats.num_queued_requests or stats.kv_cache_stats.used_num_blocks)
        return {"worker-0", "worker-1"} <= groups and {"detokenizer-0", "detokenizer-1"} <= names and is_idle

    async def stand(self) -> None:
        """Wait until each router sees all components."""
        for address in self.routers:
            await until(functools.partial(_has_all_parts, address))

    async def stats(self) -> stats_pb2.IterationStats:
        """Return the scheduler's statistics, queried through a router."""
        for address in self.routers:
            async with open_channel(address) as channel:
                with contextlib.suppress(Exception):
                    return await latest_stats(service_pb2_grpc.MidstreamStub(channel))  # type: ignore[arg-type]
        raise MidstreamError("no router answers")


async def _has_all_parts(address: str) -> bool:
    async with AsyncClient([address], unavailable_timeout_s=1.0) as client:
        info = await client.server_info()
    return len(info.worker_groups) == 2 and len(info.detokenizers) == 2


async def until(
    holds: Callable[[], object], limit_s: float = WAIT_S, state: Callable[[], object] = lambda: "no more is known"
) -> None:
    """Wait until `holds()` is true; an error of the service counts as false. A failure shows `state()`."""
    deadline = time.monotonic() + limit_s
    while True:
        with contextlib.suppress(MidstreamError):
            answer = holds()
            if await answer if asyncio.iscoroutine(answer) else answer:
                return
        assert time.monotonic() < deadline, f"the condition did not become true in time: {state()}"
        await asyncio.sleep(0.05)


@contextlib.contextmanager
def running_processes(
    folder: Path,
    *scheduler_flags: str,
    step_ms: float = 10,
    worker_flags: tuple[str, ...] = (),
    router_flags: tuple[str, ...] = (),
) -> Iterator[Processes]:
    """Start all components; kill the remaining ones on exit."""
    processes = Processes(folder, *scheduler_flags, step_ms=step_ms)
    processes.worker_flags, processes.router_flags = worker_flags, router_flags
    try:
        processes.start(*ALL)
        yield processes
    finally:
        processes.close()


class Streams:
    """Concurrent requests to a model whose output counts up from the last token of the prompt.

    The requests have a deadline: without one, they fail if a slow machine takes longer to start a worker than
    --no-worker-timeout-s.
    """

    def __init__(self, client: AsyncClient, firsts: list[int], num_tokens: int, timeout_s: float = 100) -> None:
        self.firsts, self.num_tokens = firsts, num_tokens
        sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.0)
        self._results = [Result("") for _ in firsts]
        self.streams: list[AsyncStream] = [
            client.generate(token_ids=[first], sampling=sampling, timeout_s=timeout_s) for first in firsts
        ]
        self._tasks = [asyncio.create_task(self._read(number)) for number in range(len(firsts))]

    async def _read(self, number: int) -> None:
        async for chunk in self.streams[number]:
            assert chunk.token_offset == len(self._results[number].token_ids)
            self._results[number].add(chunk)

    async def reach(self, num_tokens: int) -> None:
        """Wait until each stream has this many tokens or has ended."""
        await until(
            lambda: all(
                task.done() or len(result.token_ids) >= num_tokens
                for task, result in zip(self._tasks, self._results, strict=True)
            )
        )

    async def advance(self, num_tokens: int) -> None:
        """Wait until each stream has this many tokens more than now or has ended."""
        goals = [len(result.token_ids) + num_tokens for result in self._results]
        await until(
            lambda: all(
                task.done() or len(result.token_ids) >= goal
                for task, result, goal in zip(self._tasks, self._results, goals, strict=True)
            )
        )

    def have_ended(self) -> bool:
        """Return whether all streams have ended."""
        return all(task.done() for task in self._tasks)

    async def check(self) -> list[Result]:
        """Wait until all streams end; check that every token arrived once and in order."""
        async with asyncio.timeout(2 * WAIT_S):
            await asyncio.gather(*self._tasks)
        for first, result in zip(self.firsts, self._results, strict=True):
            assert result.token_ids == list(range(first + 1, first + 1 + self.num_tokens))
        return self._results
