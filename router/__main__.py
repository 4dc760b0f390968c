"""Run a router, which serves clients: `python -m router`."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import socket
import sys

from midstream.config import RouterConfig
from midstream.errors import ConfigError
from midstream.model.folder import open_model_folder
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
from router.pipeline.cells import Cells
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
from router.pipeline.reach import watch_reach
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
from router.protocols.openai.app import OpenAiApi
from router.protocols.receipts import receipt_routes
from router.protocols.responses.app import ResponsesApi
from router.protocols.responses.conversations import Conversations
from router.protocols.responses.conversations_api import ConversationsApi
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
    folder = open_model_folder(config.model)
    folder = dataclasses.replace(folder, name=config.served_model_name or folder.name)
    links = LinkSettings.from_config(config, tls)
    cells = Cells(config.schedulers, links, config.unavailable_timeout_s)
    prompts = PromptBuilder(folder, config.num_tokenizer_threads, cells.encode_image)
    chat = ChatModel.of(folder, prompts.tokenizer, config.tool_parser, config.reasoning_parser)
    progress, metrics = Progress(), Metrics(folder.name)
    tracer = Tracer.from_config(config, "router")
    gen_ai = GenAiMetrics.from_config(config, folder.name)
    seen = RouterMetrics(metrics, logs_requests=config.access_log, gen_ai=gen_ai)
    pool = DetokenizerPool(config.detokenizers, links, folder.tokenizer_fingerprint, seen.count_tokens)
    runner = Runner(config, folder, prompts, cells, pool)
    metrics.gauge("num_live_detokenizers", "Detokenizers available.").set_function(lambda: pool.num_live)
    metrics.registry.register(CellMetrics(folder.name, cells.reports))
    watchers = watcher_limits()
    calls = CallLimits(watchers, config.max_concurrent_streams, config.max_streams_per_client)
    admit, turns = admit_within(calls, authenticator), CallTurns()
    server = Server(
        GRPC_SERVICE,
        config.host,
        config.port,
        progress,
        max_message_bytes=config.max_message_bytes,
        max_request_bytes=max_request_bytes(folder, config.max_message_bytes),
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
    traces = RequestTraces(tracer, config.trace_ratio, folder.name) if tracer is not None else None
    quotas = Quotas(metrics)
    keep_alives = KeepAlives(config.keepalive_interval_s)
    front = FrontDoor(runner, seen, server.draining, limits, traces, quotas, keep_alives, leaving=server.leaving)

    def router_status() -> status_pb2.RouterStatus:
        return status_pb2.RouterStatus(
            router_id=router_id,
            num_open_streams=limits.num_open,
            num_detokenizers=len(pool.links),
            num_live_detokenizers=pool.num_live,
            is_draining=server.leaving.is_set(),
            problems=progress.problems(),
            usage=quotas.usage(),
            tokenizer_fingerprint=folder.tokenizer_fingerprint,
            template_fingerprint=folder.template_fingerprint,
        )

    status = StatusFeed(
        cells,
        folder.name,
        router_status,
        server.draining,
        watchers=watchers,
        on_routers=quotas.learn,
        on_detached=quotas.learn_detached,
    )
    kserve = add_servicers(server, front, status, router_id, chat.tokens)
    bodies = BodyReader(BodyBudget(max_body_bytes(folder, config.max_body_bytes, config.max_message_bytes)))
    kept = KeptRequests(cells)
    conversations = Conversations(
        ClientDocuments(cells), config.response_ttl_s, bodies.max_bytes, config.unavailable_timeout_s
    )
    responses = ResponsesApi(front, bodies, chat, kept, conversations, config.response_ttl_s)
    pages = OpenAiApi(front, metrics, progress.problems, bodies, chat, kept, progress.stalled).app()
    batches = batch_service(config, pages, cells, bodies, server.leaving, metrics, authenticator.owner)
    pages.router.routes += [
        *MessagesApi(front, bodies, chat).routes(),
        *EmbeddingsApi(Embedder(front), bodies).routes(),
        *responses.routes(),
        *ConversationsApi(responses, bodies).routes(),
        *batches.routes,
        *KserveHttpApi(kserve, bodies).routes(),
        ledger_route(cells),
        *LiveWeightsApi(front, bodies).routes(),
        *receipt_routes(runner.receipts),
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
    parts = {"schedulers": cells.run(), "detokenizers": pool.run(), "status": status.run()}
    parts["batches"] = batches.runner.run()
    parts["health"] = watch_reach(cells, pool, progress)
    parts["leaving"] = leave(server.leaving, http)
    if config.throughput_log_s > 0:
        parts["throughput"] = log_throughput(seen, lambda: limits.num_open, config.throughput_log_s)
    tasks = [asyncio.create_task(part, name=f"the loop of {name}") for name, part in parts.items()]
    try:
        # Until then, calls wait to be accepted; without a scheduler, they would be refused.
        await cells.wait_found(_MAX_DISCOVERY_S)
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
        prompts.close()
        runner.close()
        if tracer is not None:
            tracer.close()
        if gen_ai is not None:
            gen_ai.close()


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
