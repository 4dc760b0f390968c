"""The HTTP routes that reinforcement-learning libraries call on vLLM's and SGLang's servers, for admins.

As on those servers, unknown fields of a body are ignored, which the header `x-midstream-ignored` reports, and a
body may be empty. Ways to update weights that need a process group with the workers are refused with what to use.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from midstream.errors import ConflictError, InvalidArgumentError, MidstreamError, UnavailableError, UnsupportedError
from protos import weights_pb2
from router.pipeline.generation import FrontDoor
from router.protocols.body_reader import BodyReader
from router.protocols.fields import ignored_header
from router.protocols.openai.body import Body
from router.protocols.openai.endpoints import Endpoint, flag, mapped

logger = logging.getLogger(__name__)

VLLM_MODES = {
    "abort": weights_pb2.PAUSE_MODE_ABORT,
    "wait": weights_pb2.PAUSE_MODE_FINISH,
    "keep": weights_pb2.PAUSE_MODE_KEEP,
}
SGLANG_MODES = {
    "abort": weights_pb2.PAUSE_MODE_ABORT,
    "retract": weights_pb2.PAUSE_MODE_RECOMPUTE,
    "in_place": weights_pb2.PAUSE_MODE_KEEP,
}
PAUSE_PARAMETERS = ("mode", "clear_cache")
SLEEP_PARAMETERS = ("level", "mode")
WAKE_PARAMETERS = ("tags",)
# Paths that are refused: with POST, and what to use instead.
_FROM_DISK = "write the weights to a folder that all workers can read, and call /update_weights_from_disk"
_USE_SLEEP = "use /sleep and /wake_up"
REFUSED = {
    "/init_weight_transfer_engine": _FROM_DISK,
    "/start_weight_update": _FROM_DISK,
    "/update_weights": _FROM_DISK,
    "/finish_weight_update": _FROM_DISK,
    "/init_weights_update_group": _FROM_DISK,
    "/update_weights_from_distributed": _FROM_DISK,
    "/update_weights_from_tensor": _FROM_DISK,
    "/destroy_weights_update_group": _FROM_DISK,
    "/update_weight_version": "give the version in `weight_version` of /update_weights_from_disk",
    "/weight_checker": "GetWeightsVersion over gRPC returns the root of the tree over all bytes of the weights",
    "/collective_rpc": "nothing can be called on workers",
    "/release_memory_occupation": _USE_SLEEP,
    "/resume_memory_occupation": _USE_SLEEP,
}
_LOAD_FORMATS = (None, "", "auto", "safetensors")


class LiveWeightsApi:
    """Translates these routes into administration of the weights."""

    def __init__(self, front: FrontDoor, bodies: BodyReader) -> None:
        self._front, self._weights, self._bodies = front, front.runner.weights, bodies

    def routes(self) -> list[Route]:
        """Return the routes."""
        posts: dict[str, Endpoint] = {
            "/resume": self._resume,
            "/abort_requests": self._abort_requests,
            "/reset_prefix_cache": self._flush,
            "/pause_generation": self._pause_generation,
            "/continue_generation": self._resume,
            "/update_weights_from_disk": self._update,
            "/abort_request": self._abort_request,
            "/flush_cache": self._flush,
            "/get_weight_version": self._version,
        }
        gets: dict[str, Endpoint] = {
            "/is_paused": self._is_paused,
            "/is_sleeping": self._is_sleeping,
            "/weight_info": self._version,
            "/flush_cache": self._flush,
            "/get_weight_version": self._version,
        }
        return [
            Route("/pause", mapped(self._pause, PAUSE_PARAMETERS), methods=["POST"]),
            Route("/sleep", mapped(self._sleep, SLEEP_PARAMETERS), methods=["POST"]),
            Route("/wake_up", mapped(self._wake_up, WAKE_PARAMETERS), methods=["POST"]),
            *(Route(path, mapped(endpoint), methods=["POST"]) for path, endpoint in posts.items()),
            *(Route(path, mapped(endpoint), methods=["GET"]) for path, endpoint in gets.items()),
            *(Route(path, mapped(_refusing(path, advice)), methods=["POST"]) for path, advice in REFUSED.items()),
        ]

    async def _pause(self, request: Request) -> Response:
        query = request.query_params
        flag(query, "clear_cache")  # cached blocks belong to a version, so that none is ever wrong
        await self._weights.pause(_mode(query.get("mode", "abort"), VLLM_MODES))
        return JSONResponse({"status": "paused"})

    async def _pause_generation(self, request: Request) -> Response:
        body = await self._read(request)
        await self._weights.pause(_mode(body.text("mode") or "abort", SGLANG_MODES))
        return _answer({"status": "ok", "message": "generation is paused"}, body)

    async def _resume(self, request: Request) -> Response:
        body = await self._read(request)
        await self._weights.resume()
        return _answer({"status": "resumed"}, body)

    async def _is_paused(self, _: Request) -> Response:
        cells = await self._weights.state()
        return JSONResponse({"is_paused": all(cell.is_paused for cell in cells)})

    async def _is_sleeping(self, _: Request) -> Response:
        cells = await self._weights.state()
        return JSONResponse({"is_sleeping": all(cell.is_sleeping for cell in cells)})

    async def _sleep(self, request: Request) -> Response:
        query = request.query_params
        level = query.get("level", "1")
        if level not in ("1", "2"):
            raise InvalidArgumentError("must be 1 or 2", field="level")
        mode = _mode(query.get("mode", "keep"), VLLM_MODES)
        await self._weights.sleep(weights_pb2.SleepRequest(level=int(level), mode=mode))
        return Response()

    async def _wake_up(self, request: Request) -> Response:
        await self._weights.wake(request.query_params.getlist("tags"))
        return Response()

    async def _abort_requests(self, request: Request) -> Response:
        body = await self._read(request)
        await self._abort(body.texts("request_ids"))
        return _answer({"status": "aborted"}, body)

    async def _abort_request(self, request: Request) -> Response:
        body = await self._read(request)
        name, is_all = body.text("rid"), body.flag("abort_all")
        if not name and not is_all:
            raise InvalidArgumentError("must be set, unless abort_all is", field="rid")
        await self._abort([] if is_all or not name else [name])
        return _answer({"status": "aborted"}, body)

    async def _abort(self, names: list[str]) -> None:
        """Abort these requests, or all of them if there are no names."""
        for name in names:
            await self._front.abort(name)
        if not names:
            was_paused = all(cell.is_paused for cell in await self._weights.state())
            try:
                await self._weights.pause(weights_pb2.PAUSE_MODE_ABORT)
            finally:
                if not was_paused:
                    await self._weights.resume()

    async def _flush(self, request: Request) -> Response:
        text = "Cached blocks belong to the version of the weights that computed them; none has to be flushed.\n"
        return PlainTextResponse(text)

    async def _version(self, _: Request) -> Response:
        cells = await self._weights.state()
        versions = {cell.version.version for cell in cells}
        if len(versions) > 1:
            raise ConflictError(f"cells have different weights: {', '.join(sorted(versions))}; update them again")
        problems = [problem for cell in cells for problem in cell.problems]
        if problems and not any(cell.num_groups for cell in cells):
            raise UnavailableError(f"no worker has the weights: {problems[-1]}")
        return JSONResponse({"weight_version": versions.pop()})

    async def _update(self, request: Request) -> Response:
        body = await self._read(request)
        try:
            path = body.text("model_path")
            if not path:
                raise InvalidArgumentError("must be set", field="model_path")
            if body.text("load_format") not in _LOAD_FORMATS:
                raise InvalidArgumentError("must be auto or safetensors", field="load_format")
            aborts = body.flag("abort_all_requests")
            body.flag("flush_cache")
            update = weights_pb2.UpdateWeightsRequest(
                path=path,
                version=body.text("weight_version") or "",
                on_update=weights_pb2.ON_UPDATE_ABORT if aborts else weights_pb2.ON_UPDATE_RECOMPUTE,
            )
            done = await self._weights.update(update)
        except MidstreamError as error:
            # Some libraries do not look at the status, and would train on tokens of the old weights.
            logger.error("the weights were not changed: %s", error)
            field = {"path": "model_path", "version": "weight_version"}.get(error.field, error.field)
            message = f"{field}: {error.message}" if field else error.message
            return JSONResponse({"success": False, "message": message, "num_paused_requests": 0}, 400)
        message = f"the weights have the version {done.version.version}"
        return _answer({"success": True, "message": message, "num_paused_requests": done.num_requests}, body)

    async def _read(self, request: Request) -> Body:
        return await self._bodies.read_data(request, lambda data: Body.parse(data or b"{}"))


def _mode(name: str, modes: Mapping[str, weights_pb2.PauseMode.ValueType]) -> weights_pb2.PauseMode.ValueType:
    if name not in modes:
        raise InvalidArgumentError(f"must be one of {', '.join(modes)}", field="mode")
    return modes[name]


def _answer(content: dict[str, object], body: Body) -> Response:
    return JSONResponse(content, headers=ignored_header([name for name, _ in body.unread()]))


def _refusing(path: str, advice: str) -> Endpoint:
    async def refuse(_: Request) -> Response:
        logger.error("a client called %s, which is not supported: %s", path, advice)
        raise UnsupportedError(f"is not supported: {advice}", field=path)

    return refuse
