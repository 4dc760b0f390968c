"""Run a router, which serves clients: `python -m router`."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import socket
import sys
from collections import ChainMap
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.types import ASGIApp

from midstream.config import RouterConfig
from midstream.config.models import aliases_of, model_configs
from midstream.errors import ConfigError
from midstream.model.folder import ModelFolder, open_model_folder
from midstream.rpc.frame_link import LinkSettings
from midstream.rpc.health import Progress
from midstream.rpc.open_files import raise_open_files_limit
from midstream.rpc.serving import Server
from midstream.security.host_header import AllowedHosts
from midstream.security.tls import Tls
from midstream.service import Service, run_service
from midstream.telemetry import Metrics
from midstream.telemetry.tracing import Tracer
from protos import status_pb2
from router.authentication import AuthenticatedApp, Authenticator
from router.dashboard import dashboard_routes
from router.pages import page_routes
from router.pipeline.call_turns import CallTurns
from router.pipeline.cell_metrics import CellMetrics
from router.pipeline.cells import Cells, CellSet
from router.pipeline.client_documents import ClientDocuments
from router.pipeline.detokenizer_pool import DetokenizerPool
from router.pipeline.embedder import Embedder
from router.pipeline.gen_ai_metrics import GenAiMetrics
from router.pipeline.generation import FrontDoor, Runner
from router.pipeline.keep_alives import KeepAlives
from router.pipeline.kept_requests import KeptRequests
from router.pipeline.message_slots import MessageSlots
from router.pipeline.metrics import RouterMetrics, log_throughput
from router.pipeline.prompt import PromptBuilder
from router.pipeline.quotas import Quotas
from router.pipeline.reach import Reach, unreached, watch_reach
from router.pipeline.request_traces import RequestTraces, TracedApp, remember_client
from router.pipeline.stream_limits import CallLimits, StreamLimits, admit_within, watcher_limits
from router.protocols import ADAPTED_SERVICES, add_servicers
from router.protocols import SERVICE as GRPC_SERVICE
from router.protocols.anthropic.app import MessagesApi, refuse
from router.protocols.batches.service import batch_service
from router.protocols.body_budget import BodyBudget, max_body_bytes, max_request_bytes
from router.protocols.body_reader import BodyReader
from router.protocols.conversation import ChatModel
from router.protocols.embeddings.app import EmbeddingsApi
from router.protocols.http_server import HostCheckedApp, HttpPort, for_pages
from router.protocols.kserve.http import KserveHttpApi
from router.protocols.ledger import ledger_route
from router.protocols.live_weights import LiveWeightsApi
from router.protocols.model_door import ModelDoor
from router.protocols.openai.app import OpenAiApi
from router.protocols.receipts import receipt_routes
from router.protocols.responses.app import ResponsesApi
from router.protocols.responses.conversations import Conversations
from router.protocols.responses.conversations_api import ConversationsApi
from router.protocols.served_models import ServedModel, ServedModels
from router.status import StatusFeed

_SWITCH_INTERVAL_S = 0.0005
_MAX_DISCOVERY_S = 5.0
_LEAST = {
    "max_beam_width": 1,
    "max_concurrent_streams": 1,
    "max_streams_per_client": 1,
    "max_batch_lines": 1,
    "num_tokenizer_threads": 1,
    "unavailable_timeout_s": 0,
    "keepalive_interval_s": 0,
    "drain_delay_s": 0,
}


def check(config: RouterConfig) -> None:
    """Raise ConfigError if no request could run with the settings."""
    for name, least in _LEAST.items():
        if not getattr(config, name) >= least:  # also if it is NaN
            raise ConfigError(f"is {getattr(config, name)}; must be at least {least}", field=name)
    if not 0 <= config.trace_ratio <= 1:
        raise ConfigError(f"is {config.trace_ratio}; must be in 0..1", field="trace_ratio")


async def serve(config: RouterConfig) -> None:
    """Run the service until SIGTERM.

    Raises:
        ConfigError: The model folder or a setting is invalid.
        ExecutionError: A main loop of the router has ended.
        OSError: A port is in use.
    """
    check(config)
    tls, authenticator = Tls.from_config(config), Authenticator.from_config(config)
    links = LinkSettings.from_config(config, tls)
    models = [_Model.open(own, links) for own in model_configs(config)]
    first, is_one = models[0], len(models) == 1
    everywhere = CellSet(ChainMap(*(model.cells.cells for model in models)), config.unavailable_timeout_s)
    progress, metrics = Progress(), Metrics(first.name if is_one else "")
    tracer = Tracer.from_config(config, "router")
    watchers = watcher_limits()
    calls = CallLimits(watchers, config.max_concurrent_streams, config.max_streams_per_client)
    admit, turns = admit_within(calls, authenticator), CallTurns()
    server = Server(
        GRPC_SERVICE,
        config.host,
        config.port,
        progress,
        max_message_bytes=config.max_message_bytes,
        max_request_bytes=max(max_request_bytes(model.folder, config.max_message_bytes) for model in models),
        # Higher than the router's own limit, which rejects calls; calls above this limit would wait silently.
        max_concurrent_streams=2 * config.max_concurrent_streams,
        tls=tls,
        admit=remember_client(admit) if tracer is not None else admit,
        receive=MessageSlots().read,
        turn_of=turns.of_method,
        more_services=ADAPTED_SERVICES,
        shared_port=config.shared_port,
    )
    router_id = config.name or f"{socket.gethostname()}-{os.getpid()}"
    limits = StreamLimits(config.max_concurrent_streams, config.max_streams_per_client)
    metrics.gauge("num_open_streams", "Open client streams.").set_function(lambda: limits.num_open)
    quotas, keep_alives = Quotas(metrics), KeepAlives(config.keepalive_interval_s)
    reached = {model.name: Reach(model.cells, model.pool) for model in models}
    all_seen: list[RouterMetrics] = []

    def door_of(model: _Model) -> ServedModel:
        own_metrics = metrics if is_one else metrics.of_model(model.name)
        own_metrics.gauge("num_live_detokenizers", "Detokenizers available.").set_function(model.num_live_detokenizers)
        own_metrics.registry.register(CellMetrics(model.name, model.cells.reports))
        traces = RequestTraces(tracer, config.trace_ratio, model.name) if tracer is not None else None
        gen_ai = GenAiMetrics.from_config(config, model.name)
        seen = RouterMetrics(own_metrics, logs_requests=config.access_log, gen_ai=gen_ai)
        all_seen.append(seen)
        model.pool.count_tokens = seen.count_tokens
        runner = Runner(model.config, model.folder, model.prompts, model.cells, model.pool, everywhere)
        front = FrontDoor(runner, seen, server.draining, limits, traces, quotas, keep_alives, leaving=server.leaving)
        return ServedModel(front, model.chat)

    served = ServedModels([door_of(model) for model in models])

    def router_status() -> status_pb2.RouterStatus:
        return status_pb2.RouterStatus(
            router_id=router_id,
            num_open_streams=limits.num_open,
            num_detokenizers=sum(len(model.pool.links) for model in models),
            num_live_detokenizers=sum(model.pool.num_live for model in models),
            is_draining=server.leaving.is_set(),
            problems=dict.fromkeys((*progress.problems(), *unreached(reached))),
            usage=quotas.usage(),
            tokenizer_fingerprint=first.folder.tokenizer_fingerprint,
            template_fingerprint=first.folder.template_fingerprint,
        )

    status = StatusFeed(
        everywhere,
        ", ".join(model.name for model in models),
        router_status,
        server.draining,
        watchers=watchers,
        on_routers=quotas.learn,
        on_detached=quotas.learn_detached,
        model_of=served.folder_of,
    )
    kserve = add_servicers(server, served, status, router_id)
    body_sizes = (max_body_bytes(model.folder, config.max_body_bytes, config.max_message_bytes) for model in models)
    bodies = BodyReader(BodyBudget(max(body_sizes)))
    kept = KeptRequests(everywhere)
    conversations = Conversations(
        ClientDocuments(everywhere), config.response_ttl_s, bodies.max_bytes, config.unavailable_timeout_s
    )
    responses = {
        name: ResponsesApi(it.front, bodies, it.chat, kept, conversations, config.response_ttl_s)
        for name, it in served.models.items()
    }

    async def is_ready(name: str) -> bool:
        return not (progress.problems() or reached[await served.named(name)].problems)

    def app_of(name: str, it: ServedModel) -> Starlette:
        responses[name].peers = responses
        api = OpenAiApi(
            it.front, metrics, progress.problems, bodies, it.chat, kept, progress.stalled, served.catalog, is_ready
        )
        app = api.app()
        app.router.routes += [
            *MessagesApi(it.front, bodies, it.chat).routes(),
            *EmbeddingsApi(Embedder(it.front), bodies).routes(),
            *responses[name].routes(),
            *KserveHttpApi(kserve[name], bodies).routes(),
            *LiveWeightsApi(it.front, bodies).routes(),
        ]
        return app

    apps = {name: app_of(name, it) for name, it in served.models.items()}
    pages: ASGIApp = apps[first.name] if is_one else ModelDoor(served, apps, bodies, refuse)
    batches = batch_service(config, pages, everywhere, bodies, server.leaving, metrics, authenticator.owner)
    apps[first.name].router.routes += [
        *ConversationsApi(responses[first.name], bodies).routes(),
        *batches.routes,
        ledger_route(everywhere),
        *receipt_routes(served.first.front.runner.receipts),
        *dashboard_routes(status),
        *page_routes(),
    ]
    app = for_pages(
        AuthenticatedApp(turns.for_pages(pages), authenticator, refuse, quotas.headers), config.cors_origins
    )
    checked = HostCheckedApp(app, AllowedHosts(config.host, config.allowed_hosts))
    http = HttpPort(
        TracedApp(checked) if tracer is not None else checked,
        config.host,
        config.http_port,
        tls,
        shared_port=config.shared_http_port,
        max_open_files=raise_open_files_limit(),
    )
    parts = {"status": status.run(), "batches": batches.runner.run(), "health": watch_reach(reached, progress)}
    whose = {model.name: "" if is_one else f" of {model.name}" for model in models}
    parts |= {f"schedulers{whose[model.name]}": model.cells.run() for model in models}
    parts |= {f"detokenizers{whose[model.name]}": model.pool.run() for model in models}
    parts["leaving"] = leave(server.leaving, http)
    if config.throughput_log_s > 0:
        parts["throughput"] = log_throughput(all_seen, lambda: limits.num_open, config.throughput_log_s)
    tasks = [asyncio.create_task(part, name=f"the loop of {name}") for name, part in parts.items()]
    try:
        # Until then, calls wait to be accepted; without a scheduler, they would be refused.
        await asyncio.gather(*(model.cells.wait_found(_MAX_DISCOVERY_S) for model in models))
        await server.start()
        for task in (*tasks, *http.start()):
            server.depend_on(task)
        await server.run_until_signal(
            drain_timeout_s=config.drain_timeout_s, drain_delay_s=config.drain_delay_s, stop_other_port=http.stop
        )
    finally:
        await http.stop(0)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for model in models:
            model.prompts.close()
            served.models[model.name].front.runner.close()
        closers = [exporter.close for exporter in (tracer, *(seen.gen_ai for seen in all_seen)) if exporter is not None]
        for close in closers:
            close()


@dataclass(frozen=True, slots=True)
class _Model:
    """What the router needs for the requests to one model."""

    config: RouterConfig
    folder: ModelFolder
    cells: Cells
    pool: DetokenizerPool
    prompts: PromptBuilder
    chat: ChatModel

    @classmethod
    def open(cls, config: RouterConfig, links: LinkSettings) -> _Model:
        """Open the model. Raises ConfigError if its folder or a setting is invalid."""
        folder = open_model_folder(config.model)
        folder = dataclasses.replace(folder, name=config.served_model_name or folder.name, aliases=aliases_of(config))
        cells = Cells(config.schedulers, links, config.unavailable_timeout_s)
        prompts = PromptBuilder(folder, config.num_tokenizer_threads, cells.encode_image)
        chat = ChatModel.of(folder, prompts.tokenizer, config.tool_parser, config.reasoning_parser)
        pool = DetokenizerPool(config.detokenizers, links, folder.tokenizer_fingerprint)
        return cls(config, folder, cells, pool, prompts, chat)

    @property
    def name(self) -> str:
        """Its name in the API."""
        return self.folder.name

    def num_live_detokenizers(self) -> int:
        """Return the number of available detokenizers."""
        return self.pool.num_live


async def leave(leaving: asyncio.Event, http: HttpPort) -> None:
    """Let HTTP clients reach other routers once this one should get no more work."""
    await leaving.wait()
    http.leave()
    await asyncio.Event().wait()  # the loops of a router do not end


def prepare() -> None:
    """Set up the process for a router's threads."""
    # Otherwise the tokenizer library would use its own threads, which clients would not share fairly.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # Threads that parse and check requests hold the GIL; the event loop waits up to this long to get it back.
    sys.setswitchinterval(_SWITCH_INTERVAL_S)


SERVICE = Service("router", RouterConfig, serve, prepare)

if __name__ == "__main__":
    sys.exit(run_service(SERVICE))
