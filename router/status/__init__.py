"""Status of the whole system, for `midstream top` over gRPC and the dashboard over HTTP."""

from __future__ import annotations

from router.status.feed import StatusFeed

__all__ = ["StatusFeed"]
