"""Health of the router: it is unhealthy if it cannot reach the components that requests need."""

from __future__ import annotations

import asyncio
import math

from midstream.rpc.health import Progress
from router.pipeline.cells import Cells
from router.pipeline.detokenizer_pool import DetokenizerPool

_LOOK_S = 0.5
# A killed process restarts sooner than this; meanwhile requests wait here.
UNREACHED_S = 10.0


async def watch_reach(
    cells: Cells, pool: DetokenizerPool, progress: Progress, *, unreached_s: float = UNREACHED_S
) -> None:
    """Report the router as unhealthy until each component has responded once, and whenever one has not for
    `unreached_s`.

    A scheduler has responded when its loads arrive over the connection that requests use; they include its workers.
    """
    loop = asyncio.get_running_loop()
    seen = dict.fromkeys(("no scheduler answers", "no worker is connected", "no detokenizer answers"), -math.inf)
    while True:
        now = loop.time()
        up = [cell for cell in cells.cells.values() if cell.is_up]
        reached = (bool(up), any(cell.has_workers for cell in up), pool.num_live > 0)
        for reason, is_reached in zip(seen, reached, strict=True):
            if is_reached:
                seen[reason] = now
            progress.set_reason(reason, stands=now - seen[reason] > unreached_s)
        await asyncio.sleep(_LOOK_S)
