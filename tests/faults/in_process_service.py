"""All components of the service in this process, with real sockets and a small real model; each can be killed.

There are two workers, two detokenizers, two routers, and a scheduler with its journal. A gate stops the workers at a
token, so that a component dies at exactly that token. Workers may have roles and KV tiers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from detokenizer.servicer import DetokenizerServicer
from gpu_worker import worker as worker_module
from gpu_worker.batch.step import Step
from gpu_worker.model_runner import Launched, ModelRunner
from gpu_worker.scheduler_link.link import SchedulerLink, Stopped
from midstream.client.result import Result
from midstream.client.stream import AsyncStream
from midstream.config import SchedulerConfig, WorkerConfig
from midstream.model.folder import ModelFolder
from midstream.model.tokenizer import Tokenizer
from midstream.rpc.channel import open_channel
from midstream.text.incremental import decoder_factory
from protos import generation_pb2 as pb
from protos import service_pb2_grpc
from scheduler.core.effects import StepPlan
from scheduler.service import SchedulerService
from tests.gpu_worker.tiny_models import make_runner
from tests.ports import free_ports
from tests.router.conftest import Cluster, Part

WAIT_S = 240.0
KINDS = ("worker", "scheduler", "detokenizer", "router")
# Settings of each worker, by worker name.
WorkerSettings = Mapping[str, Mapping[str, Any]]


class Gate:
    """Limits the number of tokens that workers sample for the only request.

    Attributes:
        serving: Name of the worker that ran last.
        num_adopted: Number of blocks that workers have adopted.
    """

    def __init__(self) -> None:
        self.serving = ""
        self.num_adopted = 0
        self._limit = 0
        self._num_tokens = 0
        self._changed = threading.Condition()

    def reset(self) -> None:
        """Reset the gate before a request, so that no token may be sampled."""
        self._limit = self._num_tokens = 0
        self.serving = ""

    def open_to(self, num_tokens: int) -> None:
        """Allow this many tokens in total to be sampled."""
        with self._changed:
            self._limit = num_tokens
            self._changed.notify_all()

    def wait_until(self, num_tokens: int, is_over: Callable[[], bool]) -> None:
        """Wait until this many tokens are sampled and a worker has received the next step, or until the request has
        ended.
        """
        with self._changed:
            while (self._num_tokens < num_tokens or not self.serving) and not is_over():
                self._changed.wait(0.05)

    def launch(
        self, name: str, step: Step, is_dead: Callable[[], bool], launch: Callable[[Step], Launched]
    ) -> Launched:
        """Launch a step of a worker once the gate allows it."""
        known = [len(new.token_ids) - new.num_prompt_tokens for new in step.new_sequences]
        with self._changed:
            self.serving = name
            if known:
                self._num_tokens = min(known)
            while self._num_tokens >= self._limit and not is_dead():
                self._changed.wait(0.02)
        if is_dead():
            raise Killed
        launched = launch(step)
        assert launched.output is not None, "on a CPU, launching a step must complete it"
        with self._changed:
            self.num_adopted += len(step.adopted_blocks) - len(launched.missing_blocks)
            if len(launched.output.token_ids):
                self._num_tokens += 1
                self._changed.notify_all()
        return launched


class Killed(BaseException):
    """Raised to end the thread of a killed worker before its next step."""


class MortalLink(SchedulerLink):
    """A connection that can be closed without a Leave message."""

    is_dead = False

    def kill(self) -> None:
        """Close the connection as SIGKILL would."""
        self.is_dead = True
        self._wake()

    def _turn(self, *sockets: Any) -> bool:
        if self.is_dead:
            self.inbox.put(Stopped(0, "killed"))
            return False
        return super()._turn(*sockets)


class WorkerThread:
    """A worker in a thread. Restarts reuse the loaded model, but create a new KV pool."""

    def __init__(
        self, name: str, folder: ModelFolder, address: str, gate: Gate, settings: Mapping[str, Any] | None = None
    ) -> None:
        given = settings or {}
        self._config = WorkerConfig(scheduler=address, group_id=name, device="cpu", **given)
        self._folder = folder
        self.runner = make_runner(folder.path, **given)
        self._gate = gate
        self._start()

    def start(self) -> None:
        """Restart the worker."""
        guides = self.runner._guides
        self.runner = ModelRunner(self.runner._config, self._folder, self.runner.model)
        # The grammar process is kept, since starting it takes longer than everything else.
        self.runner._guides._process, self.runner._guides._life = guides._process, guides._life
        self._start()

    def _start(self) -> None:
        launch = self.runner.launch
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(worker_module, "ModelRunner", lambda *_, **__: self.runner)
            patch.setattr(worker_module, "SchedulerLink", MortalLink)
            worker = worker_module.Worker(self._config, self._folder)
        link = cast("MortalLink", worker._link)
        name = self._config.group_id
        self.runner.launch = lambda step: self._gate.launch(  # type: ignore[method-assign]
            name, step, lambda: link.is_dead, launch
        )
        self._link, self._http = link, worker._http
        self._http.start()

        def serve() -> None:
            with contextlib.suppress(Killed):
                worker._serve()

        self._thread = threading.Thread(target=serve, name=name, daemon=True)
        link.start()
        self._thread.start()

    def kill(self) -> None:
        """Kill the worker; its data in shared memory and on disk remains."""
        self._link.kill()
        self._thread.join(WAIT_S)
        self._link.join()
        self._http.stop()
        _end_like_a_process(self.runner)


def _end_like_a_process(runner: ModelRunner) -> None:
    """Stop the threads of a runner and release its locks, but keep everything that outlives a process."""
    kv = runner.kv
    for part in (kv.fetcher, kv.server, kv.tiers):
        if part is not None:
            part.close()
    if kv.store is not None:
        kv.store._stopped.set()
        os.close(kv.store._file_number)


class InProcessService:
    """All components.

    Attributes:
        gate: The gate that limits the workers.
        num_kills: Number of components killed so far, by kind.
        num_handovers: How often previous schedulers moved a request between workers.
        num_streamed: Number of tokens that clients received before the end of their sequence.
    """

    def __init__(
        self,
        folder: ModelFolder,
        journal: Path,
        workers: WorkerSettings = {"one": {}, "two": {}},  # noqa: B006 (it is only read)
    ) -> None:
        self.gate = Gate()
        self.num_kills = dict.fromkeys(KINDS, 0)
        self.num_handovers = self.num_streamed = 0
        scheduler, worker, *self._ports = free_ports(6)
        self._config = SchedulerConfig(port=scheduler, worker_port=worker, journal_path=str(journal))
        self._folder, self._settings = folder, workers
        self._cluster = Cluster(folder, decoder_factory(Tokenizer(folder.path)))
        self._cluster.scheduler_address = f"127.0.0.1:{scheduler}"
        self._channels = [open_channel(f"127.0.0.1:{port}") for port in self._ports[2:]]
        self._current = 0

    @property
    def worker_address(self) -> str:
        """Return the address to which workers connect."""
        return f"tcp://127.0.0.1:{self._config.worker_port}"

    def after_steps(self, call: Callable[[int, int], None]) -> None:
        """Call `call` after each step that the scheduler sends, with the number of tokens that the only request has
        by then, and the number of steps in flight.
        """
        engine = self._service.engine
        core = engine.core
        send_step, requests = engine.carry_out[StepPlan], core.lifecycle.requests

        def send(plan: StepPlan) -> None:
            send_step(plan)
            num_tokens = sum(requests[request_id].num_output_tokens for request_id in requests)
            call(num_tokens, sum(len(group.in_flight) for group in core.groups))

        engine.carry_out[StepPlan] = send

    async def start(self) -> None:
        """Start all components."""
        await self._start_scheduler()
        self._workers = {
            name: WorkerThread(name, self._folder, self.worker_address, self.gate, settings)
            for name, settings in self._settings.items()
        }
        self._detokenizers = [await self._start_detokenizer(number) for number in range(2)]
        self._routers = [await self._start_router(number) for number in range(2)]

    async def close(self) -> None:
        """Stop all components."""
        for channel in self._channels:
            await channel.close()
        for part in (*self._routers, *self._detokenizers):
            await part.kill()
        for worker in self._workers.values():
            await asyncio.to_thread(worker.kill)
            worker.runner._guides.close()
        for runner in self._cluster.runners:
            runner.close()
        await self._stop_scheduler()

    async def _start_scheduler(self) -> None:
        self._service = SchedulerService(self._config, self._folder)
        await self._service.start()

    async def _stop_scheduler(self) -> None:
        self.num_handovers += self._service.engine.core.totals.num_handovers
        await self._service.stop()

    async def _start_detokenizer(self, number: int) -> Part:
        return await self._cluster.add_detokenizer(f"d{number}", port=self._ports[number])

    async def _start_router(self, number: int) -> Part:
        return await self._cluster.add_router(
            *self._detokenizers, unavailable_timeout_s=WAIT_S, port=self._ports[2 + number]
        )

    async def kill(self, kind: str) -> None:
        """Kill and restart the component that serves the request."""
        self.num_kills[kind] += 1
        if kind == "worker":
            worker = self._workers[self.gate.serving]
            await asyncio.to_thread(worker.kill)
            worker.start()
        elif kind == "scheduler":
            await self._stop_scheduler()
            await self._start_scheduler()
        elif kind == "detokenizer":
            servicers = [cast("DetokenizerServicer", part.servicer) for part in self._detokenizers]
            number = max(range(2), key=lambda index: servicers[index].num_attached)
            await self._detokenizers[number].kill()
            self._detokenizers[number] = await self._start_detokenizer(number)
        else:
            number = self._current
            await self._routers[number].kill()
            self._routers[number] = await self._start_router(number)

    async def run(self, request: pb.GenerateRequest, kills: dict[int, str], limit_s: float = WAIT_S) -> Result:
        """Run a request. Each component in `kills` is killed when that many tokens are sampled and the client has
        received them.
        """
        stream = AsyncStream(request.request_id, request, self._next_stub, timeout_s=None, unavailable_timeout_s=WAIT_S)
        result = Result(request.request_id)
        await self.disturb(self._read(stream, result), kills, limit_s)
        return result

    async def disturb(self, work: Coroutine[Any, Any, None], kills: dict[int, str], limit_s: float = WAIT_S) -> None:
        """Run `work`, which sends one request; `kills` is used as in `run`."""
        self.gate.reset()
        reading = asyncio.create_task(work)
        for num_tokens, kind in sorted(kills.items()):
            self.gate.open_to(num_tokens)
            await asyncio.to_thread(self.gate.wait_until, num_tokens, reading.done)
            if reading.done():
                break
            async with asyncio.timeout(WAIT_S):
                await self.kill(kind)
        self.gate.open_to(1 << 30)
        async with asyncio.timeout(limit_s):
            await reading

    @property
    def addresses(self) -> list[str]:
        """Return the gRPC addresses of the routers; the first is that of the router to kill."""
        self._current = 0
        return [f"127.0.0.1:{port}" for port in self._ports[2:]]

    def next_url(self) -> str:
        """Return the HTTP address of the next router; from now on, that router is the one to kill."""
        self._current = 1 - self._current
        http = self._routers[self._current].http
        assert http is not None
        return f"http://127.0.0.1:{http.port}"

    async def _read(self, stream: AsyncStream, result: Result) -> None:
        async for chunk in stream:
            self.num_streamed += 0 if chunk.is_sequence_final else len(chunk.token_ids)
            result.add(chunk)

    def _next_stub(self) -> Any:
        self._current = 1 - self._current
        return service_pb2_grpc.MidstreamStub(self._channels[self._current])
