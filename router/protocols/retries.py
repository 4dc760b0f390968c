"""Headers of an HTTP error that say whether and when to repeat the call.

docs/adapters.md ("Clients") lists what clients do with them.
"""

from __future__ import annotations

import math

from midstream.errors import MidstreamError, OverloadedError, StatusCode

# Clients that are told to wait for a minute or longer give up, or wait for their own time instead.
_MAX_WAIT_MS = 59_000
# Time in which a killed process is usually back.
_UNAVAILABLE_S = 2
# Errors that clients would repeat because of their HTTP status, although the result would be the same: the request
# failed (or was quarantined), its own deadline passed, or its id is that of another request.
_FINAL = frozenset({StatusCode.INTERNAL, StatusCode.DEADLINE_EXCEEDED, StatusCode.ALREADY_EXISTS})


def retry_headers(error: MidstreamError) -> dict[str, str]:
    """Return `retry-after` in seconds, `retry-after-ms`, and `x-should-retry: false` where repeating cannot help."""
    if isinstance(error, OverloadedError):
        wait_ms = min(error.retry_after_ms, _MAX_WAIT_MS)
        return {"retry-after": str(math.ceil(wait_ms / 1000)), "retry-after-ms": str(wait_ms)}
    if error.code is StatusCode.UNAVAILABLE:
        return {"retry-after": str(_UNAVAILABLE_S)}
    return {"x-should-retry": "false"} if error.code in _FINAL else {}
