"""Run a detokenizer: `python -m detokenizer`. It receives tokens from schedulers and sends text to routers."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from functools import partial

from detokenizer.feed import FeedPool
from detokenizer.servicer import DetokenizerServicer
from detokenizer.streams import record_stream
from midstream.config import DetokenizerConfig
from midstream.model.folder import open_model_folder
from midstream.model.tokenizer import open_tokenizer
from midstream.rpc.frame_link import LinkSettings
from midstream.rpc.frames import FrameServer
from midstream.rpc.health import Progress
from midstream.rpc.serving import Server
from midstream.security.peer_names import PeerNames, admit_peers
from midstream.security.tls import Tls
from midstream.service import Service, run_service
from midstream.telemetry import HttpServer, Metrics
from midstream.telemetry.tracing import Tracer
from midstream.text.incremental import decoder_factory
from protos import detokenizer_pb2_grpc, frames_pb2_grpc

GRPC_SERVICE = "midstream.v1.Detokenizer"


async def serve(config: DetokenizerConfig) -> None:
    """Run the service until SIGTERM. Raises ConfigError if the folder or a setting is invalid, or OSError if a port is
    in use.
    """
    folder = open_model_folder(config.model)
    decoders = decoder_factory(open_tokenizer(folder.path, folder.tokenizer_fingerprint))
    progress, metrics = Progress(), Metrics()
    num_tokens = metrics.counter("detokenized_tokens", "Tokens received over the feeds.")
    detokenizer_id = config.name or f"{socket.gethostname()}-{os.getpid()}"
    tls = Tls.from_config(config)
    tracer = Tracer.from_config(config, "detokenizer")
    pool = FeedPool(
        config.schedulers,
        detokenizer_id,
        folder.end_ids,
        LinkSettings.from_config(config, tls),
        num_tokens.inc,
        partial(record_stream, tracer) if tracer is not None else lambda _: None,
        folder.tokenizer_fingerprint,
    )
    frames = FrameServer.from_config(config, tls)
    servicer = DetokenizerServicer(
        pool, decoders, config.max_pending_bytes, frames, tokenizer_fingerprint=folder.tokenizer_fingerprint
    )
    metrics.gauge("num_attached_streams", "Requests attached by routers.").set_function(lambda: servicer.num_attached)
    metrics.gauge("num_connected_schedulers", "Open token feeds.").set_function(
        lambda: sum(feed.is_open for feed in pool.feeds.values())
    )
    routers = PeerNames(config.router_names, "router_names")
    server = Server(
        GRPC_SERVICE,
        config.host,
        config.port,
        progress,
        max_message_bytes=config.max_message_bytes,
        tls=tls,
        admit=admit_peers(config, lambda _: routers),
    )
    detokenizer_pb2_grpc.add_DetokenizerServicer_to_server(servicer, server.grpc)
    frames_pb2_grpc.add_FramesServicer_to_server(frames, server.grpc)
    http = HttpServer(config.host, config.http_port, metrics, progress.problems)
    tasks = (
        asyncio.create_task(pool.run(), name="the loop of token feeds"),
        asyncio.create_task(servicer.keep_reporting(), name="the loop of progress reports"),
    )
    for task in tasks:
        server.depend_on(task)
    await frames.start()
    await server.start()
    http.start()

    async def drain() -> None:
        await servicer.drain()
        await frames.close()  # before the server ends the calls within which connections run

    try:
        await server.run_until_signal(drain=drain, drain_timeout_s=config.drain_timeout_s)
    finally:
        await frames.close()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        http.stop()
        if tracer is not None:
            tracer.close()


SERVICE = Service("detokenizer", DetokenizerConfig, serve)

if __name__ == "__main__":
    sys.exit(run_service(SERVICE))
