"""`python -m router`: takes requests from clients."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys

from midstream.config import RouterConfig, load_config
from midstream.errors import MidstreamError
from midstream.health import Progress
from midstream.model_folder import open_model_folder
from midstream.serving import Server
from midstream.telemetry import Metrics, configure_logging
from protos import service_pb2_grpc
from router.adapters.openai.app import OpenAiApi
from router.cells import Cells
from router.detokenizer_pool import DetokenizerPool
from router.generation import Runner
from router.http_server import HttpPort
from router.output import FrontDoor, RouterMetrics
from router.prompt import PromptBuilder
from router.servicer import RouterServicer

SERVICE = "midstream.v1.Midstream"


async def serve(config: RouterConfig) -> None:
    """Runs the service until SIGTERM.

    Raises:
        ConfigError: The model folder or a setting is wrong.
        OSError: A port is taken.
    """
    folder = open_model_folder(config.model)
    prompts = PromptBuilder(folder, config.num_tokenizer_threads)
    progress, metrics = Progress(), Metrics()
    cells = Cells(config.schedulers, config.max_message_bytes)
    pool = DetokenizerPool(config.detokenizers, config.max_message_bytes)
    runner = Runner(
        folder,
        prompts,
        cells,
        pool,
        max_pending_bytes=config.max_pending_bytes,
        unavailable_timeout_s=config.unavailable_timeout_s,
    )
    metrics.gauge("num_live_detokenizers", "Detokenizers that can be used.").set_function(lambda: pool.num_live)
    server = Server(
        SERVICE,
        config.host,
        config.port,
        progress,
        max_message_bytes=config.max_message_bytes,
        max_concurrent_streams=config.max_concurrent_streams,
    )
    router_id = config.name or f"{socket.gethostname()}-{os.getpid()}"
    front = FrontDoor(runner, RouterMetrics(metrics), server.draining)
    servicer = RouterServicer(front, cells, router_id)
    service_pb2_grpc.add_MidstreamServicer_to_server(servicer, server.grpc)
    api = OpenAiApi(front, prompts, metrics, progress.problems, config.max_message_bytes)
    http = HttpPort(api.app(), config.host, config.http_port)
    tasks = [asyncio.create_task(cells.run(), name="cells"), asyncio.create_task(pool.run(), name="detokenizers")]
    await server.start()
    http.start()
    try:
        await server.run_until_signal(drain_timeout_s=config.drain_timeout_s)
        await http.stop(config.drain_timeout_s)
    finally:
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        prompts.close()


def main() -> int:
    """The process's exit status."""
    try:
        config = load_config(RouterConfig, "router")
        configure_logging(config.name or f"router:{config.port}", level=config.log_level, style=config.log_format)
        asyncio.run(serve(config))
    except (MidstreamError, OSError) as error:
        print(f"router: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
