"""Limits on concurrent calls, in total and per client."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import grpc.aio

from midstream.errors import OverloadedError
from midstream.rpc.errors import Admit
from router.authentication import Authenticator, current_caller

_RETRY_AFTER_MS = 1000
# Limits on watch streams, and on query and control calls; requests are counted separately.
_MAX_WATCHERS, _MAX_WATCHERS_PER_CLIENT = 256, 64
_MAX_CONTROL_CALLS, _MAX_CONTROL_CALLS_PER_CLIENT = 1024, 128
# Health watches need no credentials, and each costs a few kilobytes.
_MAX_HEALTH_WATCHES, _MAX_HEALTH_WATCHES_PER_CLIENT = 2048, 256
_NATIVE, _OPENENGINE = "/midstream.v1.Midstream/", "/openengine.v1."
_KSERVE = "/inference.GRPCInferenceService/"
RESUME = _NATIVE + "Resume"
# Calls that are counted as requests.
_COUNTED_AS_REQUESTS = frozenset(
    {_NATIVE + "Generate", RESUME, _OPENENGINE + "Inference/Generate", _KSERVE + "ModelInfer"}
)
_COUNTED_AS_WATCHERS = frozenset(
    {
        _NATIVE + "GetIterationStats",
        _NATIVE + "SubscribeKvEvents",
        _OPENENGINE + "Control/SubscribeKvEvents",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    }
)
# The status feed itself counts this call, together with watchers over HTTP.
_GET_STATUS = _NATIVE + "GetStatus"
# One stream may carry any number of requests, and a client may abort all of its own requests at once.
_COUNTED_AS_STREAMS = frozenset({_KSERVE + "ModelStreamInfer", _NATIVE + "Abort", _OPENENGINE + "Control/Abort"})
_HEALTH = "/grpc.health.v1.Health/"


def is_query(method: str) -> bool:
    """Return whether a gRPC method does anything other than run or abort requests or report health."""
    runs_or_aborts = method in _COUNTED_AS_REQUESTS or method in _COUNTED_AS_STREAMS or method == _NATIVE + "Embed"
    return not runs_or_aborts and not method.startswith(_HEALTH)


class StreamLimits:
    """Counts open streams."""

    def __init__(self, max_streams: int = 4096, max_streams_per_client: int = 1024) -> None:
        self.num_open = 0
        self._max_streams = max_streams
        self._max_streams_per_client = max_streams_per_client
        self._open: Counter[str] = Counter()

    def take(self, client: str) -> Callable[[], None]:
        """Count a stream of `client`; return a callable to call once when the stream ends. Raises OverloadedError if a
        limit is reached.
        """
        if self.num_open >= self._max_streams:
            raise OverloadedError(
                f"this router has reached its limit of {self.num_open} such streams; try another router",
                retry_after_ms=_RETRY_AFTER_MS,
            )
        if self._open[client] >= self._max_streams_per_client:
            raise OverloadedError(
                f"this client has reached its limit of {self._open[client]} such streams on this router",
                retry_after_ms=_RETRY_AFTER_MS,
            )
        self.num_open += 1
        self._open[client] += 1
        return functools.partial(self._give_back, client)

    def _give_back(self, client: str) -> None:
        self.num_open -= 1
        self._open[client] -= 1
        if not self._open[client]:
            del self._open[client]


def watcher_limits() -> StreamLimits:
    """Return the limits on watch streams, across all protocols."""
    return StreamLimits(_MAX_WATCHERS, _MAX_WATCHERS_PER_CLIENT)


class CallLimits:
    """Counts open gRPC calls by kind, so that no client can use up the limit of the others."""

    def __init__(self, watchers: StreamLimits, max_streams: int = 4096, max_streams_per_client: int = 1024) -> None:
        self._watchers = watchers
        self._streams = StreamLimits(max_streams, max_streams_per_client)
        self._control = StreamLimits(_MAX_CONTROL_CALLS, _MAX_CONTROL_CALLS_PER_CLIENT)
        self._health = StreamLimits(_MAX_HEALTH_WATCHES, _MAX_HEALTH_WATCHES_PER_CLIENT)

    def take(self, method: str) -> Callable[[], None] | None:
        """Count a call of the current caller; return a callable that releases it, or None if such calls are not
        limited. Raises OverloadedError if a limit is reached.
        """
        if method in _COUNTED_AS_REQUESTS or method == _GET_STATUS:
            return None
        limits = self._control
        if method in _COUNTED_AS_WATCHERS:
            limits = self._watchers
        elif method in _COUNTED_AS_STREAMS:
            limits = self._streams
        elif method == _HEALTH + "Watch":
            limits = self._health
        return limits.take(current_caller.get().name)


def admit_within(limits: CallLimits, authenticator: Authenticator) -> Admit:
    """Return the admission check for gRPC calls: authentication, permission, and limits on open calls."""

    def admit(method: str, context: grpc.aio.ServicerContext[Any, Any]) -> Callable[[], None] | None:
        authenticator.admit(method, context)
        return limits.take(method)

    return admit
