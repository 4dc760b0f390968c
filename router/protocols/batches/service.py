"""Assembles the components of the Files and Batches APIs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from starlette.routing import Route
from starlette.types import ASGIApp

from midstream.config import RouterConfig
from midstream.telemetry import Metrics
from router.authentication import Caller
from router.pipeline.cells import CellSet
from router.pipeline.client_documents import ClientDocuments
from router.protocols.batches.batch import Batches
from router.protocols.batches.batches_api import BatchesApi
from router.protocols.batches.files import Files
from router.protocols.batches.files_api import FilesApi
from router.protocols.batches.lease import Leases
from router.protocols.batches.runner import BatchRunner
from router.protocols.body_reader import BodyReader


@dataclass(frozen=True, slots=True)
class BatchService:
    """The files and batches of one router."""

    routes: list[Route]
    runner: BatchRunner


def batch_service(
    config: RouterConfig,
    app: ASGIApp,
    cells: CellSet,
    bodies: BodyReader,
    leaving: asyncio.Event,
    metrics: Metrics,
    caller_of: Callable[[str], Caller | None],
) -> BatchService:
    """Return the service; `app` serves the endpoints that lines call. See BatchRunner."""
    documents = ClientDocuments(cells)
    files, batches, leases = Files(documents), Batches(documents), Leases(documents)
    files_api = FilesApi(documents, files, max_file_bytes=config.max_file_bytes, ttl_s=config.file_ttl_s)
    batches_api = BatchesApi(documents, files, batches, leases, bodies, config.file_ttl_s)
    runner = BatchRunner(
        app,
        cells,
        files,
        batches,
        leases,
        leaving,
        metrics,
        caller_of,
        max_lines=config.max_batch_lines,
        max_body_bytes=bodies.max_bytes,
    )
    return BatchService([*files_api.routes(), *batches_api.routes()], runner)
