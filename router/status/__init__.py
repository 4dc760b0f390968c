"""What this router knows of the whole system, for those who watch: `midstream top` by gRPC, the dashboard by HTTP."""

from __future__ import annotations

from router.status.feed import StatusFeed

__all__ = ["StatusFeed"]
