"""KServe's protocol v2 over HTTP, with Triton's extensions for generation and for binary tensors. Bodies are converted
to the messages of the gRPC service (json_tensors.py), which runs them.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from midstream.errors import InvalidArgumentError, MidstreamError
from protos import kserve_pb2 as pb
from router.pipeline.idempotency import HEADER, check_key
from router.protocols.body_reader import BodyReader
from router.protocols.kserve.json_tensors import (
    BinaryOutputs,
    as_json,
    read_generate,
    read_infer,
    render_generate,
    render_infer,
)
from router.protocols.kserve.servicer import KserveServicer
from router.protocols.openai.endpoints import check_parameters, shown
from router.protocols.openai.errors import http_status
from router.protocols.retries import retry_headers
from router.protocols.streaming import CompleteResponse, EventStream, StreamedResponse, dump

_LENGTH = "Inference-Header-Content-Length"
# A response with more bytes of tensors than this is rendered in a thread.
_INLINE_BYTES = 32 << 10

Endpoint = Callable[[Request], Awaitable[Response]]


class KserveHttpApi:
    """Serves /v2, except for /v2/rerank."""

    def __init__(self, servicer: KserveServicer, bodies: BodyReader) -> None:
        self._servicer = servicer
        self._bodies = bodies

    def routes(self) -> list[Route]:
        """Return the routes for the HTTP port."""
        found: list[tuple[str, str, Endpoint]] = [
            ("GET", "/v2", self._server),
            ("GET", "/v2/health/live", self._live),
            ("GET", "/v2/health/ready", self._ready),
        ]
        for model in ("/v2/models/{model:path}/versions/{version}", "/v2/models/{model:path}"):
            found += [
                ("GET", f"{model}/ready", self._model_ready),
                ("GET", f"{model}/config", self._config),
                ("POST", f"{model}/infer", self._infer),
                ("POST", f"{model}/generate", self._generate),
                ("POST", f"{model}/generate_stream", self._generate_stream),
            ]
        found += [
            ("GET", "/v2/models/{model:path}/versions/{version}", self._model),
            ("GET", "/v2/models/{model:path}", self._model),
        ]
        return [Route(path, _mapped(endpoint), methods=[method]) for method, path, endpoint in found]

    async def _server(self, request: Request) -> Response:
        return JSONResponse(as_json(await self._servicer.ServerMetadata(pb.ServerMetadataRequest(), None)))

    async def _live(self, request: Request) -> Response:
        live = await self._servicer.ServerLive(pb.ServerLiveRequest(), None)
        return JSONResponse({"live": live.live})

    async def _ready(self, request: Request) -> Response:
        ready = (await self._servicer.ServerReady(pb.ServerReadyRequest(), None)).ready
        return JSONResponse({"ready": ready}, 200 if ready else 503)

    async def _model_ready(self, request: Request) -> Response:
        name, version = _model_of(request)
        self._servicer.check_model(name, version)
        ready = (await self._servicer.ModelReady(pb.ModelReadyRequest(name=name, version=version), None)).ready
        return JSONResponse({"name": name, "ready": ready}, 200 if ready else 503)

    async def _model(self, request: Request) -> Response:
        name, version = _model_of(request)
        found = await self._servicer.ModelMetadata(pb.ModelMetadataRequest(name=name, version=version), None)
        return JSONResponse(as_json(found))

    async def _config(self, request: Request) -> Response:
        name, version = _model_of(request)
        found = await self._servicer.ModelConfig(pb.ModelConfigRequest(name=name, version=version), None)
        return JSONResponse(as_json(found.config))

    async def _infer(self, request: Request) -> Response:
        name, version = _model_of(request)
        key = check_key(request.headers.get(HEADER))
        length = request.headers.get(_LENGTH)
        if length is not None and not (length.isascii() and length.isdigit() and len(length) < 16):
            raise InvalidArgumentError("must be a whole number", field=_LENGTH)

        def read(data: bytes) -> tuple[pb.ModelInferRequest, BinaryOutputs]:
            return read_infer(data, len(data) if length is None else int(length), name, version)

        native, binary = await self._bodies.read_data(request, read)

        async def respond() -> Response:
            response = await self._servicer.infer(native, key, None, "/v2/infer")
            render = functools.partial(render_infer, response, binary)
            if sum(map(len, response.raw_output_contents)) <= _INLINE_BYTES:
                body, num_json_bytes = render()
            else:
                body, num_json_bytes = await self._bodies.render(render)
            if num_json_bytes is None:
                return Response(body, media_type="application/json")
            headers = {_LENGTH: str(num_json_bytes)}
            return Response(body, headers=headers, media_type="application/octet-stream")

        return CompleteResponse(respond, _refusal)

    async def _generate(self, request: Request) -> Response:
        name, version = _model_of(request)
        key = check_key(request.headers.get(HEADER))
        native = await self._bodies.read(request, lambda body: read_generate(body, name, version, is_stream=False))

        async def respond() -> Response:
            return JSONResponse(render_generate(await self._servicer.infer(native, key, None, "/v2/generate")))

        return CompleteResponse(respond, _refusal)

    async def _generate_stream(self, request: Request) -> Response:
        name, version = _model_of(request)
        key = check_key(request.headers.get(HEADER))
        native = await self._bodies.read(request, lambda body: read_generate(body, name, version, is_stream=True))
        return _Stream(self._servicer, native, key)


class _Stream(StreamedResponse):
    """The events of one request."""

    def __init__(self, servicer: KserveServicer, native: pb.ModelInferRequest, key: str) -> None:
        super().__init__(servicer.keep_alives, is_stream=True)
        self._servicer, self._native, self._key = servicer, native, key

    async def compute(self, events: EventStream) -> Response | None:
        async def put(response: pb.ModelStreamInferResponse) -> None:
            if response.infer_response.outputs:
                await events.begin()
                await events.write(f"data: {dump(render_generate(response.infer_response))}\n\n")

        await self._servicer.stream(self._native, put, None, self._key, "/v2/generate_stream")
        await events.begin()
        await events.write("", more=False)
        return None

    def own_headers(self) -> Mapping[str, str]:
        return {}

    def refusal(self, error: MidstreamError) -> Response:
        return _refusal(error)

    def failure(self, error: MidstreamError) -> str:
        return f"data: {dump({'error': str(error)})}\n\n"


def _model_of(request: Request) -> tuple[str, str]:
    """Return the model and the version in a path."""
    return request.path_params["model"], request.path_params.get("version", "")


def _mapped(endpoint: Endpoint) -> Endpoint:
    """Wrap an endpoint to return errors as KServe's clients expect them, and to refuse query parameters."""

    async def call(request: Request) -> Response:
        try:
            check_parameters(request.query_params, ())
            return await endpoint(request)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:  # noqa: BLE001 (it is logged)
            return _refusal(shown(error))

    return call


def _refusal(error: MidstreamError) -> Response:
    return JSONResponse({"error": str(error)}, http_status(error), headers=retry_headers(error))
