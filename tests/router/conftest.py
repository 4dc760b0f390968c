"""Routers and detokenizers on real sockets in this process, with a scripted scheduler."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from starlette.types import ASGIApp

from detokenizer.feed import FeedPool
from detokenizer.servicer import DetokenizerServicer
from midstream.client import AsyncClient
from midstream.config import RouterConfig
from midstream.model.folder import ModelFolder, open_model_folder
from midstream.model.tokenizer import Tokenizer
from midstream.rpc.frame_link import LinkSettings
from midstream.rpc.frames import FrameServer
from midstream.rpc.health import Progress
from midstream.rpc.serving import Server
from midstream.telemetry import Metrics
from midstream.text.incremental import DecoderFactory, decoder_factory
from protos import detokenizer_pb2_grpc, frames_pb2_grpc
from protos.status_pb2 import RouterStatus
from router.authentication import AuthenticatedApp, Authenticator
from router.dashboard import dashboard_routes
from router.pages import page_routes
from router.pipeline.cells import Cells
from router.pipeline.client_documents import ClientDocuments
from router.pipeline.detokenizer_pool import DetokenizerPool
from router.pipeline.embedder import Embedder
from router.pipeline.gen_ai_metrics import GenAiMetrics
from router.pipeline.generation import FrontDoor, Runner
from router.pipeline.keep_alives import KeepAlives
from router.pipeline.kept_requests import KeptRequests
from router.pipeline.message_slots import MessageSlots
from router.pipeline.metrics import RouterMetrics
from router.pipeline.prompt import PromptBuilder
from router.pipeline.quotas import Quotas
from router.pipeline.request_traces import RequestTraces
from router.pipeline.stream_limits import CallLimits, admit_within, watcher_limits
from router.protocols import add_servicers
from router.protocols.anthropic.app import MessagesApi, refuse
from router.protocols.batches.service import batch_service
from router.protocols.body_budget import BodyBudget
from router.protocols.body_reader import BodyReader
from router.protocols.conversation import ChatModel
from router.protocols.embeddings.app import EmbeddingsApi
from router.protocols.http_server import HttpPort
from router.protocols.kserve.http import KserveHttpApi
from router.protocols.ledger import ledger_route
from router.protocols.live_weights import LiveWeightsApi
from router.protocols.openai.app import OpenAiApi
from router.protocols.receipts import receipt_routes
from router.protocols.responses.app import ResponsesApi
from router.protocols.responses.conversations import Conversations
from router.protocols.responses.conversations_api import ConversationsApi
from router.protocols.served_models import ServedModel, ServedModels
from router.status import StatusFeed
from tests.detokenizer.scripted_scheduler import scripted_scheduler

MAX_MESSAGE = 64 << 20


@pytest.fixture(scope="session")
def folder() -> ModelFolder:
    return open_model_folder("smollm2")


@pytest.fixture(scope="session")
def tokenizer(folder: ModelFolder) -> Tokenizer:
    return Tokenizer(folder.path)


@pytest.fixture(scope="session")
def decoders(tokenizer: Tokenizer) -> DecoderFactory:
    return decoder_factory(tokenizer)


class Part:
    """A component that runs in this process."""

    def __init__(
        self,
        server: Server,
        servicer: object,
        task: asyncio.Task[None],
        http: HttpPort | None = None,
        pages: ASGIApp | None = None,
        frames: FrameServer | None = None,
    ) -> None:
        self.http = http
        self.frames = frames
        self.pages = pages
        self.server = server
        self.servicer = servicer
        self.address = f"127.0.0.1:{server.port}"
        self._task = task

    async def kill(self) -> None:
        """End the component as a crash would, without aborting the requests of its clients."""
        self.server.draining.set()
        if self.http is not None:
            self.http.abort()
            await self.http.stop(0)
        await self.server.stop()
        if self.frames is not None:
            await self.frames.close()
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task


_prompts: dict[Path, PromptBuilder] = {}


def prompts_of(folder: ModelFolder) -> PromptBuilder:
    """Return the only prompt builder of this process for a model folder, since loading the tokenizer takes up to a
    second.
    """
    if folder.path not in _prompts:
        _prompts[folder.path] = PromptBuilder(folder, 1)
        atexit.register(_prompts[folder.path].close)
    return _prompts[folder.path]


class Cluster:
    """The components that one test uses."""

    def __init__(self, folder: ModelFolder, decoders: DecoderFactory) -> None:
        self.folder = folder
        self.links = LinkSettings(MAX_MESSAGE)
        self.decoders = decoders
        self.scheduler = scripted_scheduler()
        self.scheduler_address = ""
        self.prompts = prompts_of(folder)
        self._parts: list[Part] = []
        self.runners: list[Runner] = []
        self.slots = MessageSlots()

    async def start_scheduler(self) -> None:
        self.scheduler_address = await self.scheduler.start()

    async def add_detokenizer(self, name: str = "d", max_pending_bytes: int = 8 << 20, port: int = 0) -> Part:
        tokenizer = self.folder.tokenizer_fingerprint
        pool = FeedPool(
            self.scheduler_address,
            name,
            self.folder.end_ids,
            self.links,
            lambda _: None,
            tokenizer_fingerprint=tokenizer,
        )
        frames = FrameServer("127.0.0.1", 0, max_message_bytes=MAX_MESSAGE)
        await frames.start()
        servicer = DetokenizerServicer(pool, self.decoders, max_pending_bytes, frames, tokenizer_fingerprint=tokenizer)
        server = Server("midstream.v1.Detokenizer", "127.0.0.1", port, Progress())
        detokenizer_pb2_grpc.add_DetokenizerServicer_to_server(servicer, server.grpc)
        frames_pb2_grpc.add_FramesServicer_to_server(frames, server.grpc)
        await server.start()
        return self._keep(Part(server, servicer, asyncio.create_task(pool.run()), frames=frames))

    async def add_router(
        self,
        *detokenizers: Part,
        max_pending_bytes: int = 1 << 20,
        unavailable_timeout_s: float = 30.0,
        port: int = 0,
        authenticator: Authenticator | None = None,
        chat: ChatModel | None = None,
        gen_ai: GenAiMetrics | None = None,
        keepalive_interval_s: float = 0.0,
        traces: RequestTraces | None = None,
    ) -> Part:
        authenticator, watchers = authenticator or Authenticator(), watcher_limits()
        cells = Cells(self.scheduler_address, self.links, unavailable_timeout_s)
        addresses = ",".join(part.address for part in detokenizers) or "127.0.0.1:1"
        metrics = Metrics()
        seen = RouterMetrics(metrics, gen_ai=gen_ai)
        pool = DetokenizerPool(addresses, self.links, self.folder.tokenizer_fingerprint, seen.count_tokens)
        config = RouterConfig(
            max_pending_bytes=max_pending_bytes,
            unavailable_timeout_s=unavailable_timeout_s,
            max_file_bytes=4 << 20,
            max_batch_lines=8,
            generation_config="none",
        )
        runner = Runner(config, self.folder, self.prompts, cells, pool)
        self.runners.append(runner)
        server = Server(
            "midstream.v1.Midstream",
            "127.0.0.1",
            port,
            Progress(),
            admit=admit_within(CallLimits(watchers), authenticator),
            receive=self.slots.read,
        )
        quotas, router_id = Quotas(metrics), f"router-{len(self.runners)}"
        front = FrontDoor(
            runner,
            seen,
            server.draining,
            traces=traces,
            quotas=quotas,
            keep_alives=KeepAlives(keepalive_interval_s),
        )
        status = StatusFeed(
            cells,
            self.folder.name,
            lambda: RouterStatus(router_id=router_id, usage=quotas.usage()),
            server.draining,
            0.05,
            watchers,
            on_routers=quotas.learn,
            on_detached=quotas.learn_detached,
        )
        chat = chat or ChatModel.of(self.folder, self.prompts.tokenizer)
        kserve = add_servicers(server, ServedModels([ServedModel(front, chat)]), status, router_id)[self.folder.name]
        bodies = BodyReader(BodyBudget(4 << 20))
        kept = KeptRequests(cells)
        pages = OpenAiApi(front, metrics, list, bodies, chat, kept).app()
        pages.router.routes.extend(MessagesApi(front, bodies, chat).routes())
        pages.router.routes.extend(EmbeddingsApi(Embedder(front), bodies).routes())
        pages.router.routes.append(ledger_route(cells))
        pages.router.routes.extend(LiveWeightsApi(front, bodies).routes())
        pages.router.routes.extend(receipt_routes(runner.receipts))
        conversations = Conversations(ClientDocuments(cells), 3600, bodies.max_bytes)
        responses = ResponsesApi(front, bodies, chat, kept, conversations, 3600)
        pages.router.routes.extend([*responses.routes(), *ConversationsApi(responses, bodies).routes()])
        batches = batch_service(config, pages, cells, bodies, server.draining, metrics, authenticator.owner)
        pages.router.routes.extend(batches.routes)
        pages.router.routes.extend(KserveHttpApi(kserve, bodies).routes())
        pages.router.routes.extend([*dashboard_routes(status), *page_routes()])
        http = HttpPort(AuthenticatedApp(pages, authenticator, refuse, quotas.headers), "127.0.0.1", 0)
        await server.start()
        http.start()

        async def run() -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(cells.run())
                group.create_task(pool.run())
                group.create_task(status.run())
                group.create_task(batches.runner.run())

        return self._keep(Part(server, front, asyncio.create_task(run()), http, pages))

    async def close(self) -> None:
        for part in reversed(self._parts):
            await part.kill()
        for runner in self.runners:
            runner.close()
        await self.scheduler.stop()

    def _keep(self, part: Part) -> Part:
        self._parts.append(part)
        return part


@pytest.fixture
async def cluster(folder: ModelFolder, decoders: DecoderFactory) -> AsyncIterator[Cluster]:
    cluster = Cluster(folder, decoders)
    await cluster.start_scheduler()
    yield cluster
    await cluster.close()


@pytest.fixture
async def open_client() -> AsyncIterator[Callable[..., AsyncClient]]:
    async with contextlib.AsyncExitStack() as stack:
        clients: list[AsyncClient] = []

        def make(*parts: Part, **options: float) -> AsyncClient:
            client = AsyncClient([part.address for part in parts], unavailable_timeout_s=options.get("wait_s", 30.0))
            clients.append(client)
            return client

        yield make
        for client in clients:
            stack.push_async_callback(client.close)
