"""Errors over gRPC: the only module that maps exceptions to statuses, and statuses to exceptions."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from midstream.errors import ExecutionError, MidstreamError, OverloadedError, StatusCode, from_status
from midstream.rpc.target import plain_problem

logger = logging.getLogger(__name__)

# Raises an error if the caller is not allowed to call the method. If it returns a function, that is called at the end
# of the call.
Admit = Callable[[str, grpc.aio.ServicerContext[Any, Any]], Callable[[], None] | None]

# Returns the message of a unary request; it is called after admission, before any of the message is read.
Receive = Callable[[AsyncIterator[Any]], Awaitable[Any]]

# Returns a context that waits for a call's turn among the calls of its caller, and ends with the call.
TakeTurn = Callable[[], contextlib.AbstractAsyncContextManager[None]]

RETRY_AFTER_KEY = "retry-after-ms"
FIELD_KEY = "midstream-field"
# Marks INTERNAL as the service's own status: proxies give the same status to calls whose server they have lost.
_OWN_KEY = "midstream-internal"
_MAX_FIELD_CHARACTERS = 256
# A status message is sent as percent-encoded metadata. Clients accept 8 KiB of metadata by default, in total.
_MAX_DETAIL_BYTES = 4 << 10
_Context = grpc.aio.ServicerContext[Any, Any]
_AdmitCall = Callable[[_Context], Callable[[], None] | None]


def error_from_rpc(error: grpc.RpcError) -> MidstreamError:
    """Return the error that a failed call's status represents, with its field and retry hint."""
    code: grpc.StatusCode = error.code()
    metadata: Any = (
        error.trailing_metadata() or ()
    )  # (key, value) pairs, in the synchronous and the asynchronous API alike
    trailing = {str(key): str(value) for key, value in metadata}
    field = trailing.get(FIELD_KEY, "")
    message = (error.details() or code.name.lower()).removeprefix(f"{field}: ")
    if code is grpc.StatusCode.UNAVAILABLE:
        message = plain_problem(message)
    result = from_status(code.value[0], message, field)
    if isinstance(result, OverloadedError):
        with contextlib.suppress(KeyError, ValueError):
            result.retry_after_ms = int(trailing[RETRY_AFTER_KEY])
    return result


def is_from_service(error: grpc.RpcError) -> bool:
    """Return whether a status INTERNAL comes from the service, and not from a proxy or a broken connection."""
    metadata: Any = error.trailing_metadata() or ()
    return any(key == _OWN_KEY for key, _ in metadata)


def trailing_metadata(error: MidstreamError) -> tuple[tuple[str, str], ...]:
    metadata: list[tuple[str, str]] = []
    if error.field:
        metadata.append((FIELD_KEY, _printable(error.field)))
    if isinstance(error, OverloadedError):
        metadata.append((RETRY_AFTER_KEY, str(error.retry_after_ms)))
    if error.code is StatusCode.INTERNAL:
        metadata.append((_OWN_KEY, "1"))
    return tuple(metadata)


def shorten_details(details: str) -> str:
    """Return as much of a status message as clients accept once it is percent-encoded."""
    num_bytes = 0
    for place, character in enumerate(details):
        is_plain = " " <= character <= "~" and character != "%"
        num_bytes += 1 if is_plain else 3 * len(character.encode("utf-8", "replace"))
        if num_bytes > _MAX_DETAIL_BYTES:
            return details[:place]
    return details


class ErrorMapper(grpc.aio.ServerInterceptor):
    """Maps the exceptions of all methods to statuses.

    If `receive` is given, it reads unary requests. gRPC itself would read them before anything is known about the
    caller.
    """

    def __init__(
        self,
        admit: Admit | None,
        receive: Receive | None = None,
        turn_of: Callable[[str], TakeTurn | None] = lambda method: None,
    ) -> None:
        self._admit = admit
        self._receive = receive
        self._turn_of = turn_of
        self._wrapped: dict[str, tuple[Any, Any]] = {}  # by method: the handler, and its wrapper that maps errors

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        known, wrapped = self._wrapped.get(method, (None, None))
        if known is not handler:
            wrapped = self._wrap(method, handler)
            self._wrapped[method] = handler, wrapped
        return wrapped  # type: ignore[no-any-return]

    def _wrap(self, method: str, handler: Any) -> grpc.RpcMethodHandler[Any, Any]:
        behaviour = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        admit = functools.partial(self._admit, method) if self._admit is not None else None
        wrap = _map_generator if inspect.isasyncgenfunction(behaviour) else _map_coroutine
        receive = None if handler.request_streaming else self._receive
        wrapped = wrap(behaviour, admit, receive, self._turn_of(method) or contextlib.nullcontext)
        # gRPC treats a unary request that `receive` reads as a stream of one message.
        is_stream = handler.request_streaming or receive is not None
        kind = ("stream" if is_stream else "unary", "stream" if handler.response_streaming else "unary")
        make = getattr(grpc, f"{kind[0]}_{kind[1]}_rpc_method_handler")
        return make(  # type: ignore[no-any-return]
            wrapped, request_deserializer=handler.request_deserializer, response_serializer=handler.response_serializer
        )


def _map_coroutine(
    behaviour: Callable[..., Any], admit: _AdmitCall | None, receive: Receive | None, take_turn: TakeTurn
) -> Callable[..., Any]:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        release = None
        try:
            release = admit(context) if admit is not None else None
            message = await receive(request) if receive is not None else request
            async with take_turn():
                response = behaviour(message, context)
                return await response if inspect.isawaitable(response) else response
        except Exception as error:  # noqa: BLE001 (mapped, and logged where unexpected)
            await _abort(error, context)
        finally:
            if release is not None:
                release()

    return call


def _map_generator(
    behaviour: Callable[..., AsyncIterator[Any]],
    admit: _AdmitCall | None,
    receive: Receive | None,
    take_turn: TakeTurn,
) -> Callable[..., AsyncIterator[Any]]:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        release = None
        try:
            release = admit(context) if admit is not None else None
            message = await receive(request) if receive is not None else request
            # The generator is closed explicitly when the caller leaves, so that its `finally` does not wait for garbage
            # collection.
            async with take_turn(), contextlib.aclosing(behaviour(message, context)) as responses:  # type: ignore[type-var]
                async for response in responses:
                    yield response
        except Exception as error:  # noqa: BLE001 (mapped, and logged where unexpected)
            await _abort(error, context)
        finally:
            if release is not None:
                release()

    return call


_STATUS_CODES = {code.value[0]: code for code in grpc.StatusCode}


def _printable(field: str) -> str:
    """Sanitize text for metadata, since some field names are chosen by clients."""
    return "".join(character if " " <= character <= "~" else "?" for character in field[:_MAX_FIELD_CHARACTERS])


async def _abort(error: Exception, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    if isinstance(error, grpc.aio.AbortError | grpc.aio.UsageError):
        raise error
    if isinstance(error, grpc.RpcError):
        error = error_from_rpc(error)
    if isinstance(error, MidstreamError):
        await context.abort(_STATUS_CODES[error.code], shorten_details(str(error)), trailing_metadata(error))
    if context.done():
        # The caller has disconnected; the failure is usually a write to it.
        logger.debug("error after the end of a call", exc_info=error)
        return
    # Internal details are only logged, with the request's id.
    logger.error("unexpected error in a call", exc_info=error)
    unexpected = ExecutionError("internal error; see the log for details")
    await context.abort(grpc.StatusCode.INTERNAL, unexpected.message, trailing_metadata(unexpected))
