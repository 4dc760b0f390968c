"""Assembles and runs the scheduler process."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import socket
from collections.abc import Sequence
from pathlib import Path

from midstream.clock import SteadyClock
from midstream.config import SchedulerConfig
from midstream.errors import ConfigError, ExecutionError
from midstream.model.folder import ModelFolder, midstream_home, open_model_folder
from midstream.rpc.errors import Admit
from midstream.rpc.frames import FrameServer
from midstream.rpc.health import Progress
from midstream.rpc.serving import Server
from midstream.security.payload_keys import PayloadKeys
from midstream.security.peer_names import PeerNames, admit_peers
from midstream.security.tls import Tls
from midstream.telemetry import HttpServer, Metrics
from midstream.telemetry.tracing import Tracer
from protos import frames_pb2, frames_pb2_grpc, recording_pb2, scheduler_pb2, scheduler_pb2_grpc
from scheduler.core.config import CoreConfig
from scheduler.core.core import SchedulerCore
from scheduler.core.events import DrainStarted, Recovered
from scheduler.edge.dispatch import Dispatcher
from scheduler.edge.engine import Engine, Observer
from scheduler.edge.images import Images
from scheduler.edge.kept_requests import KeptRequests
from scheduler.edge.ledger import Ledger
from scheduler.edge.lora_registry import Adapters
from scheduler.edge.metrics import SchedulerCollector
from scheduler.edge.payloads import Payloads
from scheduler.edge.receipts import KeyFolder, Receipts
from scheduler.edge.request_log import log_requests
from scheduler.edge.servicer import SchedulerServicer
from scheduler.edge.sleep import WorkerSleep
from scheduler.edge.traces import RequestTraces
from scheduler.edge.weights import Weights
from scheduler.edge.worker_keys import WorkerKeys
from scheduler.journal import Journal, JournalError
from scheduler.journal.documents import DocumentStore
from scheduler.journal.log import LogStore
from scheduler.journal.log_folder import LogFolder
from scheduler.journal.off import NoJournal
from scheduler.journal.paths import documents_of
from scheduler.journal.sqlite_documents import SqliteDocuments
from scheduler.journal.store import Store
from scheduler.journal.threaded import ThreadedJournal
from scheduler.plugins import load_scheduler
from scheduler.replay.recording import Recorder
from scheduler.replay.recording_codec import encode_config
from scheduler.wire.requests import ModelLimits

logger = logging.getLogger(__name__)

SERVICE_NAME = scheduler_pb2.DESCRIPTOR.services_by_name["Scheduler"].full_name
FRAMES_NAME = frames_pb2.DESCRIPTOR.services_by_name["Frames"].full_name


class SchedulerService:
    """A scheduler process: gRPC for routers and detokenizers, ZeroMQ for workers.

    Attributes:
        engine: The running core; set by `start`.
        frames: Accepts the connections of detokenizers and routers.
        port: gRPC port. http_port: Port of /metrics and /health.
    """

    engine: Engine

    def __init__(self, config: SchedulerConfig, model: ModelFolder | None = None) -> None:
        """Open the model folder and bind the ports. Raises ConfigError if a setting or the model folder is wrong, or
        OSError if a port is taken.
        """
        check(config)
        self._payload_keys = _payload_keys(config)
        self._receipt_keys = _receipt_keys(config)  # before the sockets are opened, since it may fail
        self.config = config
        model = model or open_model_folder(config.model)
        name = config.served_model_name
        self.model = dataclasses.replace(model, name=name) if name else model
        self.limits = ModelLimits(
            self.model.max_sequence_length, self.model.end_ids, self.model.vocab_size, self.model.hidden_size
        )
        self.clock = SteadyClock()
        self.progress = Progress()
        self.metrics = Metrics(self.model.name)
        self._tls = Tls.from_config(config)
        self.server = Server(
            SERVICE_NAME,
            config.host,
            config.port,
            self.progress,
            max_message_bytes=config.max_message_bytes,
            tls=self._tls,
            admit=_admit(config),
            is_standby=config.standby,
        )
        self.port = self.server.port
        self.frames = FrameServer.from_config(config, self._tls)
        self.dispatcher = Dispatcher(
            config.host,
            config.worker_port,
            heartbeat_interval_ms=config.heartbeat_interval_ms,
            worker_timeout_ms=config.worker_timeout_ms,
            max_held_bytes=config.max_tensor_bytes,
            keys=WorkerKeys.from_config(config),
            clock=self.clock,
            is_standby=config.standby,
        )
        self.journal = make_journal(config, self.model, self.limits, self.port, self.clock)
        progress = self.progress
        self._http = HttpServer(
            config.host, config.http_port, self.metrics, progress.problems, progress.stalled, self._not_ready
        )
        self.http_port = self._http.port
        self._tasks: list[asyncio.Task[None]] = []
        self._kept: KeptRequests | None = None
        self._payloads: Payloads | None = None
        self._ledger: Ledger | None = None
        self._recorder: Recorder | None = None
        self._tracer = Tracer.from_config(config, "scheduler")

    async def start(self) -> None:
        """Take over the journal, once its lease is free, and start serving."""
        waiting = _STANDBY if self.config.standby else "starting"
        self.progress.set_reason(waiting, stands=True)
        self._http.start()
        contents = await self.journal.open(self._on_journal_failure)
        if self.config.standby:
            self.server.bind()
            self.port = self.server.port
            self.dispatcher.bind()
        core = SchedulerCore(
            core_config(self.config, self.model, contents.scheduler_epoch),
            load_scheduler(self.config.scheduler_plugin, self.config.capacity_policy, self.config.batching_type),
        )
        self._recorder = self._open_recorder(core.config)
        self.engine = Engine(
            core,
            journal=self.journal,
            dispatcher=self.dispatcher,
            observers=self._observers(),
            on_failure=self._on_planning_failure,
            clock=self.clock,
        )
        adapters = Adapters(
            contents.adapters,
            groups=lambda: [group for group in core.groups if not group.is_asleep],
            sender=self.dispatcher,
            journal=self.journal,
            vocab_size=self.model.vocab_size,
        )
        self.dispatcher.on_adapter_result = adapters.on_result
        cell = self.config.name or f"{self.config.host}:{self.port}"
        weights = Weights(self.engine, self.dispatcher, self.journal.documents, self.model.fingerprint, cell)
        self.dispatcher.on_weights_prepared = weights.on_prepared

        sleep = WorkerSleep(self.engine, self.journal.documents, weights, self.model.fingerprint)

        def on_joined(connection: bytes, epoch: int) -> None:
            weights.on_joined(connection, epoch)
            if not core.membership.groups[epoch].is_asleep:
                adapters.on_joined(connection, epoch)

        self.engine.on_joined = on_joined
        images = Images(
            groups=lambda: core.groups,
            sender=self.dispatcher,
            hidden_size=self.model.hidden_size,
            max_deaths=self.config.max_worker_deaths,
            no_worker_timeout_s=self.config.no_worker_timeout_s,
            answer_timeout_s=self.config.worker_progress_timeout_ms / 1000,
            cache_bytes=self.config.image_cache_bytes,
        )
        self.dispatcher.on_image_result = images.on_result
        self.engine.recover(contents.requests)
        self.metrics.registry.register(SchedulerCollector(core, self.dispatcher, self.journal, images))
        kept = KeptRequests(self.journal.documents, self.engine, self.limits, self.model.fingerprint)
        receipts = None
        if self._receipt_keys is not None:
            receipts = Receipts(self._receipt_keys, self.journal.documents, self.engine, kept)
        if self._payload_keys is not None:
            documents, ttl_s = self.journal.documents, self.config.payload_ttl_s
            self._payloads = Payloads(self._payload_keys, documents, self.engine, kept, ttl_s=ttl_s)
        ledger = self._open_ledger(contents.requests, receipts)
        self._kept, self._ledger = kept, ledger
        servicer = SchedulerServicer(
            self.engine,
            adapters,
            images,
            kept,
            ledger,
            receipts,
            self._payloads,
            self.journal.documents,
            model=self.model,
            limits=self.limits,
            weights=weights,
            sleep=sleep,
            cell=cell,
            policies=(self.config.capacity_policy, self.config.batching_type, self.config.journal),
            max_stored_bytes=self.config.max_stored_bytes,
            frames=self.frames,
        )
        scheduler_pb2_grpc.add_SchedulerServicer_to_server(servicer, self.server.grpc)
        frames_pb2_grpc.add_FramesServicer_to_server(self.frames, self.server.grpc)
        # Everything that observes requests exists by now, since turns are taken while this reads the database.
        await weights.restore()
        await sleep.restore()
        dispatching = self.dispatcher.run(
            self.engine.handle_worker_event, self.engine.take_turn, self.progress.loop("worker messages")
        )
        self._tasks.append(asyncio.create_task(dispatching, name="the loop of worker messages"))
        self.server.depend_on(self._tasks[-1])
        await self.frames.start()
        await self.server.start()
        self.progress.set_reason(waiting, stands=False)
        logger.info(
            "serving",
            extra={"port": self.port, "worker_port": self.worker_port, "scheduler_epoch": contents.scheduler_epoch},
        )

    @property
    def worker_port(self) -> int:
        """The ZeroMQ port."""
        return self.dispatcher.port

    def _not_ready(self) -> list[str]:
        return [problem for problem in self.progress.problems() if problem != _STANDBY]

    def _open_ledger(self, recovered: Sequence[Recovered], receipts: Receipts | None) -> Ledger | None:
        if not self.config.ledger_ttl_s:
            return None
        known = self.engine.core.lifecycle.requests
        ids = [event.spec.request_id for event in recovered if event.finish is not None]
        ended = [known[request_id] for request_id in ids if request_id in known]
        documents, ttl_s = self.journal.documents, self.config.ledger_ttl_s
        ledger = Ledger(documents, self.engine, ended, ttl_s=ttl_s, model=self.model.name, receipts=receipts)
        self._tasks.append(asyncio.create_task(ledger.run(), name="ledger"))
        return ledger

    def _observers(self) -> list[Observer]:
        observers: list[Observer] = [log_requests]
        if self._recorder is not None:
            observers.append(self._recorder.note)
        if self._tracer is not None:
            observers.append(RequestTraces(self._tracer, self.clock).note)
        return observers

    def _open_recorder(self, config: CoreConfig) -> Recorder | None:
        if not self.config.record:
            return None
        started = recording_pb2.RecordingStarted(
            capacity_policy=self.config.capacity_policy,
            batching_type=self.config.batching_type,
            scheduler_plugin=self.config.scheduler_plugin,
            config=encode_config(config),
        )
        return Recorder(Path(self.config.record), started, self.clock.now_ns())

    def _on_planning_failure(self, error: Exception) -> None:
        logger.error("planning failed", exc_info=error)
        self.server.fail(ExecutionError(f"planning failed: {error!r}"))

    def _on_journal_failure(self, error: JournalError) -> None:
        logger.critical("the journal failed, stopping this scheduler: %s", error)
        self.progress.set_reason("the journal failed", stands=True)
        self.server.fail(error)

    async def run(self) -> None:
        """Serve until SIGTERM, then drain and stop.

        Raises:
            ExecutionError: The journal failed, or a loop ended. The next scheduler continues from the last commit.
        """
        await self.start()
        try:
            await self.server.run_until_signal(drain=self.drain, drain_timeout_s=self.config.drain_timeout_s)
        finally:
            await self.close()

    async def drain(self) -> None:
        """Reject new requests; return once all known requests have ended and their output has been sent."""
        self.engine.handle(DrainStarted(self.engine.now_ns()))
        await self.engine.wait_until_idle()
        await self.frames.close()  # before the server ends the calls within which connections run

    async def stop(self) -> None:
        """Stop without draining."""
        await self.server.stop()
        await self.close()

    async def close(self) -> None:
        """Release ports and tasks."""
        await self.frames.close()
        for task in self._tasks:
            task.cancel()
            await asyncio.wait((task,))
        if self._kept is not None:
            await self._kept.close()
        if self._payloads is not None:
            await self._payloads.close()
        if self._ledger is not None:
            await self._ledger.close()
        self.engine.close()
        if self._recorder is not None:
            await asyncio.to_thread(self._recorder.close)
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)
        await self.journal.close()
        self.dispatcher.close()
        self._http.stop()


_STANDBY = "standby"  # the reported reason for not serving
_LEAST = {
    "tokens_per_block": 1,
    "max_batch_size": 1,
    "max_num_tokens": 1,
    "max_context_chunk": 0,
    "max_attention_window": 0,
    "sink_token_length": 0,
    "pipeline_depth": 1,
    "max_queue_size": 1,
    "max_worker_deaths": 1,
}


def check(config: SchedulerConfig) -> None:
    """Raise ConfigError if settings conflict, or are too small to run any request."""
    for name, least in _LEAST.items():
        if getattr(config, name) < least:
            raise ConfigError(f"is {getattr(config, name)}; must be at least {least}", field=name)
    if not 0 <= config.verify <= 1:
        raise ConfigError(f"is {config.verify:g}; must be in 0..1", field="verify")
    if config.max_context_chunk and not config.enable_chunked_context:
        raise ConfigError("has no meaning without enable_chunked_context; leave it out", field="max_context_chunk")
    if config.sink_token_length and not config.max_attention_window:
        raise ConfigError("has no meaning without max_attention_window; leave it out", field="sink_token_length")
    if config.sink_token_length and config.sink_token_length >= config.max_attention_window:
        raise ConfigError(
            f"is {config.sink_token_length}; must be less than max_attention_window, {config.max_attention_window}",
            field="sink_token_length",
        )


def _admit(config: SchedulerConfig) -> Admit | None:
    """Return the admission check that restricts each method to the services allowed to call it.

    Both routers and detokenizers call GetLoads, to find the active scheduler, and Tunnel, where the token of their
    connection says what it is for.
    """
    routers = PeerNames(config.router_names, "router_names")
    detokenizers = PeerNames(config.detokenizer_names, "detokenizer_names")
    both = PeerNames(f"{config.router_names}, {config.detokenizer_names}", "")
    others = {
        f"/{SERVICE_NAME}/OpenTokenFeed": detokenizers,
        f"/{SERVICE_NAME}/GetLoads": both,
        f"/{FRAMES_NAME}/Tunnel": both,
    }
    return admit_peers(config, lambda method: others.get(method, routers))


def _receipt_keys(config: SchedulerConfig) -> KeyFolder | None:
    if config.receipts == "off":
        return None
    folder = Path(config.receipt_keys).expanduser() if config.receipt_keys else midstream_home() / "receipts"
    return KeyFolder(folder, is_default=not config.receipt_keys)


def _payload_keys(config: SchedulerConfig) -> PayloadKeys | None:
    if config.receipts != "payload":
        if config.payload_keys:
            raise ConfigError("has no meaning unless receipts is payload; leave it out", field="payload_keys")
        return None
    if not config.payload_keys:
        raise ConfigError("must be set, since receipts is payload", field="payload_keys")
    if config.payload_ttl_s <= 0:
        raise ConfigError(f"is {config.payload_ttl_s}; must be at least 1", field="payload_ttl_s")
    return PayloadKeys(Path(config.payload_keys).expanduser())


def core_config(config: SchedulerConfig, model: ModelFolder, scheduler_epoch: int) -> CoreConfig:
    """Return the core's settings."""
    ns_per_s, ns_per_ms = 1_000_000_000, 1_000_000
    same = {item.name for item in dataclasses.fields(CoreConfig)} & {item.name for item in dataclasses.fields(config)}
    return CoreConfig(
        scheduler_epoch=scheduler_epoch,
        vocab_size=model.vocab_size,
        max_sequence_length=model.max_sequence_length,
        model_fingerprint=model.fingerprint,
        worker_timeout_ns=config.worker_timeout_ms * ns_per_ms,
        progress_timeout_ns=config.worker_progress_timeout_ms * ns_per_ms,
        orphan_grace_ns=int(config.orphan_grace_s * ns_per_s),
        finished_ttl_ns=int(config.finished_ttl_s * ns_per_s),
        no_worker_timeout_ns=int(config.no_worker_timeout_s * ns_per_s),
        unload_after_ns=int(config.unload_after * ns_per_s),
        verify_ppm=math.ceil(config.verify * 1_000_000),
        **{name: getattr(config, name) for name in same},
    )


