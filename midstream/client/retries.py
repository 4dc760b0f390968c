"""Retries of broken calls at other routers."""

from __future__ import annotations

import asyncio
import math

import grpc

from midstream.client.request import naming
from midstream.errors import DeadlineError, MidstreamError, UnavailableError
from midstream.rpc.errors import error_from_rpc, is_from_service

# Statuses of calls whose router dies or drains. CANCELLED comes from the server; after a cancel by the client, the
# status is never read.
_BROKEN = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN})
_MAX_TIMEOUT_S = 1e9
_FIRST_DELAY_S, _LAST_DELAY_S = 0.02, 0.5


def is_broken(error: grpc.RpcError) -> bool:
    """Return whether a call ended because its router or the connection was lost, and not by the service's decision.

    Proxies such as nginx turn a lost router into INTERNAL; the service's own INTERNAL is marked.
    """
    code = error.code()
    return code in _BROKEN or (code is grpc.StatusCode.INTERNAL and not is_from_service(error))


def broken_error(error: grpc.RpcError) -> MidstreamError:
    """Return the error of a broken call, for the case that no other router answers."""
    known = error_from_rpc(error)
    return known if isinstance(known, UnavailableError) else UnavailableError(f"the call was broken: {known.message}")


class Retries:
    """Decides whether to retry, until the deadline and, without progress, for at most `unavailable_timeout_s`."""

    def __init__(self, timeout_s: float | None, unavailable_timeout_s: float) -> None:
        """Set the time limits; `timeout_s` is measured from the first call.

        Raises:
            InvalidArgumentError: `timeout_s` is not a number.
        """
        with naming("timeout_s"):
            if timeout_s is not None and math.isnan(timeout_s):
                raise ValueError("is not a number")
        # gRPC treats a time that it cannot represent as one that has passed.
        self._timeout_s = None if timeout_s is None or timeout_s > _MAX_TIMEOUT_S else timeout_s
        self._unavailable_timeout_s = unavailable_timeout_s
        self._deadline: float | None = None
        self._broken_since: float | None = None
        self._delay_s = 0.0

    def left_s(self) -> float | None:
        """Return the timeout of the next call; None if there is no deadline."""
        if self._timeout_s is None:
            return None
        now = asyncio.get_running_loop().time()
        if self._deadline is None:
            self._deadline = now + self._timeout_s
        return max(self._deadline - now, 0.001)

    def progress(self) -> None:
        """Record that a router has responded."""
        self._broken_since, self._delay_s = None, 0.0

    async def wait(self, error: MidstreamError) -> None:
        """Wait until a broken call, which failed with `error`, should be retried; raise the error if that takes too
        long.
        """
        now = asyncio.get_running_loop().time()
        if self._broken_since is None:
            self._broken_since = now
        if self._deadline is not None and now >= self._deadline:
            raise DeadlineError("the deadline passed") from None
        if now - self._broken_since > self._unavailable_timeout_s:
            raise error from None
        await asyncio.sleep(self._delay_s)
        self._delay_s = min(max(2 * self._delay_s, _FIRST_DELAY_S), _LAST_DELAY_S)