def make_journal(
    config: SchedulerConfig, model: ModelFolder, limits: ModelLimits, port: int, clock: SteadyClock
) -> Journal:
    """Return the configured journal; if no path is configured, the folder is named after the gRPC port. Raises
    ConfigError if `standby` is set for a journal without a lease, the path is a file, or the package for PostgreSQL is
    missing.
    """
    if config.standby and config.journal != "postgres":
        raise ConfigError("only a journal in PostgreSQL has a lease to wait for", field="standby")
    if config.journal == "off":
        return NoJournal(clock)
    if config.journal == "log":
        path = Path(config.journal_path) if config.journal_path else midstream_home() / f"scheduler-{port}.journal"
        if path.is_file():
            raise ConfigError(f"{path} is a file; use the path of a folder", field="journal_path")
        documents = SqliteDocuments(documents_of(path))
        return ThreadedJournal(LogStore(LogFolder(path)), limits, model.fingerprint, clock, documents)
    store, postgres_documents = _postgres_stores(config)
    return ThreadedJournal(store, limits, model.fingerprint, clock, postgres_documents)


def _postgres_stores(config: SchedulerConfig) -> tuple[Store, DocumentStore]:
    try:
        from scheduler.journal.postgres import PostgresStore
        from scheduler.journal.postgres_documents import PostgresDocuments
    except ImportError as error:
        raise ConfigError(f"needs `pip install midstream[postgres]` ({error})", field="journal") from None
    holder = config.name or f"{socket.gethostname()}:{config.port}"
    store = PostgresStore(config.journal_url, holder, is_standby=config.standby)
    return store, PostgresDocuments(config.journal_url, holder)
